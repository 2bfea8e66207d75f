"""`phalanx find` and `phalanx bench determinism`, with real steps on tiny sets."""

import json
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.assemble import session
from phalanx.assemble.dataset_summary import plan_run
from phalanx.bench import determinism
from phalanx.bench.batch_size_finder import (
    BatchSizes,
    BatchSizeTrial,
    explain_no_room,
    search_sizes,
)
from phalanx.bench.lr_finder import ExplosionDetector, analyse_sweep, smooth_losses
from phalanx.bench.paired_ratio import PairedRatio
from phalanx.cli.bench import print_cost
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.errors import Bug

CONFIG = 2
GIB = 2**30


@pytest.fixture
def tiny(digits, tmp_path, monkeypatch) -> list[str]:
    """A model and data of a few milliseconds a step, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    given = {"data": "mnist", "data-dir": digits, "model": "resnet8", "image-size": 12}
    given |= {"batch-size": 16, "epochs": 3, "device": "cpu", "workers": 0}
    return [f"--{name}={value}" for name, value in given.items()]


@pytest.fixture
def learnable(tmp_path, monkeypatch) -> list[str]:
    """One batch of noise again and again: a few steps learn it by heart."""
    monkeypatch.chdir(tmp_path)
    given = {"data": "synthetic", "model": "resnet8", "image-size": 12, "batch-size": 16}
    return [f"--{name}={value}" for name, value in {**given, "device": "cpu"}.items()]


def ask(capsys, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refuse(capsys, *words: str) -> str:
    assert main([*words]) == CONFIG
    return capsys.readouterr().err


# --- the learning rate ---


def test_a_sweep_finds_a_rate_that_learns_and_stops_at_an_explosion(learnable, tmp_path, capsys):
    told = ask(capsys, "find", "lr", *learnable, "--from=1e-5", "--to=1e5", "--steps=60")
    rates, losses = told["rates"], told["losses"]
    assert told["exploded"] and len(rates) == len(losses) < 60
    assert np.allclose(np.diff(np.log10(rates)), 10 / 59), "the rate grows by even factors"
    assert told["tenth"] == pytest.approx(rates[-1] / 10)
    assert told["suggested"] == min(told["steepest"], told["tenth"])
    assert 1e-4 < told["suggested"] < 10
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_sweep_takes_the_steps_that_training_takes(tiny, tmp_path, capsys):
    told = ask(capsys, "find", "lr", *tiny, "--from=0.0499999", "--to=0.05", "--steps=10")
    words = ["--lr=0.05", "--lr-schedule=constant", "--warmup-epoch=0", "--run-dir=run"]
    assert main(["train", *tiny, *words, "--validation=false"]) == 0
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    trained = [row["loss"] for row in rows]
    assert told["losses"] == pytest.approx(trained[:10], rel=1e-3)


def test_a_sweep_of_rates_too_small_suggests_nothing_and_says_so(tiny, capsys):
    assert main(["find", "lr", *tiny, "--from=1e-9", "--to=1e-8", "--steps=12"]) == 0
    said = capsys.readouterr().out
    assert "loss explodes  nowhere up to 1e-08, in 12 steps; try a larger --to" in said
    assert "suggested      nothing: the loss did not fall clearly (its noise from step to" in said
    assert "so no minimum can be found; try a larger --batch-size, more --steps" in said


def test_how_far_a_sweep_is_is_told_to_terminals_alone(tiny, capsys, monkeypatch):
    words = ["find", "lr", *tiny, "--from=1e-9", "--to=1e-8", "--steps=10"]
    assert main(words) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(words) == 0
    steps = "".join(f"\r\033[Kstep {step} of 10" for step in range(1, 11))
    assert capsys.readouterr().err == f"{steps}\n"


@pytest.mark.draws
def test_a_sweep_is_drawn_in_letters_and_where_asked(learnable, tmp_path, capsys):
    for name, begin in (("lr.png", b"\x89PNG"), ("lr.html", b"<!doctype html>")):
        words = [*learnable, "--from=1e-3", "--to=100", "--steps=30", f"--out={name}"]
        assert main(["find", "lr", *words]) == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    said = capsys.readouterr().out
    assert "▲" in said and said.count("│") == 20 and "suggested      --lr " in said
    page = (tmp_path / "lr.html").read_text()
    assert "<svg" in page
    (end,) = re.findall(r"loss explodes +(at .* of 30 steps)\n", said)[-1:]
    assert f"<td>{end}</td>" in page
    assert {path.name for path in tmp_path.iterdir()} == {"lr.png", "lr.html"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--from=0", "--from: expected a learning rate above 0, got '0'"),
        ("--to=inf", "--to: expected a learning rate above 0, got 'inf'"),
        ("--from=20", "--from 20: must be below --to 10: the rate increases"),
        ("--steps=9", "--steps: expected a whole number of at least 10, got '9'"),
        ("--out=lr.pdf", "--out lr.pdf: expected a file that ends in .png or .html"),
        ("--out=no/lr.png", "--out no/lr.png: there is no folder no; create it first"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(tiny, capsys, word, said):
    assert refuse(capsys, "find", "lr", *tiny, word) == f"phalanx find lr: {said}\n"


def test_a_preset_that_finetunes_wants_its_weights(capsys):
    said = refuse(capsys, "find", "lr", "finetune-resnet50", "--steps=10", "--data-dir=x")
    assert "finetune-resnet50: finetunes weights, and none are named" in said


def test_the_alarm_knows_an_explosion_from_noise():
    noise = np.random.default_rng(0).normal(2.3, 0.1, 200)
    detector = ExplosionDetector()
    assert not any(detector.is_explosion(loss) for loss in noise)
    assert detector.is_explosion(float("nan")) and ExplosionDetector().is_explosion(float("inf"))
    detector = ExplosionDetector()
    assert not any(detector.is_explosion(loss) for loss in np.linspace(2.3, 0.5, 30))
    later = [detector.is_explosion(2.3) for _ in range(30)]
    assert not later[0] and later[-1], "a network that died again answers with its first loss"
    detector = ExplosionDetector()
    assert not any(detector.is_explosion(2.3) for _ in range(6))
    assert any(detector.is_explosion(9.0) for _ in range(6)), "without any fall before"


FLAT = [  # resnet8 on images of noise, two classes, 8 a step; 1e-6 to 0.039
    0.691, 0.722, 0.715, 0.755, 0.686, 0.664, 0.701, 0.737, 0.692, 0.667, 0.722, 0.749, 0.694,
    0.687, 0.704, 0.663, 0.748, 0.775, 0.671, 0.709, 0.675, 0.64, 0.758, 0.718, 0.78, 0.675,
    0.682, 0.739, 0.667, 0.697, 0.693, 0.76, 0.721, 0.766, 0.679, 0.638, 0.718, 0.721, 0.739,
    0.616, 0.796, 0.651, 0.74, 0.687, 0.634, 0.742, 0.708, 0.653, 0.673, 0.635, 0.755, 0.702, 0.7,
    0.699, 0.74, 0.702, 0.695, 0.687, 0.68, 0.682, 0.676, 0.668, 0.635, 0.774, 0.571, 0.87,
]  # fmt: skip
EXPLODING = [  # the demo, 16 a step; 1e-6 to 0.45
    2.317, 2.353, 2.401, 2.39, 2.442, 2.337, 2.359, 2.351, 2.386, 2.316, 2.297, 2.321, 2.271,
    2.319, 2.261, 2.307, 2.304, 2.361, 2.248, 2.455, 2.38, 2.328, 2.402, 2.43, 2.3, 2.425, 2.312,
    2.443, 2.233, 2.375, 2.286, 2.246, 2.247, 2.332, 2.304, 2.337, 2.231, 2.355, 2.325, 2.358,
    2.36, 2.296, 2.276, 2.331, 2.252, 2.368, 2.427, 2.385, 2.377, 2.323, 2.209, 2.334, 2.315,
    2.238, 2.279, 2.24, 2.36, 2.276, 2.271, 2.306, 2.177, 2.242, 2.401, 2.253, 2.183, 2.224,
    2.154, 2.033, 2.27, 2.065, 2.069, 1.868, 1.665, 1.681, 1.842, 1.452, 2.47, 1.866, 2.689,
    2.166, 3.397,
]  # fmt: skip


def test_recorded_noise_is_no_explosion_and_a_recorded_explosion_is_one():
    """The first was said to explode at its end, for falling and rising by less than its noise."""
    detector = ExplosionDetector()
    assert not any(detector.is_explosion(loss) for loss in FLAT)
    sweep = analyse_sweep(np.geomspace(1e-6, 0.039, 66).tolist(), FLAT, exploded=False, steps=100)
    assert sweep.suggested_lr is None and 0.04 < sweep.noise < 0.08
    detector = ExplosionDetector()
    assert [detector.is_explosion(loss) for loss in EXPLODING].index(True) == len(EXPLODING) - 1


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.2, 0.3])
def test_noise_of_any_size_is_no_explosion_and_hides_none(noise):
    draw = np.random.default_rng(0)
    course = np.concatenate([np.linspace(2.3, 1.2, 70), 1.2 * 1.6 ** np.arange(10)])
    for _ in range(20):
        detector = ExplosionDetector()
        assert not any(detector.is_explosion(loss) for loss in draw.normal(0.7, noise, 100))
        detector = ExplosionDetector()
        found = [detector.is_explosion(loss) for loss in course + draw.normal(0, noise, 80)]
        assert found.index(True) >= 70


def test_the_steepest_fall_is_where_it_is():
    rates = np.geomspace(1e-6, 10, 100).tolist()
    losses = (2 - np.tanh((np.arange(100) - 60) / 5)).tolist()
    found = analyse_sweep(rates, losses, exploded=False, steps=100)
    assert abs(rates.index(found.steepest) - 60) <= 1 and found.tenth is None
    assert found.suggested_lr == found.steepest
    burst = analyse_sweep(rates[:65], [*losses[:64], float("nan")], exploded=True, steps=100)
    assert burst.suggested_lr == burst.tenth == rates[64] / 10
    assert burst.to_dict()["losses"][-1] is None and len(burst.smooth) == 64


def test_chance_is_no_fall():
    draw, rates = np.random.default_rng(0), np.geomspace(1e-6, 10, 100).tolist()
    for _ in range(100):
        noise = draw.normal(2.3, 0.3, 100).tolist()
        assert analyse_sweep(rates, noise, exploded=False, steps=100).suggested_lr is None
    short = analyse_sweep(rates[:3], [9.0, 1.0, float("nan")], exploded=True, steps=100)
    assert short.suggested_lr is None and short.tenth == rates[2] / 10


def test_smoothing_leaves_lines_as_they_are_and_takes_noise_away():
    line = np.linspace(0, 1, 50)
    assert smooth_losses(line.tolist(), reach=4)[4:-4] == pytest.approx(line[4:-4].tolist())
    noise = np.random.default_rng(0).normal(0, 1, 500)
    assert np.std(smooth_losses(noise.tolist(), reach=4)) < 0.5


# --- the micro-batch ---


def test_sizes_are_tried_with_real_steps_and_keep_the_global_batch(tiny, tmp_path, capsys):
    words = ["find", "batch-size", *tiny, "--most=20", "--seconds=0.05"]
    told = ask(capsys, *words, "--gradient-accumulation=3")
    assert [trial["size"] for trial in told["trials"]] == [8, 16, 20]
    assert all(trial["images_per_second"] > 0 for trial in told["trials"])
    assert told["largest"] == 20 and told["global_batch"] == 48
    suggested = told["suggested"]
    assert suggested["batch-size"] * suggested["gradient-accumulation"] == 48
    assert suggested["batch-size"] in (8, 16)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "largest        20 (the limit of --most; more may fit)" in said
    assert " which keeps the global batch of 16 per replica" in said
    assert "batch norm sees one micro-batch" in said
    assert not list(tmp_path.iterdir())


def test_a_size_needs_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["cifar10-resnet20", "--device=cpu", "--most=2", "--seconds=0.01"]
    assert ask(capsys, "find", "batch-size", *words)["largest"] == 2


def test_a_size_is_tried_with_the_replicas_that_share_statistics(tiny, monkeypatch, capsys):
    whole, counted = session.train_step, []

    def count(state, passes, *rest, **named):
        counted.append([len(batch.labels) for batch in passes])
        return whole(state, passes, *rest, **named)

    monkeypatch.setattr(session, "train_step", count)
    words = [*tiny, "--replicas=4", "--bn-span=2", "--most=8", "--seconds=0.01"]
    told = ask(capsys, "find", "batch-size", *words)
    assert (told["largest"], told["global_batch"]) == (8, 16), "of a replica"
    assert counted[0] == [8] * 4, "two passes of two micro-batches side by side"


@pytest.mark.parametrize("room", [2, 3, 5, 8, 9, 100, 1000, 4095])
def test_the_largest_size_is_found_to_a_sixteenth(room):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    found = search_sizes(fits, most=4096)
    assert room - max(1, found // 16) < found <= room
    assert len(set(tried)) == len(tried) < 20 and max(tried) <= 4096


def test_nothing_that_fits_is_nothing_found():
    assert search_sizes(lambda size: False, most=4096) == 0
    assert search_sizes(lambda size: True, most=4096) == 4096
    assert search_sizes(lambda size: True, most=5) == 5


def test_a_host_without_room_is_known_before_it_is_tried():
    trials = [BatchSizeTrial(size=size, peak_bytes=size * GIB + GIB) for size in (8, 16)]
    assert explain_no_room(32, trials, 40 * GIB) == ""
    said = explain_no_room(32, trials, 36 * GIB)
    assert said == "not tried: needs about 33.0 GiB, 36.0 GiB are free"
    assert explain_no_room(8, [], 0) == "", "the first size is tried"


def test_a_host_that_runs_full_gives_its_largest_size(tiny, monkeypatch, capsys):
    free = iter([256 * GIB, 256 * GIB, *[1] * 20])  # the process itself counts as well
    monkeypatch.setattr("phalanx.bench.batch_size_finder.read_free_memory", lambda: next(free))
    monkeypatch.setattr("phalanx.bench.batch_size_finder._memory_now", lambda device: 0)
    told = ask(capsys, "find", "batch-size", *tiny, "--seconds=0.01")
    assert told["largest"] == 16
    assert all("not tried" in trial["problem"] for trial in told["trials"][2:])


def test_a_device_that_is_full_is_told_from_a_mistake(tiny, monkeypatch, capsys):
    whole, counted = session.train_step, {}

    def small_only(state, passes, *rest, **named):
        counted[len(passes[0].labels)] = len(passes)
        if len(passes[0].labels) > 11:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return whole(state, passes, *rest, **named)

    monkeypatch.setattr(session, "train_step", small_only)
    told = ask(capsys, "find", "batch-size", *tiny, "--seconds=0.01")
    assert told["largest"] == 11
    assert counted[8] == 2 and counted[16] == 1, "as many passes as keep gradients in memory"
    assert {t["problem"] for t in told["trials"] if t["size"] > 11} == {"out of memory"}
    monkeypatch.setattr(session, "train_step", lambda *a, **k: torch.ones(2) @ torch.ones(3))
    assert main(["find", "batch-size", *tiny, "--json"]) == Bug.exit_code
    assert "RuntimeError" in capsys.readouterr().err


def test_nothing_fits_is_told_with_the_way_out(tiny, monkeypatch, capsys):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(session, "train_step", full)
    said = refuse(capsys, "find", "batch-size", *tiny)
    assert "--model resnet8: not even 2 images of 12 pixels fit on cpu: out of memory; " in said


def test_the_suggestion_divides_the_global_batch():
    trials = tuple(
        BatchSizeTrial(size=size, images_per_second=rate)
        for size, rate in ((8, 50.0), (16, 90.0), (32, 80))
    )

    def suggested(whole: int) -> tuple[int, int]:
        sizes = BatchSizes(trials=trials, most=32, global_batch=whole, device="cpu")
        return sizes.batch_size, sizes.accumulation

    assert suggested(256) == (16, 16)
    assert suggested(12) == (12, 1)
    assert suggested(100) == (10, 10)


# --- determinism ---


@pytest.mark.slow
def test_the_cost_of_determinism_is_told_with_pairs_and_interval(tiny, capsys):
    assert main(["bench", "determinism", *tiny, "--pairs=3", "--steps=2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no terminal, so nobody to tell how far it is
    told = json.loads(out)
    assert set(told["ratios"]) == {"seeded", "strict"}
    for ratio in told["ratios"].values():
        low, high = ratio["interval95"]
        assert ratio["pairs"] == 3 and low <= ratio["ratio"] <= high
        assert len(ratio["off_steps_per_second"]) == 3


def test_the_cost_of_determinism_is_told_to_people(capsys):
    ratio = PairedRatio((9.0, 8.0, 10.0), (10.0, 10.0, 10.0))
    print_cost(determinism.DeterminismCost(ratios={"strict": ratio}, device="cpu", steps=2))
    said = capsys.readouterr().out
    assert said.startswith("strict       9.00 steps/s, off 10.00: ratio 0.9000, 95% interval 0.8")
    assert "(n=3 pairs of blocks of 2 steps)" in said
    assert "on a CPU all three run the same kernels" in said


def told_by_torch() -> tuple[bool, bool, bool]:
    """What is set in this process."""
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic


def test_every_value_is_measured_in_a_process_of_its_own_setting(learnable):
    flags = dict(word.removeprefix("--").split("=") for word in learnable)
    settings = read_settings(None, flags)
    plan, _ = plan_run(settings, without_data=True)
    seen = {}
    for name in ("off", "seeded", "strict"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            process.submit(
                determinism.prepare_process, settings, replace(plan, determinism=name)
            ).result()
            assert process.submit(determinism.take_steps, 2).result() == 2
            seen[name] = process.submit(told_by_torch).result()
    off, seeded, strict = (False, True, False), (False, False, False), (True, False, True)
    assert seen == {"off": off, "seeded": seeded, "strict": strict}


def test_too_few_pairs_are_refused(tiny, capsys):
    said = refuse(capsys, "bench", "determinism", *tiny, "--pairs=2")
    assert (
        said
        == "phalanx bench determinism: --pairs: expected a whole number of at least 3, got '2'\n"
    )
