"""How long a GPU waits for images that the cores decode, and who decodes from then on."""

from time import perf_counter, sleep

import pytest
import torch

from phalanx.data.loading import decoder_choice
from phalanx.data.loading.decoder_choice import DecoderChoice
from phalanx.data.loading.gpu_share import ImageCheck

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NEW = ImageCheck(since=0)


class Clock:
    """The time of a host and of a stream that it gives work to, in ms."""

    def __init__(self):
        self.now = self.free_at = 0.0

    def work(self, ms):
        """Give the stream something to do; the host goes on at once."""
        self.free_at = max(self.now, self.free_at) + ms

    def record_event(self, event):
        event.at = max(self.now, self.free_at)
        return event


class Event:
    """A time on the stream of a Clock."""

    def __init__(self, *, enable_timing):
        assert enable_timing

    def elapsed_time(self, later):
        return later.at - self.at

    def synchronize(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    """In the place of a host's clock and a GPU's."""
    found = Clock()
    monkeypatch.setattr(decoder_choice, "perf_counter", lambda: found.now / 1e3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def measure(clock, *, decode_ms, train_ms, score_ms=0, every=50, steps=100):
    """What is found if images and steps take so long; scoring follows each so many steps."""

    def decode():
        ready = clock.now
        for number in range(steps):
            ready = max(ready + decode_ms, clock.now - 2 * decode_ms)  # at most two steps ahead
            clock.now = max(clock.now, ready, clock.free_at - 2 * train_ms)
            yield number

    choice = DecoderChoice(CUDA, NEW)
    for number in choice.watch(decode()):
        clock.work(train_ms)
        if score_ms and number % every == every - 1:
            clock.now = clock.free_at = max(clock.now, clock.free_at) + score_ms
    choice.conclude(lambda value: [value], is_over=True)
    return choice


def test_the_share_of_the_time_spent_waiting(clock):
    assert measure(clock, decode_ms=30, train_ms=10).waited == pytest.approx(2 / 3, abs=0.02)
    assert measure(clock, decode_ms=25, train_ms=20).waited == pytest.approx(0.2, abs=0.02)
    assert measure(clock, decode_ms=5, train_ms=10).waited == 0


def test_scoring_is_neither_work_nor_a_wait(clock):
    usual = measure(clock, decode_ms=30, train_ms=10).waited
    scored = measure(clock, decode_ms=30, train_ms=10, score_ms=6e4).waited
    assert scored == pytest.approx(usual, abs=0.05)
    assert measure(clock, decode_ms=5, train_ms=10, score_ms=6e4).waited < 0.01


def test_a_long_wait_makes_the_gpu_decode(clock):
    long, short = (measure(clock, decode_ms=ms, train_ms=10) for ms in (20, 11))
    assert long.gpu_decodes and not short.gpu_decodes
    assert long.describe(7) == (
        "the GPU decodes JPEGs from step 8 on: the GPU spent 50% of its time waiting for images"
    )
    assert short.describe(1999) == (
        "the cores go on decoding from step 2,000 on: the GPU spent 9% of its time waiting for "
        "images"
    )


def test_too_few_steps_tell_nothing(clock):
    few = measure(clock, decode_ms=20, train_ms=10, steps=9)
    assert few.waited is None and not few.gpu_decodes
    assert few.describe(9) == (
        "the cores go on decoding from step 10 on: too few steps to tell how long the GPU waits "
        "for images"
    )
    assert measure(clock, decode_ms=20, train_ms=10, steps=10).waited == 0.5


def test_a_checkpoint_after_the_last_step_decides(clock):
    choice = DecoderChoice(CUDA, NEW)
    for done in choice.watch(iter(range(10))):
        clock.now += 20
        clock.work(10)
        choice.conclude(lambda value: [value], is_over=done == 9)  # of which nine are over
    choice.conclude(lambda value: pytest.fail("it is decided"), is_over=True)
    assert choice.is_decided and choice.waited is None


def test_a_measurement_that_may_go_on_needs_more_steps(clock):
    choice = DecoderChoice(CUDA, NEW)
    for done in choice.watch(iter(range(250))):  # steps, each of which counts when the next begins
        clock.now += 5
        clock.work(5)
        choice.conclude(lambda value: [value], is_over=False)
        assert (choice.waited is None) == (done < 200)


def test_all_ranks_decide_alike_and_once(clock):
    choice = measure(clock, decode_ms=5, train_ms=10)
    choice.is_decided = False
    choice.conclude(lambda value: [value, None, 0.7], is_over=True)
    assert choice.waited == 0.7 and choice.gpu_decodes
    choice.conclude(lambda value: pytest.fail("it is known"), is_over=True)


def test_what_the_run_has_measured_is_not_measured_again():
    choice = DecoderChoice(CPU, ImageCheck(0, True, 0.3))
    assert list(choice.watch(iter("abc"))) == ["a", "b", "c"]
    choice.conclude(lambda value: pytest.fail("it is known"), is_over=True)
    assert choice.gpu_decodes and not DecoderChoice(CPU, ImageCheck(0, True, 0.2)).gpu_decodes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_waits_for_images_is_told_from_one_that_is_busy():
    def wait(decode_ms, train_ms, *, between_ms=0, every=1):
        """The wait that is measured if images and steps take so long, and something between."""
        choice = DecoderChoice(CUDA, NEW)
        numbers, cycles = range(40), 1.9e6 * train_ms

        def decode():
            ready = perf_counter()
            for number in numbers:  # ahead of its use, as a thread would
                ready = ready + decode_ms / 1e3
                sleep(max(0, ready - perf_counter()))
                yield number

        for number in choice.watch(decode()):
            torch.cuda._sleep(int(cycles))
            if between_ms and number % every == every - 1:
                torch.cuda.synchronize()
                sleep(between_ms / 1e3)
        choice.conclude(lambda value: [value], is_over=True)
        return choice.waited

    wait(1, 1)
    assert wait(30, 2) > 0.8
    assert wait(1, 15) < 0.02
    assert wait(1, 15, between_ms=20) < 0.1, "scoring between steps is no wait for images"
    assert wait(30, 2, between_ms=100, every=20) > 0.7, "nor is it work"
