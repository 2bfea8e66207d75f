"""--init-weights and --reset-head, from the outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from phalanx.catalog.models import MODELS
from phalanx.cli.main import main
from phalanx.models.build import build_model
from small_runs import read_result, small_run

CONFIG, CHECKPOINT = 2, 4
GROUPED = {"norm_type": "group", "norm_num_groups": 4, "steps": 1}  # no running statistics


def weights_of(run: Path) -> Path:
    return next(run.glob("checkpoints/*/weights.safetensors"))


def sha_of(run: Path) -> str:
    return read_result(run)["weights_sha256"]


@pytest.fixture(scope="module")
def contiguous(digits, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("contiguous") / "run"
    assert main(small_run(digits, run, **GROUPED)) == 0
    return run


@pytest.fixture(scope="module")
def interleaved(digits, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("interleaved") / "run"
    assert main(small_run(digits, run, enable_fast_groupnorm=True, **GROUPED)) == 0
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A folder of two classes."""
    folder = tmp_path_factory.mktemp("pair")
    for number, place in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        (folder / place).mkdir(parents=True)
        for image in range(8):
            picture = Image.new("RGB", (12, 12), (20 * number, 9 * image, 0))
            picture.save(folder / place / f"{image}.png")
    return folder


def test_a_loss_that_is_not_finite_is_valid_json(contiguous, digits, tmp_path, capsys):
    tensors, path = load_file(weights_of(contiguous)), tmp_path / "nan.safetensors"
    tensors["fc.weight"][0] = torch.nan
    save_file(tensors, path)
    words = ["validate", "resnet8", "--init-weights", str(path), "--norm-type", "group"]
    words += ["--norm-num-groups", "4", "--data", "mnist", "--data-dir", str(digits), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["loss"] == "nan"


def test_a_run_begins_with_another_runs_weights(contiguous, digits, tmp_path, capsys):
    run, weights = tmp_path / "run", weights_of(contiguous)
    still = {**GROUPED, "lr": 0, "seed": 7}  # of its own it would begin with other weights
    assert main(small_run(digits, run, init_weights=weights, **still)) == 0
    assert f"weights from {weights}\n" in capsys.readouterr().out
    assert sha_of(run) == sha_of(contiguous)


def test_other_classes_need_a_new_head(contiguous, pair, tmp_path, capsys):
    options = {**GROUPED, "data": "folder", "workers": 0, "batch_size": 4}
    options |= {"init_weights": weights_of(contiguous), "model": "resnet8"}
    assert main(small_run(pair, tmp_path / "a", **options)) == CHECKPOINT
    err = capsys.readouterr().err
    assert "fc.weight is (10, 64) in the file, (2, 64) in the model" in err
    assert "it has 10 classes, the data (folder) has 2: --data names other data" in err
    assert main(small_run(pair, tmp_path / "b", reset_head=True, **options)) == 0
    assert "weights.safetensors, with a new classifier\n" in capsys.readouterr().out


def test_weights_of_another_model_are_told_without_talk_of_classes(
    contiguous, digits, tmp_path, capsys
):
    options = {**GROUPED, "init_weights": weights_of(contiguous), "model": "resnet14_small"}
    assert main(small_run(digits, tmp_path / "a", **options)) == CHECKPOINT
    err = capsys.readouterr().err
    assert "not in the file: layer1.1.conv1.weight (16, 16, 3, 3), " in err
    assert "classes" not in err and "as many parameters as resnet8: try --model resnet8" in err


@pytest.mark.parametrize("reset_head", [False, True])
def test_weights_of_a_known_model_are_recognised_by_their_size(
    digits, tmp_path, capsys, reset_head
):
    weights = build_model(MODELS["resnet20"], num_classes=10).state_dict()
    torch.save({f"model.{name}": value for name, value in weights.items()}, tmp_path / "a.pth")
    options = {"steps": 1, "init_weights": tmp_path / "a.pth", "reset_head": reset_head}
    assert main(small_run(digits, tmp_path / "a", **options)) == CHECKPOINT
    err = capsys.readouterr().err
    assert "not in the model: layer1.1.conv1.weight (16, 16, 3, 3), " in err
    assert "it has as many parameters as resnet20: try --model resnet20\n" in err
    assert "--reset-head" not in err
    options["model"] = "resnet20"
    assert main(small_run(digits, tmp_path / "b", **options)) == 0


def test_weights_without_a_head_need_a_new_one(contiguous, digits, tmp_path, capsys):
    weights = load_file(weights_of(contiguous))
    headless = {f"backbone.{n}": t for n, t in weights.items() if not n.startswith("fc.")}
    torch.save(headless | {"classifier.weight": torch.ones(10, 64)}, tmp_path / "a.pth")
    options = {**GROUPED, "init_weights": tmp_path / "a.pth"}
    assert main(small_run(digits, tmp_path / "a", **options)) == CHECKPOINT
    assert (
        "it has no fc that fits: --reset-head starts with a new classifier\n"
        in capsys.readouterr().err
    )
    assert main(small_run(digits, tmp_path / "b", reset_head=True, **options)) == 0


def test_norms_of_the_other_layout_are_refused_both_ways(
    contiguous, interleaved, digits, tmp_path, capsys
):
    plain = {**GROUPED, "init_weights": weights_of(interleaved)}
    assert main(small_run(digits, tmp_path / "a", **plain)) == CHECKPOINT
    err = capsys.readouterr().err
    assert "its group norms are interleaved, this model's contiguous; " in err
    assert "--enable-fast-groupnorm" in err
    fast = {**GROUPED, "init_weights": weights_of(contiguous), "enable_fast_groupnorm": True}
    assert main(small_run(digits, tmp_path / "b", **fast)) == CHECKPOINT
    assert "its group norms are contiguous, this model's interleaved; " in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "a run that cannot begin leaves nothing behind"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--norm-type=batch", "--norm-type: the checkpoint was trained with group"),
        ("--enable-fast-groupnorm", "--enable-fast-groupnorm: the checkpoint was trained with Fa"),
        ("--shortcut-type=C", "--shortcut-type: the checkpoint was trained with A"),
        ("--stage1-projection", "--stage1-projection: the checkpoint was trained with False"),
        ("--model=resnet14_small", "--model: the checkpoint was trained with resnet8"),
    ],
)
def test_a_fork_cannot_change_what_the_weights_mean(contiguous, tmp_path, capsys, change, said):
    run = tmp_path / "fork"
    words = ["train", "--fork", str(contiguous), "--run-dir", str(run), "--steps", "2", change]
    assert main(words) == CONFIG
    err = capsys.readouterr().err
    assert err.startswith(f"phalanx train: {said}") and "a fork cannot change it to" in err
    assert not run.exists()


