"""Runs that end badly: what the black box holds, and what a replay of the step names."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.assemble.blackbox import LAST_STEPS, read_last_steps
from phalanx.cli.main import main
from phalanx.engine.probe import Probe
from phalanx.engine.state import TrainState
from phalanx.engine.step import MicroBatch
from phalanx.errors import CheckpointError, ConfigError, DivergedError
from phalanx.optim.build import OptimSettings, build_optimizer
from phalanx.plan import machine_choice
from phalanx.report.records import Records, StepRow
from small_runs import read_result, run_phalanx, small_run
from small_states import take_step

DIVERGED = DivergedError.exit_code
PLUGIN = '''
"""Noise with one white image in it, and networks that give inf for it, or break over it."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.models import MODELS
from phalanx.catalog.variant import OwnVariant
from phalanx.data.formats.arrays import ArraySource
from phalanx.data.formats.sources import OPENERS

COLOURS = ("red", "green", "blue")
for name in ("trapped", "breaking"):
    MODELS[name] = OwnVariant(image_size=8, classes=3, build=f"snow:build_{name}", head="head")
DATASETS["snow"] = replace(
    DATASETS["mnist"], preset="demo", image_size=8, needs_folder=False, classes=COLOURS
)
OPENERS["snow"] = lambda _folder, split, _spec: open_snow(split)


def open_snow(split):
    images = {"train": 48, "valid": 12}[split]
    pixels = np.random.default_rng(images).integers(0, 99, (images, 8, 8, 3)).astype(np.uint8)
    if split == "train":
        pixels[17] = 255
    return ArraySource(pixels=pixels, labels=np.arange(images) % 3, classes=COLOURS, files=(split,))


def build_trapped(num_classes):
    return build(num_classes, lambda x, white: x / (~white).float()[:, None, None, None])


def build_breaking(num_classes):
    def react(x, white):
        if white.any():
            raise ValueError("snow blindness")
        return x

    return build(num_classes, react)


def build(num_classes, react):
    from torch import nn

    class Eye(nn.Module):
        def forward(self, x):
            return react(x, x[:, :, 4, 4].amin(1) > 1.5)

    parts = OrderedDict(
        look=nn.Sequential(nn.Identity(), Eye()), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(4, num_classes),
    )
    return nn.Sequential(parts)
