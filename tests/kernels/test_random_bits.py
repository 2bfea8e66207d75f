"""numpy, torch and Triton draw the same bits."""

import os

import numpy as np
import pytest
import torch

from phalanx.kernels.random_bits import draw_bits, draw_int32, mix_, shift_right, to_signed
from phalanx.plan import draws

CPU = torch.device("cpu")
ENDS = np.array([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
WORDS = np.concatenate([ENDS, np.random.default_rng(0).integers(0, 2**64, 505, np.uint64)])
KEY = draws.stream_key(3, "layer", 0)


def as_torch(words):
    return torch.from_numpy(words.view(np.int64))


def test_the_mixer_is_splitmix64():
    # the first numbers of splitmix64 from seed 1234567, as published with the algorithm
    counters = np.array([1234567], np.uint64) + draws.GOLDEN * np.arange(1, 4, dtype=np.uint64)
    assert draws.splitmix64(counters).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_torch_mixes_as_numpy_does_and_in_place():
    words = as_torch(WORDS.copy())
    assert mix_(words) is words
    assert np.array_equal(words.numpy().view(np.uint64), draws.splitmix64(WORDS))


def test_a_shift_to_the_right_is_unsigned():
    for bits in (1, 31, 40):
        shifted = shift_right(as_torch(WORDS), bits).numpy().view(np.uint64)
        assert np.array_equal(shifted, WORDS >> np.uint64(bits))


def test_torch_draws_the_plans_bits_for_one_key_or_several():
    expected = draws.draw_bits(3, "layer", WORDS.view(np.int64))
    key = to_signed(int(KEY))
    several = torch.tensor([5, key])[:, None]
    assert np.array_equal(draw_bits(as_torch(WORDS), key).numpy().view(np.uint64), expected)
    assert np.array_equal(draw_bits(as_torch(WORDS), several)[1].numpy().view(np.uint64), expected)


def test_two_elements_share_a_word_the_lower_half_first():
    halves = draws.draw_bits(3, "layer", np.arange(1005)).view(np.int32)
    assert np.array_equal(draw_int32(int(KEY), 0, 2010, CPU).numpy(), halves)
    assert np.array_equal(draw_int32(int(KEY), 1000, 7, CPU).numpy(), halves[1000:1007])


def test_triton_mixes_and_draws_as_numpy_does():
    pytest.importorskip("triton")
    if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    from mix_kernel import mix_and_draw

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words, key = as_torch(WORDS).to(device), as_torch(np.array([KEY])).to(device)
    mixed = torch.empty_like(words)
    drawn = torch.empty(len(WORDS), dtype=torch.int32, device=device)
    mix_and_draw[(1,)](words, mixed, drawn, key, COUNT=len(WORDS))
    assert np.array_equal(mixed.cpu().numpy().view(np.uint64), draws.splitmix64(WORDS))
    expected = draws.draw_bits(3, "layer", np.arange(len(WORDS) // 2)).view(np.int32)
    assert np.array_equal(drawn.cpu().numpy(), expected)