def test_the_folder_of_a_run_is_no_file_of_weights_but_names_it(contiguous, capsys):
    best = contiguous / "checkpoints/best/weights.safetensors"
    for folder in (contiguous, contiguous / "checkpoints", best.parent):
        assert main(["train", "demo", "--init-weights", str(folder)]) == CHECKPOINT
        err = capsys.readouterr().err
        assert f"{folder}: is a folder; name the file with the weights in it: {best}\n" in err


MISTAKES = [  # words, exit code, what is said
    (
        ["--init-weights", "nowhere.pth"],
        CHECKPOINT,
        "{here}/nowhere.pth: no such file; --init-weights ta",
    ),
    (
        ["--init-weights", "."],
        CHECKPOINT,
        "{here}: is a folder; name the file with the weights in it",
    ),
    (["--reset-head"], CONFIG, "--reset-head: there is no head to reset; name the weights to sta"),
]
WITHOUT_TORCH = """
import json, sys
from phalanx.cli.main import main

for words, code, _ in json.loads(sys.argv[1]):
    found = main(["train", *words])
    assert found == code, f"{words} ended with {found}"
    assert "torch" not in sys.modules, f"{words} imported torch"
"""


def test_mistakes_are_told_before_torch_and_leave_nothing_behind(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(MISTAKES)],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(MISTAKES)
    for line, (_, _, said) in zip(lines, MISTAKES, strict=True):
        assert line.startswith(f"phalanx train: {said.format(here=tmp_path)}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "head",
    [torch.tensor(1.0), torch.zeros(10, 64).to_sparse(), torch.zeros(10, 64, device="meta")],
    ids=["a number", "sparse", "without values"],
)
def test_a_head_that_is_none_is_refused_and_leaves_no_folder(
    contiguous, digits, tmp_path, capsys, head
):
    weights = tmp_path / "odd.pth"
    torch.save({**load_file(weights_of(contiguous)), "fc.weight": head}, weights)
    run = tmp_path / "run"
    assert main(small_run(digits, run, init_weights=weights, **GROUPED)) == CHECKPOINT
    assert "fc.weight" in capsys.readouterr().err
    assert not run.exists()


def test_a_run_that_cannot_begin_takes_only_what_it_made(contiguous, digits, tmp_path, capsys):
    before = tmp_path / "before"
    before.mkdir()
    link = tmp_path / "link"
    link.symlink_to(before)
    for run in (before, link):
        wrong = {"init_weights": weights_of(contiguous), "norm_type": "batch", "steps": 1}
        assert main(small_run(digits, run, **wrong)) == CHECKPOINT
        assert "is it a different network? --model and its options" in capsys.readouterr().err
        assert list(before.iterdir()) == []
