"""Whether the GPU decodes JPEGs: if it has waited long for images while the cores decoded them."""

import json
from time import perf_counter, sleep

import pytest
import torch

from phalanx.data.loading.decoder_trial import DecoderTrial

CPU = torch.device("cpu")


def decide(trial, first):
    """What a process on its own decides."""
    return trial.decide(first, gather=lambda value: [value], writes=True)


def test_the_run_keeps_the_answer(tmp_path):
    file = tmp_path / "decoder.json"
    file.write_text('{"7": 0.5}')
    trial = DecoderTrial(CPU, tmp_path)
    assert list(trial.watch(iter("abc"))) == ["a", "b", "c"]
    assert decide(trial, 7) == (
        True,
        "the GPU decodes JPEGs from step 8 on: the GPU has waited for images 50% of its time",
    )
    assert decide(trial, 3) == (
        False,
        "the cores go on decoding from step 4 on: the GPU has waited for images 0% of its time",
    )
    assert json.loads(file.read_text()) == {"7": 0.5, "3": 0.0}
    file.write_text('{"3": 0.9}')
    again = DecoderTrial(CPU, tmp_path)
    assert decide(again, 3)[0] and not decide(again, 7)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_waits_for_images_is_told_from_one_that_is_busy():
    def measure(decode_ms, train_ms, *, between_ms=0):
        """The wait that is measured if images and steps take so long, and something between."""
        trial = DecoderTrial(torch.device("cuda"), None)
        numbers, cycles = range(40), 1.9e6 * train_ms

        def decode():
            ready = perf_counter()
            for number in numbers:  # ahead of its use, as a thread would
                ready = ready + decode_ms / 1e3
                sleep(max(0, ready - perf_counter()))
                yield number

        for _ in trial.watch(decode()):
            torch.cuda._sleep(int(cycles))
            if between_ms:
                torch.cuda.synchronize()
                sleep(between_ms / 1e3)
        return trial.measure_wait()

    measure(1, 1)
    assert measure(30, 2) > 0.8
    assert measure(1, 15) < 0.02
    assert measure(1, 15, between_ms=20) < 0.1, "scoring between steps is no wait for images"
