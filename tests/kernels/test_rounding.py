"""Rounding to 16 bits: unbiased, repeatable, and the same wherever and however a tensor lies."""

import os
from importlib import import_module

import numpy as np
import pytest
import torch

from phalanx.kernels import rounding
from phalanx.kernels.rounding import CHUNK, round_each
from phalanx.plan.draws import stream_key
from small_gpu import not_waiting
from small_rounding import round_to

BF16, FP16 = torch.bfloat16, torch.float16
TYPES = [BF16, FP16]
KEY = int(stream_key(1, "test", 0))
COUNT = 10**6
gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu_only])]


def stochastically(values, dtype, key=KEY, saturate=False):
    return round_to(values, dtype, key=key, saturate=saturate, stochastic=True)


def to_nearest(values, dtype, saturate=False):
    return round_to(values, dtype, key=KEY, saturate=saturate, stochastic=False)


def neighbours(value, dtype):
    """The largest number of the type that is not above a positive value, and the next one."""
    bits = torch.tensor(value, dtype=torch.float64).to(dtype).view(torch.int16)
    if bits.view(dtype).double() > value:
        bits = bits - 1
    return bits.view(dtype).double().item(), (bits + 1).view(dtype).double().item()


def float32(value):
    return torch.tensor(value, dtype=torch.float32).item()


VALUES = {
    BF16: [
        1.001, 1 / 3, 123456.7, 1e-30, 2.0**-126 * 1.003, 2.0**-127 * 1.23, 2.0**-130 * 1.7,
        2.0**-133 * 0.3, 2.0**-149, torch.finfo(BF16).max * (1 - 2.0**-10),
    ],
    FP16: [
        1.0001, 1 / 3, 1234.56, 2.0**-14 * 1.0003, 2.0**-14 * 0.9999, 2.0**-15 * 1.2345,
        2.0**-20 * 1.7, 2.0**-23 * 1.9, 2.0**-24 * 1.3, 2.0**-24 * 0.7, 2.0**-31, 2.0**-37 * 1.5,
        65503.0, 65500.3,
    ],
}  # fmt: skip


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("dtype", "value"), [(t, v) for t in TYPES for v in VALUES[t]])
def test_the_mean_of_a_million_roundings_is_the_value(dtype, value, sign):
    value = float32(value)
    low, high = neighbours(value, dtype)
    key = int(stream_key(COUNT, str(value), 0))
    out = stochastically(torch.full((COUNT,), sign * value), dtype, key)
    ups, downs = ((out == sign * end).sum().item() for end in (high, low))
    assert ups + downs == COUNT
    share = (value - low) / (high - low)
    deviation = (share * (1 - share) / COUNT) ** 0.5
    assert 0 < share < 1
    assert abs(ups / COUNT - share) <= 4 * deviation


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_number_of_the_type_stays_as_it_is(dtype, stochastic):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for key in range(5):
        out = round_to(every.float(), dtype, key=key, saturate=True, stochastic=stochastic)
        number = ~every.isnan()
        assert torch.equal(out.view(torch.int16)[number], every.view(torch.int16)[number])
        assert torch.equal(out.isnan(), ~number) and (~number).sum() > 100


@pytest.mark.parametrize("dtype", TYPES)
def test_stochastic_rounding_goes_to_a_neighbour(dtype):
    bits = torch.from_numpy(
        np.random.default_rng(0).integers(0, 2**32, 10**6, np.uint32).view("i4")
    )
    values = bits.view(torch.float32)
    values = values[values.abs() <= torch.finfo(dtype).max]
    out = stochastically(values, dtype).float()
    spacing = (
        torch.maximum(
            values.abs().frexp().exponent.double(),
            torch.tensor(float(np.log2(torch.finfo(dtype).tiny)) + 1),
        )
        .sub(1)
        .exp2()
        * torch.finfo(dtype).eps
    )
    assert len(values) > 10**5 and (out != values).any()
    assert ((out.double() - values.double()).abs() < spacing).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sign_changes_nothing_but_the_sign(dtype):
    values = torch.randn(10**5, generator=torch.manual_seed(0)) * 1e-5
    up, down = stochastically(values, dtype), stochastically(-values, dtype)
    assert torch.equal(
        up.view(torch.int16) ^ down.view(torch.int16), torch.full_like(up, -0.0).view(torch.int16)
    )


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_beyond_the_largest_number_there_is_that_number_or_infinity(dtype, stochastic):
    largest, infinity = torch.finfo(dtype).max, float("inf")
    far = largest * (1 + torch.finfo(dtype).eps * 0.3)
    beyond = torch.tensor([far, torch.finfo(torch.float32).max]).repeat(1000)
    for sign in (1, -1):
        how = {"key": KEY, "stochastic": stochastic}
        cut = round_to(sign * beyond, dtype, saturate=True, **how)
        assert (cut == sign * largest).all()
        gone = round_to(sign * beyond, dtype, saturate=False, **how)
        assert (gone == sign * infinity).all()


