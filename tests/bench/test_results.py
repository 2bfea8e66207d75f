"""What a benchmark counts and believes: blocks, energy, problems, and which data limits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.bench.blocks import BlockClock, Timing
from phalanx.bench.bottleneck import describe_bottlenecks, find_bottlenecks
from phalanx.bench.energy import EnergyMeter
from phalanx.bench.result import BenchResult
from phalanx.cli.bench_table import print_results

STEADY = (100.0, 101.0, 102.0)
RESULT = BenchResult(
    kind="train",
    name="demo",
    command="phalanx bench train",
    rates=STEADY,
    first_rate=7.0,
    devices=2,
    global_batch=64,
    micro_batch=16,
    data="synthetic",
    warmup_s=1.0,
    measured_s=3.0,
)


# --- blocks ---


@pytest.fixture
def no_energy(tmp_path) -> EnergyMeter:
    return EnergyMeter(torch.device("cpu"), rapl=tmp_path)


def walk(
    clock: BlockClock, turn_s: Callable[[int], float], *, images: int = 10, stop: int = 10_000
) -> int:
    """Take turns of so many seconds until the clock has enough; how many were taken."""
    turn, busy, counted = 0, 0.0, 0
    while not clock.is_over and turn < stop:
        turn += 1
        busy, counted = busy + turn_s(turn), counted + images
        if clock.is_end(turn):
            clock.end_block(turn, counted, busy)
            busy, counted = 0.0, 0
    return turn


def make_clock(energy: EnergyMeter, timing: Timing, **more) -> BlockClock:
    done = more.pop("done", lambda block, blocks: None)
    return BlockClock(timing=timing, energy=energy, done=done, **more)


def test_warm_up_is_over_after_its_seconds_and_counts_nowhere_else(no_energy):
    shown = []
    timing = Timing(warmup_s=3, seconds=10, blocks=5)
    clock = make_clock(no_energy, timing, done=lambda *told: shown.append(told))
    # the first turn chooses kernels, the next ones are slow, too
    turns = walk(clock, lambda turn: {1: 50.0, 2: 2.0, 3: 0.5}.get(turn, 0.1))
    assert clock.setup_s == 50 and 3 <= clock.warmup_s < 4
    assert clock.rates == pytest.approx([100.0] * 5)
    assert clock.measured_s == pytest.approx(10) and clock.images == 1000
    assert clock.first_rate == pytest.approx((turns - 100) * 10 / (50 + clock.warmup_s))
    assert shown == [(number, 5) for number in range(1, 6)]


def test_slow_turns_make_fewer_blocks_but_three(no_energy):
    clock = make_clock(no_energy, Timing(warmup_s=1, seconds=10, blocks=10))
    assert walk(clock, lambda turn: 4.0) == 6 and len(clock.rates) == 3
    clock = make_clock(no_energy, Timing(warmup_s=1, seconds=10, blocks=10))
    walk(clock, lambda turn: 2.0)
    assert len(clock.rates) == 5


def test_blocks_fit_into_what_is_left_of_a_run(no_energy):
    timing = Timing(warmup_s=1, seconds=10, blocks=10)
    clock = make_clock(no_energy, timing, most_turns=64)
    assert walk(clock, lambda turn: 0.1, stop=64) <= 64 and len(clock.rates) == 10
    clock = make_clock(no_energy, timing, most_turns=8)
    walk(clock, lambda turn: 0.1, stop=8)
    assert clock.rates == [] and clock.first_rate is None and clock.warmup_s > 0


# --- energy ---


def write_counters(rapl: Path, **joules: float) -> None:
    for name, value in joules.items():
        folder = rapl / name.replace("package", "intel-rapl:").replace("_", ":")
        folder.mkdir(exist_ok=True)
        (folder / "energy_uj").write_text(f"{value * 1e6:.0f}\n")
        (folder / "max_energy_range_uj").write_text("1000000000\n")
        (folder / "name").write_text("psys\n" if name == "package2" else "package-0\n")


def test_energy_of_a_processor_is_that_of_its_packages(tmp_path):
    write_counters(tmp_path, package0=10, package0_0=4, package1=990, package2=10)
    meter = EnergyMeter(torch.device("cpu"), rapl=tmp_path)
    meter.start()
    write_counters(tmp_path, package0=16, package0_0=9, package1=3, package2=60)
    # the second counter began again at 1000; the third is the whole machine's
    assert meter.read() == pytest.approx(6 + 13)


def test_energy_is_unknown_where_nobody_may_read_it(tmp_path, no_energy):
    no_energy.start()
    assert no_energy.read() is None
    write_counters(tmp_path, package0=10)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    meter = EnergyMeter(torch.device("cpu"), rapl=tmp_path)
    meter.start()
    assert meter.read() is None


# --- what is believed ---


def test_a_steady_result_is_believed_and_has_every_field():
    facts = RESULT.to_dict()
    assert facts["images_per_second"] == 101 and facts["median"] == 101, "without the first rate"
    assert facts["per_device"] == 50.5 and facts["spread"] == pytest.approx(2 / 101)
    assert (facts["low"], facts["high"], facts["n"]) == (100, 102, 3)
    assert facts["batch"] == {"global": 64, "micro": 16}
    assert facts["trusted"] and facts["problems"] == []
    assert set(facts) >= {
        *("kind", "name", "command", "rates", "devices", "latency_ms", "peak_memory_bytes"),
        *("energy_j_per_image", "data", "warmup_s", "measured_s", "limit", "environment"),
    }


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rates": (100.0, 100.0, 111.0)}, "spread over 11% of their median, more than 10%"),
        ({"warmup_s": 3.1}, "the warm-up of 3.1 s outlasted the measurement of 3.0 s"),
        ({"rates": (100.0, 101.0)}, "only 2 of at least 3 blocks were measured"),
        ({"rates": ()}, "nothing was measured: the warm-up outlasted the benchmark"),
    ],
)
def test_a_result_that_is_not_to_be_believed_says_why(change, problem):
    result = replace(RESULT, **change)
    (told,) = result.problems
    assert problem in told and ("give" in told or "measure" in told)
    assert not result.is_trusted and not result.to_dict()["trusted"]


# --- which limits ---


def measured(**medians: float) -> list[BenchResult]:
    return [replace(RESULT, data=data, rates=(rate,) * 3) for data, rate in medians.items()]


@pytest.mark.parametrize(
    ("medians", "limits", "words"),
    [
        ({"synthetic": 100, "generated": 99, "real": 96}, "mmm", "with real data it reaches 96 of"),
        ({"synthetic": 100, "generated": 99, "real": 94}, "mmd", "reading or decoding is too slow"),
        ({"synthetic": 100, "generated": 50, "real": 40}, "mdd", "even noise comes too slowly"),
        ({"synthetic": 100}, "-", ""),
        ({"generated": 100, "real": 10}, "--", ""),
    ],
)
def test_data_limits_where_it_falls_behind_the_model_alone(medians, limits, words):
    found = find_bottlenecks(measured(**medians))
    assert "".join((one.limit or "-")[0] for one in found) == limits
    assert words in " ".join(describe_bottlenecks(found)) and bool(words) == bool(
        describe_bottlenecks(found)
    )


def test_what_is_not_believed_limits_nothing():
    synthetic, real = measured(synthetic=100, real=50)
    found = find_bottlenecks([replace(synthetic, rates=(100.0, 100.0, 150.0)), real])
    assert [one.limit for one in found] == [None, None] and not describe_bottlenecks(found)


def test_batches_of_each_size_are_compared_with_their_own():
    small, large = measured(synthetic=100, real=99), measured(synthetic=1000, real=500)
    found = find_bottlenecks([*small, *(replace(one, micro_batch=64) for one in large)])
    assert [one.limit for one in found] == ["model", "model", "model", "data"]
    first, second = describe_bottlenecks(found)
    assert first.startswith("batch 16: the model") and second.startswith("batch 64: the data")


def test_a_table_lines_up_and_leaves_out_what_nobody_knows(capsys):
    rows = [replace(one, environment={"device": "cpu"}) for one in measured(real=9, synthetic=1e6)]
    rows[0] = replace(rows[0], latency_ms={"p50": 1.5, "p95": None, "p99": None, "n": 5})
    print_results(rows, model="resnet8")
    title, header, *table, note = capsys.readouterr().out.splitlines()
    assert title == "demo: resnet8, training on 2 devices (cpu)"
    assert len({len(line) for line in (header, *table)}) == 1
    assert "p50 ms" in header and "p95" not in header and "J/image" not in header
    assert table[0].split()[:3] == ["real", "64", "9"] and "1,000,000" in table[1]
    assert "the first step (0.0 s) and the warm-up (1.0 s)" in note
