"""The learning rate, against closed forms and the numbers of the programs before this one."""

import math
import random
from fractions import Fraction
from itertools import pairwise, product
from math import cos, pi

import pytest

from phalanx.config.read import read_settings
from phalanx.config.train_options import ScheduleConfig
from phalanx.plan.machine_choice import MachineChoice
from phalanx.plan.plan import DatasetCounts, make_plan
from phalanx.plan.schedule import (
    SHAPES,
    WARMUPS,
    Schedule,
    ScheduleOptions,
    find_peak_lr,
    make_schedule,
)
from phalanx.units import RunLength, parse_duration

IMAGENET = 1_281_167


def lr_at(step, **options):
    """The rate at one step of a schedule with these options."""
    return Schedule(**options).lr(step)


def test_a_cosine_goes_from_the_peak_to_nothing():
    rates = [lr_at(s, shape="cosine", peak=0.4, warmup=0, total=100) for s in range(101)]
    assert rates == pytest.approx([0.2 * (1 + cos(pi * s / 100)) for s in range(101)], abs=1e-15)
    assert (rates[0], rates[50], rates[100]) == pytest.approx((0.4, 0.2, 0.0))
    assert all(a > b for a, b in pairwise(rates))


def test_a_constant_stays():
    rates = {lr_at(s, shape="constant", peak=0.3, warmup=0, total=10) for s in range(30)}
    assert rates == {0.3}


@pytest.mark.parametrize("shape", SHAPES)
def test_warmup_multiplies_the_running_schedule(shape):
    def rate(step: int, warmup: int) -> float:
        return lr_at(step, shape=shape, peak=0.5, warmup=warmup, total=40)

    for step in range(41):
        share = min(1.0, step / 8)
        assert rate(step, 8) == pytest.approx(share * rate(step, 0), abs=1e-15), step
    assert rate(0, 8) == 0.0
    assert rate(8, 8) == rate(8, 0), "the schedule is not shifted"


def test_warmup_may_last_the_whole_run():
    rates = [lr_at(s, shape="constant", peak=1.0, warmup=4, total=4) for s in range(5)]
    assert rates == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_plan_uses_the_options_it_was_given():
    flags = {"lr": "0.2", "warmup-epoch": "10st", "lr-schedule": "constant", "steps": "100"}
    facts = DatasetCounts(train_images=8000, valid_images=10, classes=10)
    chosen = MachineChoice(device="cpu", precision="32.32", threads=1)
    plan = make_plan(read_settings("demo", flags).config, facts, chosen)
    assert [plan.lr(step) for step in (0, 5, 10, 99)] == [0.0, 0.1, 0.2, 0.2]