def test_just_beyond_the_largest_number_the_nearest_is_that_number_still():
    just = torch.tensor([65504.0 + 10])
    assert to_nearest(just, FP16).item() == 65504.0
    assert stochastically(just, FP16).item() == float("inf")
    assert stochastically(just, FP16, saturate=True).item() == 65504.0


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_infinity_and_nan_stay(dtype, stochastic, saturate):
    inf = float("inf")
    quiet = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32)
    values = torch.cat([torch.tensor([inf, -inf]), quiet.view(torch.float32)])
    out = round_to(values, dtype, key=KEY, saturate=saturate, stochastic=stochastic)
    assert out[:2].tolist() == [inf, -inf] and out[2:].isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_to_nearest_is_what_torch_does(dtype):
    values = torch.randn(10**5, generator=torch.manual_seed(0)) * 1e-4
    assert torch.equal(to_nearest(values, dtype), values.to(dtype))
    assert torch.equal(to_nearest(values, dtype, saturate=True), values.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_rounding_repeats_and_another_key_gives_another(dtype):
    values = torch.randn(10**5, generator=torch.manual_seed(0))
    first = stochastically(values, dtype, key=5)
    assert torch.equal(first, stochastically(values, dtype, key=5))
    assert (first != stochastically(values, dtype, key=6)).float().mean() > 0.2
    assert torch.equal(
        stochastically(values, dtype, key=2**64 - 3), stochastically(values, dtype, key=-3)
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_an_elements_random_bits_depend_on_its_number_alone(dtype):
    values = torch.full((2 * CHUNK + 3,), 1 / 3)
    whole = stochastically(values, dtype)
    assert torch.equal(stochastically(values[:-2], dtype), whole[:-2])
    halves = whole[:CHUNK], whole[CHUNK : 2 * CHUNK]
    assert (halves[0] != halves[1]).float().mean() > 0.2


LAYOUTS = {
    "plain": lambda t: t.contiguous(),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "turned": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_memory_layout_changes_nothing_and_is_kept(dtype, layout, stochastic):
    values = torch.randn(5, 7, 3, 4, generator=torch.manual_seed(0))
    turned = LAYOUTS[layout](values)
    how = {"key": KEY, "saturate": False, "stochastic": stochastic}
    out = round_to(turned, dtype, **how)
    assert torch.equal(out, round_to(values, dtype, **how)) and out.stride() == turned.stride()


def test_a_list_is_rounded_each_with_its_key_into_its_place():
    values = [torch.randn(4, 3, 3, 3), torch.randn(7), torch.randn(()), torch.randn(0)]
    values[0] = values[0].contiguous(memory_format=torch.channels_last)
    targets = [torch.empty_like(value, dtype=BF16) for value in values]
    places = [target.data_ptr() for target in targets]
    counts = round_each(values, targets, keys=[1, 2, 3, 4], saturate=False, stochastic=True)
    assert not counts.any(), "without gradients nothing is counted"
    assert [target.data_ptr() for target in targets] == places
    for value, target, key in zip(values, targets, [1, 2, 3, 4], strict=True):
        assert torch.equal(target, stochastically(value, BF16, key=key))


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_lost_is_counted(dtype, device, stochastic):
    nan, inf, little = float("nan"), float("inf"), 2.0**-20  # too little for this key's draw
    targets = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0, -0.0, nan], dtype=dtype, device=device)
    exact = torch.tensor([1.0, 1.0 + little, 3.0, 0.0, nan, 0.0, 1.0], device=device)
    gradients = torch.tensor([0.0, -0.0, inf, nan, -inf, 1.0, 2.0**-14], dtype=dtype, device=device)
    how = {"keys": [KEY], "saturate": False, "stochastic": stochastic}
    counts = round_each([exact], [targets], [gradients], **how)
    # 2 from 1 to 3, the little beside 1; what is not finite covers no distance
    assert counts.tolist() == [1, 4, 2, 3, 7, 2 + little, 2] and counts.device.type == device
    assert targets[:4].tolist() == [1.0, 1.0, 3.0, 0.0] and targets[4].isnan() and targets[6] == 1.0


def test_counts_add_up_over_tensors():
    values = [torch.full((1000,), 1 + 2.0**-12), torch.full((500,), 4.0)]
    targets = [torch.ones(1000, dtype=BF16), torch.ones(500, dtype=BF16)]
    gradients = [torch.zeros(1000, dtype=BF16), torch.ones(500, dtype=BF16)]
    how = {"keys": [1, 2], "saturate": False, "stochastic": False}
    counts = round_each(values, targets, gradients, **how).tolist()
    assert counts == [1000, 1500, 1000, 0, 1500, 1000 * 2.0**-12 + 1500, 1500]
    assert (targets[0] == 1).all() and (targets[1] == 4).all()


# --- by the kernel ---


def every_kind(count=3 * 10**5):
    """Numbers of all sizes and kinds, in two layouts."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, np.uint32).view("i4")
    anything = torch.from_numpy(bits).view(torch.float32)
    small = torch.randn(32, 24, 3, 3, generator=torch.manual_seed(0)) * 2.0**-15
    tiny = torch.randn(9999, generator=torch.manual_seed(1)) * 2.0**-25
    edge = torch.linspace(65400, 65600, 5000)
    ties = torch.arange(-(2**15), 2**15).to(torch.int16).view(FP16).float() * (1 + 2.0**-11)
    last = LAYOUTS["channels last"](small)
    return [anything, small, last, tiny, edge, ties, small[:0], small[0, 0, 0, 0]]


def bits_of(tensor):
    """Bits on the host, in plain order; all kinds of NaN are one."""
    host = tensor.cpu().contiguous()
    return torch.where(host.isnan(), 0x7FFF, host.view(torch.int16))


def rounded_on(device, values, dtype, **how):
    """Bits and counts of all values at once."""
    values = [value.to(device) for value in values]
    targets, gradients = ([value.to(dtype) for value in values] for _ in range(2))
    counts = round_each(values, targets, gradients, keys=range(len(values)), **how)
    return [bits_of(target) for target in targets], counts.tolist()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, where a GPU says nothing
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_gives_the_same_bits_and_counts(dtype, stochastic, saturate, monkeypatch):
    how = {"stochastic": stochastic, "saturate": saturate}
    expected, counts = rounded_on("cpu", every_kind(20_000), dtype, **how)
    kernel = import_module("phalanx.kernels.rounding_fused").round_fused
    monkeypatch.setattr(rounding, "_find_fused_for", lambda *_: kernel)
    given, given_counts = rounded_on("cpu", every_kind(20_000), dtype, **how)
    for number, (one, two) in enumerate(zip(expected, given, strict=True)):
        assert torch.equal(one, two), number
    assert counts[:5] == given_counts[:5] and min(counts[:6]) > 0
    assert given_counts[5:] == pytest.approx(counts[5:], rel=1e-9)  # floats, in another order


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_gpu_gives_the_same_bits_and_counts(dtype, stochastic, saturate):
    how = {"stochastic": stochastic, "saturate": saturate}
    expected, counts = rounded_on("cpu", every_kind(), dtype, **how)
    given, given_counts = rounded_on("cuda", every_kind(), dtype, **how)
    for number, (one, two) in enumerate(zip(expected, given, strict=True)):
        assert torch.equal(one, two), number
    assert counts[:5] == given_counts[:5] and min(counts[:6]) > 0
    assert given_counts[5:] == pytest.approx(counts[5:], rel=1e-9)  # floats, in another order


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_gpu_gives_the_same_bits_with_and_without_its_kernel(dtype, layout, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(rounding, "find_fused", lambda *_: None)
    values = LAYOUTS[layout](torch.randn(5, 7, 3, 4, generator=torch.manual_seed(0)) * 1e-5)
    out = stochastically(values.cuda(), dtype)
    assert torch.equal(out.cpu(), stochastically(values, dtype)) and out.stride() == values.stride()


@pytest.mark.gpu
@gpu_only
def test_the_gpu_is_not_waited_for():
    pytest.importorskip("triton")
    values = [value.cuda() for value in every_kind()]
    targets, gradients = ([value.to(BF16) for value in values] for _ in range(2))
    how = {"keys": range(len(values)), "saturate": True, "stochastic": True}
    round_each(values, targets, gradients, **how)  # the first time builds the kernel and its tables
    with not_waiting():
        round_each(values, targets, gradients, **how)