'''


def entries(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "valid" not in line]


def box_of(run: Path) -> dict:
    return json.loads((run / "blackbox.json").read_text())


def contents(run: Path) -> dict:
    files = [path for path in run.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def replay(capsys, run: Path, *words: str, code: int) -> dict:
    capsys.readouterr()
    assert main(["replay", str(run), "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def diverged(digits, tmp_path_factory) -> Path:
    """A run whose second checkpointed stretch leaves the finite numbers."""
    run = tmp_path_factory.mktemp("diverged") / "run"
    assert main(small_run(digits, run, lr=1e30, epochs=20, ckpts_per_epoch=6)) == DIVERGED
    return run


@pytest.fixture(scope="module")
def sound(digits, tmp_path_factory) -> Path:
    """A finished run of 12 steps in two passes each; none of its first checkpoints is left."""
    run = tmp_path_factory.mktemp("sound") / "run"
    words = small_run(
        digits, run, batch_size=8, gradient_accumulation=2, ema_decay=0.9, keep=2, epochs=2
    )
    assert main(words) == 0
    return run


# --- the black box ---


def test_a_run_that_diverges_leaves_its_last_steps_and_images(diverged):
    box, lines = box_of(diverged), entries(diverged)
    bad = next(line["step"] for line in lines if line["loss"] in ("nan", "inf"))
    assert (box["step"], box["unsound"]) == (bad, True)
    assert box["why"].startswith(f"DivergedError: step {bad}: ")
    expected = [{**line, "loss_scale": 1.0} for line in lines[:bad]]
    assert box["steps"] == expected[-LAST_STEPS:]
    assert [image["position"] for image in box["images"]] == list(range(16 * bad - 16, 16 * bad))
    names = {image["name"] for image in box["images"]}
    assert len(names) == 16 and all("train-images-idx3-ubyte[" in name for name in names)
    assert (box["seed"], box["options"]["lr"]) == (0, 1e30)
    assert (diverged / box["checkpoint"]).name == f"step-{bad - 1:08d}"


def test_a_run_that_diverges_has_a_report_that_says_so(diverged):
    lines = (diverged / "log.txt").read_text().splitlines()
    assert lines[-1].endswith(f"  report: {diverged / 'report.html'}")
    page = (diverged / "report.html").read_text()
    why = box_of(diverged)["why"].removeprefix("DivergedError: ").partition(",")[0]
    assert f"<b>The run failed:</b> {why}" in page


def test_a_report_that_cannot_be_written_does_not_hide_the_failure(digits, tmp_path, capsys):
    run = tmp_path / "run"
    words = small_run(digits, run, lr=1e30, epochs=20, ckpts_per_epoch=6)
    assert main(words) == DIVERGED
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == DIVERGED
    out, error = capsys.readouterr()
    assert "report: " not in out and box_of(run)["why"].partition(": ")[2] in error


def test_only_the_last_steps_up_to_the_first_unsound_one_are_kept(tmp_path):
    records = Records(tmp_path)
    rows = [
        StepRow(step=n, epoch=1.0, lr=0.1, loss=n if n < 90 else float("nan"), grad_norm=1, top1=0)
        for n in range(1, 120)
    ]
    records.add_steps(rows)
    records.flush()
    assert [row["step"] for row in read_last_steps(tmp_path)] == list(range(91 - LAST_STEPS, 91))


def test_a_sound_run_leaves_no_black_box(sound):
    assert not (sound / "blackbox.json").exists()


# --- replay ---


def test_a_replay_repeats_the_failing_step_bit_for_bit_and_writes_nothing(diverged, capsys):
    before = contents(diverged)
    seen = replay(capsys, diverged, code=DIVERGED)
    assert contents(diverged) == before
    assert seen["as_recorded"] is True and seen["sound"] is False
    assert (seen["step"], seen["began_at"]) == (box_of(diverged)["step"], seen["step"] - 1)
    assert seen["finding"]["what"] == "output" and seen["images"] == box_of(diverged)["images"]


def test_a_replay_of_a_run_without_a_black_box_finds_the_step_in_the_metrics(diverged, capsys):
    box = (diverged / "blackbox.json").read_bytes()
    (diverged / "blackbox.json").unlink()
    seen = replay(capsys, diverged, code=DIVERGED)
    (diverged / "blackbox.json").write_bytes(box)
    assert seen["step"] == json.loads(box)["step"]


@pytest.mark.parametrize(("step", "began_at"), [(5, 0), (11, 10)])
def test_any_step_of_a_sound_run_can_be_repeated(sound, capsys, step, began_at):
    seen = replay(capsys, sound, "--step", str(step), code=0)
    assert (seen["sound"], seen["as_recorded"], seen["finding"]) == (True, True, None)
    assert seen["began_at"] == began_at
    row = entries(sound)[step - 1]
    assert (seen["loss"], seen["grad_norm"], seen["lr"]) == (
        *(row["loss"], row["grad_norm"]),
        row["lr"],
    )


def test_the_text_tells_the_numbers_and_the_images(sound, capsys):
    capsys.readouterr()
    assert main(["replay", str(sound), "--step", "11"]) == 0
    out = capsys.readouterr().out
    assert "step 11 of " in out and "bit for bit as it was recorded" in out
    assert "every output and every gradient is finite" in out
    assert "train-images-idx3-ubyte[" in out and "and 12 more" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), ConfigError.exit_code, "no step failed"),
        (("--step", "13"), ConfigError.exit_code, "the run has 12 steps; give one from 1 to 12"),
        (("--step", "0"), ConfigError.exit_code, "give one from 1 to 12"),
        (
            ("--step", "x"),
            ConfigError.exit_code,
            "--step: expected a whole number of at least 0, got 'x'",
        ),
    ],
)
def test_a_step_that_is_not_there_is_refused(sound, capsys, words, code, said):
    capsys.readouterr()
    assert main(["replay", str(sound), *words]) == code
    assert said in capsys.readouterr().err


def test_a_run_that_is_not_there_is_refused(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "none")]) == CheckpointError.exit_code
    assert "there is no such folder" in capsys.readouterr().err


# --- one image among many ---


@pytest.fixture(scope="module")
def snow(tmp_path_factory) -> Path:
    """A folder with the plugin in it."""
    folder = tmp_path_factory.mktemp("snow")
    (folder / "snow.py").write_text(PLUGIN)
    return folder


def train_in(folder: Path, run: str, **options: object):
    given = {"plugin": "snow", "data": "snow", "batch-size": 4, "steps": 12, "lr": 0.05}
    given |= {"warmup-epoch": "1st", "ckpts-per-epoch": 6, "device": "cpu", "workers": 0}
    words = [f"--{name}={value}" for name, value in (given | options).items()]
    return run_phalanx("train", *words, f"--run-dir={run}", cwd=folder)


@pytest.fixture(scope="module")
def trapped(snow) -> Path:
    """A run that diverges over one image, in one of two passes of a step."""
    done = train_in(snow, "trapped", model="trapped", **{"gradient-accumulation": 2, "steps": 6})
    assert done.returncode == DIVERGED, done.stderr
    assert "phalanx replay trapped --plugin snow names the module and the image" in done.stderr
    return snow / "trapped"


def test_a_replay_names_the_module_and_the_one_image(trapped):
    done = run_phalanx("replay", "trapped", "--json", "--plugin", "snow", cwd=trapped.parent)
    assert done.returncode == DIVERGED, done.stderr
    seen = json.loads(done.stdout)
    (image,) = seen["finding"]["images"]
    assert seen["finding"]["name"] == "look/1" and seen["finding"]["sound_weights"]
    assert (image["name"], image["label"]) == ("train[17]", "blue")
    assert image in box_of(trapped)["images"]
    assert 8 * seen["step"] - 8 <= image["position"] < 8 * seen["step"]


def test_fp_exceptions_stops_at_the_step_and_names_the_module_at_once(snow):
    done = train_in(snow, "excepted", model="trapped", **{"fp-exceptions": "true"})
    assert done.returncode == DIVERGED, done.stderr
    assert "the first module whose output was not finite is look/1, for train[17] (" in done.stderr
    run = snow / "excepted"
    box = box_of(run)
    assert entries(run)[-1]["step"] == box["step"]
    assert [image["name"] for image in box["cause"]["images"]] == ["train[17]"]


def test_an_exception_leaves_a_black_box_that_a_mended_resume_takes_away(snow):
    done = train_in(snow, "broken", model="breaking")
    assert done.returncode == 70 and "ValueError: snow blindness" in done.stderr
    run = snow / "broken"
    box, lines = box_of(run), entries(run)
    assert (box["unsound"], box["why"]) == (False, "ValueError: snow blindness")
    assert [line["step"] for line in lines] == list(range(1, box["step"]))
    assert "train[17]" in {image["name"] for image in box["images"]}
    assert "<b>The run failed:</b> snow blindness" in (run / "report.html").read_text()
    page = "__import__('pathlib').Path('broken/report.html')"
    mended = PLUGIN.replace('raise ValueError("snow blindness")', f"assert not {page}.exists()")
    (snow / "snow.py").write_text(mended)
    done = run_phalanx("train", "--resume", "broken", "--plugin", "snow", cwd=snow)
    (snow / "snow.py").write_text(PLUGIN)
    assert done.returncode == 0, done.stderr
    assert not (run / "blackbox.json").exists()


# --- --fp-exceptions ---


def test_fp_exceptions_changes_no_bit_and_writes_no_more_than_asked(digits, tmp_path):
    hashes = []
    for name, switch in (("with", "true"), ("without", "false")):
        words = small_run(digits, tmp_path / name, steps=6, fp_exceptions=switch)
        assert main([*words, "--disable-metrics=true"]) == 0
        hashes.append(read_result(tmp_path / name)["weights_sha256"])
    assert hashes[0] == hashes[1]
    assert entries(tmp_path / "with") == entries(tmp_path / "without")
    assert all(line["grad_norm"] is None for line in entries(tmp_path / "with"))


# --- the probe ---


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()  # 0, with a slope that is not finite


def found_by_probe(*parts: nn.Module, scale: float = 1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), *parts)
    state = TrainState(model, build_optimizer(model, OptimSettings(momentum=0.0)))
    images = torch.randn(5, 3, 2, 2) * scale
    labels = torch.arange(5) % 3
    passes = [MicroBatch(images[:3], labels[:3], 0), MicroBatch(images[3:], labels[3:], 3)]
    with Probe(model) as probe:
        loss, grad_norm, _ = take_step(state, passes, 0.1, label_smoothing=0.1).tolist()
    assert not any(module._forward_hooks for module in model.modules())
    return probe.find_nonfinite(loss, grad_norm)


def test_a_sound_step_has_no_finding():
    assert found_by_probe(nn.ReLU(), nn.Linear(6, 3)) is None


def test_a_gradient_that_is_not_finite_is_named_in_the_order_they_come():
    finding = found_by_probe(nn.Linear(6, 6), Root(), nn.Linear(6, 3))
    assert finding.what == "gradient" and finding.name in ("2.weight", "2.bias")


def test_gradients_whose_length_alone_is_not_finite_are_told_apart():
    finding = found_by_probe(nn.Hardtanh(-1e30, 1e30), scale=1e25)
    assert (finding.what, finding.name) == ("length", "1.weight")


def test_input_that_is_not_finite_is_told_as_such():
    finding = found_by_probe(nn.Linear(6, 3), scale=float("inf"))
    assert (finding.name, finding.rows) == ("(the input)", (0, 1, 2))


def test_a_module_whose_weights_were_spoilt_before_is_told_as_such():
    spoilt = nn.Linear(6, 3)
    with torch.no_grad():
        spoilt.weight[0, 0] = float("inf")
    finding = found_by_probe(nn.ReLU(), spoilt)
    assert (finding.name, finding.weights_finite) == ("3", False)
    assert finding.describe().endswith("is 3, whose weights were not finite before the step")


def test_the_images_of_a_second_pass_are_counted_on():
    class Picky(nn.Module):
        def forward(self, x):
            return x if len(x) == 3 else x.clone().index_fill(0, torch.tensor([1]), float("nan"))

    finding = found_by_probe(nn.Sequential(nn.ReLU(), Picky()), nn.Linear(6, 3))
    assert (finding.name, finding.rows) == ("2/1", (4,))


def test_a_replay_needs_neither_engine_nor_trackers_of_its_run(digits, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert main(small_run(digits, run, steps=4)) == 0
    config = run / "config.yaml"
    text = config.read_text().replace("engine: native", "engine: lightning")
    config.write_text(text.replace("mlflow: false", "mlflow: true"))
    assert {"engine: lightning", "mlflow: true"} <= set(config.read_text().splitlines())
    monkeypatch.setattr(machine_choice, "find_spec", lambda name: None)
    assert main(["replay", str(run), "--step", "2"]) == 0