def test_cosine_and_constant_keep_the_bits_of_earlier_releases():
    for total, warmup, peak in product((1, 7, 1000, 78125), (0, 1, 7), (0.1, 0.2, 2.0)):
        for step in {0, 1, 3, total // 3, total - 1, total, total + 2}:
            share = 0.5 * (1 + cos(pi * min(1.0, step / total)))
            for shape, rate in (("cosine", peak * share), ("constant", peak * 1.0)):
                warm = rate * step / warmup if step < warmup else rate
                if warmup <= total:
                    found = lr_at(step, shape=shape, peak=peak, warmup=warmup, total=total)
                    assert found.hex() == warm.hex(), (shape, step, total, warmup, peak)


# --- shapes ---

SAMPLES = {
    "step": Schedule(
        shape="step",
        peak=0.8,
        total=60,
        milestones=(Fraction(20), Fraction("40.5")),
        phases=(1.0, 0.1, 0.03),
    ),
    "cosine": Schedule(shape="cosine", peak=0.8, total=60, end_ratio=0.25, length=40),
    "exponential": Schedule(
        shape="exponential", peak=0.8, total=60, decay=0.9, period=Fraction("2.5")
    ),
    "polynomial": Schedule(shape="polynomial", peak=0.8, total=60, end_ratio=0.01, power=3.0),
    "constant": Schedule(shape="constant", peak=0.8, total=60),
}
REFERENCES = {
    "step": lambda t: 0.8 if t < 20 else 0.08 if t < 41 else 0.024,
    "cosine": lambda t: 0.2 + 0.6 * math.cos(math.pi * min(t, 40) / 80) ** 2,
    "exponential": lambda t: 0.8 * math.exp(t / 2.5 * math.log(0.9)),
    "polynomial": lambda t: 0.008 + 0.792 * ((60 - t) / 60) ** 3,
    "constant": lambda t: 0.8,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_its_closed_form(shape):
    found = [SAMPLES[shape].lr(step) for step in range(61)]
    assert found == pytest.approx([REFERENCES[shape](step) for step in range(61)], abs=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
def test_past_the_end_the_rate_stays(shape):
    assert SAMPLES[shape].lr(61) == SAMPLES[shape].lr(1000) == SAMPLES[shape].lr(60)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rate_depends_on_the_step_alone(shape):
    steps = list(range(70))
    straight = [SAMPLES[shape].lr(step) for step in steps]
    random.Random(1).shuffle(steps)
    mixed = {step: SAMPLES[shape].lr(step) for step in steps}
    assert [mixed[step] for step in range(70)] == straight


def scheduled(clock: RunLength, peak: float = 1.0, **options: object) -> Schedule:
    """A schedule from options as a user writes them."""
    read = {"warmup": parse_duration, "length": parse_duration, "period": parse_duration}
    given = {name: read[name](value) if name in read else value for name, value in options.items()}
    return make_schedule(ScheduleOptions(**given), peak, clock)


# --- warm-up: sections 1.2 and 8 (TF2, "schedules"), 1.3 (TF1 polynomial) ---


def warm(mode: str, warmup: str = "9st") -> Schedule:
    return scheduled(
        RunLength(100, Fraction(10)),
        0.4,
        shape="cosine",
        warmup=warmup,
        warmup_mode=mode,
        length="80st",
    )


def plain_cosine(step: int) -> float:
    return 0.4 * 0.5 * (1 + cos(pi * min(step, 80) / 80))


def test_a_shift_delays_the_schedule():
    rates = [warm("shift").lr(step) for step in range(100)]
    assert (rates[0], rates[1], rates[4]) == pytest.approx((0.04, 0.08, 0.2), abs=1e-15)
    assert rates[9:] == pytest.approx([plain_cosine(step) for step in range(91)], abs=1e-15)


def test_a_mask_lets_the_schedule_run():
    rates = [warm("mask").lr(step) for step in range(100)]
    assert rates[4] == pytest.approx(plain_cosine(4) / 2, abs=1e-15)
    expected = [plain_cosine(step) * min(1, (step + 1) / 10) for step in range(100)]
    assert rates == pytest.approx(expected, abs=1e-15)


def test_a_shifted_ramp_begins_at_nothing():
    rates = [warm("ramp-shift").lr(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.4 * step / 9 for step in range(10)], abs=1e-15)
    assert rates[9:] == pytest.approx([plain_cosine(step) for step in range(91)], abs=1e-15)


@pytest.mark.parametrize("mode", WARMUPS)
def test_no_warmup_is_no_warmup_in_any_mode(mode):
    rates = [warm(mode, "0ep").lr(step) for step in range(100)]
    assert rates == pytest.approx([plain_cosine(step) for step in range(100)], abs=1e-15)


def test_a_schedule_that_waits_still_ends_with_the_run():
    clock = RunLength(100, Fraction(10))
    shifted = scheduled(clock, shape="cosine", warmup="20%", warmup_mode="shift")
    assert (shifted.lr(20), shifted.lr(60), shifted.lr(100)) == pytest.approx((1, 0.5, 0))


# --- how often the rate changes ---


def test_a_staircase_holds_the_rate_of_an_epochs_first_step():
    # TensorFlow 2: a tread of 2; step -> step // U * U, warm-up included
    plain = scheduled(RunLength(20, Fraction(2)), warmup="6st", warmup_mode="mask")
    stairs = scheduled(RunLength(20, Fraction(2)), warmup="6st", warmup_mode="mask", staircase=True)
    assert [stairs.lr(step) for step in range(20)] == [plain.lr(s // 2 * 2) for s in range(20)]


def test_a_staircase_follows_epochs_that_end_between_steps():
    stairs = scheduled(RunLength(10, Fraction(10, 3)), shape="cosine", staircase=True)
    treads = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    expected = [0.5 * (1 + cos(pi * tread / 3)) for tread in treads]
    assert [stairs.lr(step) for step in range(10)] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("freq", ["1", "4", "1/2", "0.424", "16", "37"])
def test_a_rate_is_refreshed_so_often_an_epoch(freq):
    times, epochs, per_epoch = Fraction(freq), 12, Fraction(25, 2)
    held = scheduled(RunLength(150, per_epoch), freq=times)
    for step in range(150):
        index = math.floor(step / per_epoch * times)  # PyTorch: floor of e * f
        expected = 0.5 * (1 + cos(pi * float(index / (epochs * times))))
        assert held.lr(step) == pytest.approx(expected, abs=1e-15), step


def test_a_refresh_never_lags_however_often_it_is_asked_for():
    # PyTorch: 16 times an epoch of 10 steps fell 60 refreshes behind over 10 epochs
    clock = RunLength(100, Fraction(10))
    often, always = scheduled(clock, freq=Fraction(16)), scheduled(clock)
    for step in range(101):
        assert often.lr(step) == pytest.approx(always.lr(step), abs=0.011), step
    assert often.lr(100) == 0.0


def test_a_last_period_still_learns_and_drops_come_on_time():
    held = scheduled(RunLength(50, Fraction(10)), freq=Fraction(1))
    assert held.lr(49) == pytest.approx(0.5 * (1 + cos(pi * 0.8)))
    drops = scheduled(
        RunLength(50, Fraction(10)),
        shape="step",
        freq=Fraction(1),
        milestones=(parse_duration("3ep"),),
    )
    assert (drops.lr(29), drops.lr(30)) == (1.0, 0.1)


def test_a_drop_between_two_steps_is_not_lost_to_the_refresh():
    clock = RunLength(10, Fraction(10, 3))
    drops = scheduled(
        clock, shape="step", freq=Fraction(1), milestones=(parse_duration("1ep"),), decay=(0.5,)
    )
    assert [drops.lr(step) for step in range(6)] == [1, 1, 1, 1, 0.5, 0.5]


# --- PyTorch Lightning: values of its tests ---


def test_the_rates_of_pl_resnet50():
    clock = RunLength(7800, Fraction(78))
    schedule = scheduled(clock, 2.0, shape="cosine", warmup="5ep", freq=Fraction(16))
    expected = {
        1: 0.399901, 2.5: 0.998459, 5: 1.987688, 10: 1.951057, 50: 1.0, 75: 0.292893, 90: 0.048943,
    }  # fmt: skip
    found = {epoch: schedule.lr(round(epoch * 78)) for epoch in expected}
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_rates_of_pl_efficientnet_b0():
    # that program rounds e * f up where we round down: it is one factor of 0.97 ahead of ours
    clock = RunLength(350 * 1668, Fraction(1668))
    schedule = scheduled(
        clock, 0.0483, shape="exponential", decay=(0.97,), warmup="5ep", freq=Fraction("0.424")
    )
    expected = {1: 0.0093702, 5: 0.0440821, 10: 0.0414769, 100: 0.0130356, 350: 5.1634e-4}
    found = {epoch: 0.97 * schedule.lr(epoch * 1668) for epoch in expected}
    assert found == pytest.approx(expected, rel=1e-5)


# --- TensorFlow 1: values of its tests ---


def imagenet_clock(batch: int, epochs: int) -> RunLength:
    return RunLength(IMAGENET * epochs // batch, Fraction(IMAGENET, batch))


def test_the_rates_of_tf1_resnet50_with_group_norm():
    clock = imagenet_clock(1024, 65)
    assert clock.total_steps == 81_324
    peak = find_peak_lr(ScheduleConfig(base_learning_rate=-11), global_batch=1024)
    schedule = scheduled(clock, peak, shape="cosine", warmup="6255st")
    expected = {0: 0.0, 1251: 0.0999416, 6255: 0.4927371, 40662: 0.25}
    assert {s: schedule.lr(s) for s in expected} == pytest.approx(expected, abs=5e-8)


def test_the_rates_of_tf1_mlperf():
    clock = imagenet_clock(1920, 44)
    assert (clock.total_steps, clock.total_steps * 5 // 44) == (29_360, 3336)
    schedule = scheduled(
        clock,
        find_peak_lr(ScheduleConfig(lr=3.824), global_batch=1920),
        shape="polynomial",
        power=2.0,
        end_ratio=1e-4 / 3.824,
        warmup="3336st",
        warmup_mode="ramp-shift",
    )
    expected = {1668: 1.912, 3336: 3.824, 14680: 1.216876, 29360: 1e-4}
    assert {s: schedule.lr(s) for s in expected} == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(
    ("option", "value", "batch", "peak"),
    [
        ("base-learning-rate", -11, 1024, 0.5),  # mk2_resnet50_gn_16ipus
        ("base-learning-rate", -13, 16384, 2.0),  # mk2_resnet50_bn_16ipus
        ("base-learning-rate", -11, 768, 0.375),  # mk2_resnext101_16ipus
        ("base-learning-rate", -14, 768, 0.046875),  # mk2_efficientnet_b4_g1
        ("base-learning-rate", -14, 800, 0.048828125),  # mk2_efficientnet_b4_g16
        ("base-learning-rate", -4, 16, 1.0),  # options sweep, RN14
        ("base-learning-rate", -4, 4, 0.25),  # options sweep, RNX
        ("lr-per-image", 0.0001220703125, 8192, 1.0),  # TF2 8k
        ("lr-per-image", 0.0001220703125, 16384, 2.0),  # TF2 16k
        ("lr-per-image", 0.001991319444444, 2304, 4.588),  # TF2 mlperf bs16
        ("lr-per-image", 0.001991319444444, 1920, 3.8233333),  # TF2 mlperf bs20
        ("lr-per-image", 0.003045455, 3456, 10.525092),  # TF2 lars
        ("lr-per-image", 10, 2, 20),  # TF2, "const factor 10 x 2"
        ("lr", 3.824, 1920, 3.824),
    ],
)
def test_peaks_that_scale_with_the_batch(option, value, batch, peak):
    config = ScheduleConfig(**{option: value})
    assert find_peak_lr(config, global_batch=batch) == pytest.approx(peak, rel=1e-7)


def test_a_peak_may_leave_the_accumulation_out():
    # PopART's 2^n * batch-size counts all replicas but one pass
    def rate(batch: str) -> float:
        config = ScheduleConfig(base_learning_rate=-6, lr_batch=batch)
        return find_peak_lr(config, global_batch=96, accumulation=3)

    assert (rate("pass"), rate("global")) == (0.5, 1.5)


def stepped_by_tf1(total: int, fractions: list[float], decay: float, warmup: int) -> list[float]:
    """TensorFlow 1's rule with a state: times the decay once the step passes the next drop."""
    drops, rate, rates = [int(f * total) for f in fractions], 0.5, []
    for step in range(total):
        if drops and step > drops[0]:
            rate *= decay
            drops.pop(0)
        rates.append(step * rate / warmup if step < warmup else rate)
    return rates


@pytest.mark.parametrize("total", [400, 401, 997, 15625])
def test_the_steps_of_tf1_and_popart(total):
    fractions = [0.5, 0.75, 0.875]
    schedule = scheduled(
        RunLength(total, Fraction(total, 10)),
        0.5,
        shape="step",
        drop_after=tuple(Fraction(f) for f in fractions),
        warmup="40st",
    )
    found = [schedule.lr(step) for step in range(total)]
    assert found == pytest.approx(stepped_by_tf1(total, fractions, 0.1, 40), rel=1e-14)
    assert found[-1] == pytest.approx(0.0005)  # 0.5 at first, 0.0005 at last
    listed = scheduled(  # PopART names the share of every stretch
        RunLength(total, Fraction(total, 10)),
        0.5,
        shape="step",
        decay=(1.0, 0.1, 0.01, 0.001),
        drop_after=tuple(Fraction(f) for f in fractions),
        warmup="40st",
    )
    assert found == pytest.approx([listed.lr(step) for step in range(total)], rel=1e-14)


def test_the_drops_of_tf1s_exponential():
    # TensorFlow 1: period = epochs / drops; the rate falls once for every period that is over
    clock = imagenet_clock(768, 350)
    schedule = scheduled(
        clock, 0.046875, shape="exponential", decay=(0.97,), freq=Fraction(146, 350)
    )
    for step in range(0, clock.total_steps, 997):
        over = step * 768 * 146 // (IMAGENET * 350)
        assert schedule.lr(step) == pytest.approx(0.046875 * 0.97**over, rel=1e-13), step


# --- TensorFlow 2: whole recipes ---


def test_the_rates_of_tf2_resnet50_with_8192_images_a_step():
    def reference(step: int) -> float:
        tread = step // 156 * 156
        rate = 0.5 * (1 + cos(pi * tread / 15600))
        return rate * (tread + 1) / 781 if tread < 780 else rate

    clock = RunLength(15600, Fraction(IMAGENET // 8192))
    assert clock.steps_per_epoch == 156
    peak = find_peak_lr(ScheduleConfig(lr_per_image=0.0001220703125), global_batch=8192)
    schedule = scheduled(
        clock, peak, warmup="5ep", warmup_mode="mask", staircase=True, length="100ep"
    )
    for step in range(0, 15600, 13):
        assert schedule.lr(step) == pytest.approx(reference(step), abs=1e-6), step


def test_the_rates_of_tf2_mlperf_end_before_the_fall_does():
    def reference(step: int) -> float:
        if step < 3335:
            return peak * (step + 1) / 3336
        return (peak - end) * (1 - (step - 3335) / (39 * 667)) ** 2 + end

    peak = find_peak_lr(ScheduleConfig(lr_per_image=0.001991319444444), global_batch=1920)
    end = 2.18e-05 * peak
    clock = RunLength(40 * 667, Fraction(667))
    schedule = scheduled(
        clock,
        peak,
        shape="polynomial",
        warmup="5ep",
        warmup_mode="shift",
        length="39ep",
        end_ratio=2.18e-05,
        power=2.0,
    )
    for step in range(0, clock.total_steps, 7):
        assert schedule.lr(step) == pytest.approx(reference(step), rel=1e-12), step


def test_the_steps_of_tf2():
    # TensorFlow 2: boundaries are int(epochs * U), the value changes after that step, values
    # are rates and no shares
    clock = RunLength(100 * 78, Fraction(78))
    schedule = scheduled(
        clock,
        1.0,
        shape="step",
        decay=(0.3, 0.05, 0.002),
        drop_after=(Fraction(30, 100), Fraction(60, 100)),
    )
    steps = (0, 30 * 78, 30 * 78 + 1, 60 * 78, 60 * 78 + 1, 7799)
    assert [schedule.lr(step) for step in steps] == [0.3, 0.3, 0.05, 0.05, 0.002, 0.002]
