"""`phalanx validate` and `predict`: which checkpoint they use, and what else can be scored."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

import phalanx
from phalanx.assemble.find_data import use_random_data
from phalanx.assemble.scoring_target import (
    choose_checkpoint,
    plan_checkpoint,
    read_checkpoint,
    read_untrained_settings,
)
from phalanx.cli.main import main
from phalanx.engine.checkpoint_store import list_checkpoints, read_files, write_checkpoint_as
from phalanx.plan.model import choose_image_size
from small_photos import write_photos
from small_runs import read_result, small_run

CONFIG, CHECKPOINT = 2, 4


@pytest.fixture(scope="module")
def averaged(digits, tmp_path_factory) -> Path:
    """A run of 18 steps that keeps a live average, with checkpoints 6, 12 and 18."""
    run = tmp_path_factory.mktemp("validate") / "run"
    assert main(small_run(digits, run, keep=9, ckpts_per_epoch=1, ema_decay=0.5)) == 0
    return run


@pytest.fixture
def run(averaged, tmp_path) -> Path:
    """A copy to work on."""
    return shutil.copytree(averaged, tmp_path / "run", symlinks=True)


def scored(capsys, *words: str) -> dict[str, float]:
    """The loss of each target."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {row["target"]: row["loss"] for row in rows}


def test_the_batch_that_is_scored_in_changes_no_answer_and_no_early_digit(run, capsys):
    rows = []
    for size in (1, 7, 40):
        capsys.readouterr()
        assert main(["validate", str(run), "--json", f"--valid-batch-size={size}"]) == 0
        rows.append(json.loads(capsys.readouterr().out))
        assert rows[-1].pop("images_per_second") > 0
    loss = rows[0].pop("loss")
    for row in rows[1:]:
        assert row.pop("loss") == pytest.approx(loss, rel=1e-8)
        assert row == rows[0]


def losses(run: Path, table: str) -> dict[int, float]:
    """What a table of the run says of each step."""
    with (run / table).open(newline="") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize("way", ["validate", "train"])
def test_all_scores_the_averages_beside_the_weights(run, capsys, way):
    words = {
        "validate": ["validate", str(run), "--all"],
        "train": ["train", "--resume", str(run), "--training", "false"],
    }
    found = scored(capsys, *words[way])
    shelf = run / "checkpoints"
    expected = {}
    for step, loss in losses(run, "validation.csv").items():
        checkpoint = shelf / f"step-{step:08}"
        expected[str(checkpoint)] = loss
        expected[str(checkpoint / "average.safetensors")] = losses(run, "averaged.csv")[step]
    assert found == expected and list(found) == list(expected)
    assert main(["average", str(run)]) == 0
    more = scored(capsys, *words[way])
    assert list(more) == [*expected, str(shelf / "average")]


def test_the_average_in_a_checkpoint_is_scored_by_name(run, capsys):
    file = run / "checkpoints" / "step-00000018" / "average.safetensors"
    assert scored(capsys, "validate", str(file)) == {str(file): losses(run, "averaged.csv")[18]}


def test_without_checkpoints_the_way_out_is_told(run, capsys):
    shutil.rmtree(run / "checkpoints")
    told = []
    for words in ([], ["--all"]):
        assert main(["validate", str(run), *words]) == CHECKPOINT
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and f"{run / 'checkpoints'} is empty or gone; restore it" in told[0]
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("ckpts-per-epoch: '1'", "ckpts-per-epoch: '0'"))
    assert main(["validate", str(run)]) == CHECKPOINT
    assert "it was trained with --ckpts-per-epoch 0, which keeps no" in capsys.readouterr().err
    (run / "summary.json").unlink()
    assert main(["validate", str(run)]) == CHECKPOINT
    assert f"continue it: phalanx train --resume {run}\n" in capsys.readouterr().err


# --- which checkpoint ---


@pytest.fixture
def peaked(run) -> Path:
    """The run as if its second checkpoint had scored best."""
    (run / "checkpoints" / "best").unlink()
    (run / "checkpoints" / "best").symlink_to("step-00000012")
    return run


@pytest.fixture
def image(tmp_path) -> Path:
    Image.new("L", (12, 12), 90).save(tmp_path / "a.png")
    return tmp_path / "a.png"


CHOICES = {
    "": (12, "step 12, the best checkpoint; --checkpoint last takes the newest, step 18"),
    "best": (12, "step 12, the best checkpoint"),
    "LAST": (18, "step 18, the newest checkpoint"),
    "6": (6, "step 6"),
}


@pytest.mark.parametrize("wanted", CHOICES)
def test_the_best_checkpoint_is_used_unless_another_is_asked_for(peaked, image, capsys, wanted):
    step, told = CHOICES[wanted]
    words = ["--checkpoint", wanted] if wanted else []
    assert main(["validate", str(peaked), *words]) == 0
    said = capsys.readouterr()
    assert said.err == f"{peaked}: {told}\n"
    assert re.match(rf".*/step-{step:08}: top-1 .*, loss [\d.]+, [\d,.]+ images/s\n$", said.out)
    assert main(["predict", str(peaked), str(image), *words]) == 0
    answer = capsys.readouterr()
    assert answer.err == f"{peaked}: {told}\n"
    by_path = ["predict", str(peaked / "checkpoints" / f"step-{step:08}"), str(image)]
    assert main(by_path) == 0
    named = capsys.readouterr()
    assert (named.out, named.err) == (answer.out, "")


def test_where_the_best_is_the_newest_or_none_was_scored(run, capsys):
    assert main(["validate", str(run)]) == 0
    assert f"{run}: step 18, the best checkpoint and the newest\n" in capsys.readouterr().err
    (run / "checkpoints" / "best").unlink()  # as a copy that leaves links out
    assert choose_checkpoint(run)[0].name == "step-00000018"
    for checkpoint in list_checkpoints(run / "checkpoints"):
        files = read_files(checkpoint)
        facts = json.loads(files["facts.json"])
        facts["state"]["scores"] = {}
        write_checkpoint_as(
            checkpoint.parent, checkpoint.name, {**files, "facts.json": json.dumps(facts).encode()}
        )
    assert choose_checkpoint(run)[1] == "step 18, the newest checkpoint; none was scored"
    assert main(["validate", str(run), "--checkpoint", "best"]) == CHECKPOINT
    assert (
        f"{run}: no best checkpoint is known, because none of those kept was scored; "
        "--checkpoint last takes the newest, step 18\n" in capsys.readouterr().err
    )


def test_the_scores_tell_the_best_where_a_copy_left_the_link_out(run):
    (run / "checkpoints" / "best").unlink()
    newest = run / "checkpoints" / "step-00000018"
    files = read_files(newest)
    facts = json.loads(files["facts.json"])
    facts["state"]["scores"] = {"6": 0.5, "12": 0.9, "15": 1.0, "18": 0.8}
    files["facts.json"] = json.dumps(facts).encode()
    write_checkpoint_as(newest.parent, newest.name, files)
    assert choose_checkpoint(run)[0].name == "step-00000012"


WRONG_CHOICES = {
    "7": (CHECKPOINT, "RUN: no checkpoint of step 7 is kept, only of steps 6, 12 and 18"),
    "newest": (CONFIG, "--checkpoint: expected last, best or a step such as 1000, got 'newest'"),
    "9" * 5000: (CONFIG, f"expected last, best or a step such as 1000, got '{'9' * 18}...'\n"),
    "last --all": (CONFIG, "--checkpoint last: --all scores every checkpoint; give one of the two"),
}


@pytest.mark.parametrize("words", WRONG_CHOICES, ids=lambda words: words[:20])
def test_a_checkpoint_that_cannot_be_chosen(run, capsys, words):
    code, told = WRONG_CHOICES[words]
    assert main(["validate", str(run), "--checkpoint", *words.split()]) == code
    assert told.replace("RUN", str(run)) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["best", "step-00000006", "step-00000018/average.safetensors"])
def test_a_checkpoint_leaves_no_choice(run, image, capsys, name):
    path = str(run / "checkpoints" / name)
    for words in (["validate", path], ["predict", path, str(image)]):
        assert main([*words, "--checkpoint", "last"]) == CONFIG
        told = f"--checkpoint last: {path} is a checkpoint itself; leave the option out, or name"
        assert told in capsys.readouterr().err


def test_a_copy_without_links_keeps_its_best_checkpoint(peaked, tmp_path, capsys):
    copy = shutil.copytree(peaked, tmp_path / "copy")
    store = copy / "checkpoints"
    assert (store / "best").is_dir() and not (store / "best").is_symlink()
    assert choose_checkpoint(copy)[0] == store / "step-00000012"
    shutil.rmtree(store / "step-00000012")  # the folder may be all that is left of it
    assert main(["validate", str(copy)]) == 0
    assert f"{copy}: step 12, the best checkpoint; " in capsys.readouterr().err
    shutil.rmtree(store / "step-00000018")
    (copy / "summary.json").unlink()
    assert main(["train", "--resume", str(copy)]) == 0, capsys.readouterr().err
    assert "resumed at step 12" in capsys.readouterr().out
    assert (store / "best").is_symlink() and (store / "step-00000012").is_dir()
    hashes = [read_result(r)["weights_sha256"] for r in (copy, peaked)]
    assert hashes[0] == hashes[1]


def test_a_damaged_copy_of_the_best_is_named(peaked, tmp_path, capsys):
    copy = shutil.copytree(peaked, tmp_path / "copy")
    (copy / "summary.json").unlink()
    best = copy / "checkpoints" / "best"
    (best / "weights.safetensors").write_bytes(b"cut")
    assert main(["train", "--resume", str(copy)]) == CHECKPOINT
    assert f"Remove {best}: it is only a copy of the best" in capsys.readouterr().err


# --- presets and models ---


def test_the_batch_size_of_other_programs_is_that_of_scoring(run, capsys):
    assert main(["validate", str(run), "--batch-size=7", "--valid-batch-size=8"]) == CONFIG
    told = "--batch-size 7: means the same as --valid-batch-size when scoring, which is 8"
    assert told in capsys.readouterr().err
    read = read_checkpoint(run, {"batch-size": "7"})
    assert plan_checkpoint(read).valid_batch == 7 and read.settings.config.data.batch_size == 16


def test_a_preset_is_scored_with_weights_from_elsewhere(digits, run, tmp_path, capsys):
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"data: mnist\ndata-dir: {digits}\nmodel: resnet8\nimage-size: 12\n")
    weights = run / "checkpoints" / "step-00000018" / "weights.safetensors"
    assert main(["validate", str(run), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    words = ["--init-weights", str(weights), "--json"]
    for target in ([str(preset)], ["--config", str(preset)]):
        assert main(["validate", *target, *words]) == 0
        said = capsys.readouterr()
        assert f"mine.yaml: resnet8 on mnist, with the weights of {weights}\n" in said.err
        assert json.loads(said.out)["loss"] == expected["loss"]
    assert phalanx.validate(preset, init_weights=weights).loss == expected["loss"]


def test_the_options_of_the_seeds_are_taken(capsys):
    words = "validate resnet8 --data generated --image-size 16 --batch-size 2 --device cpu"
    seeds = "--precision 32.32 --half-partials --eight-bit-io --repeat 3 --workers 0"
    assert main([*words.split(), *seeds.split()]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("resnet8: top-1 ") and "of 20 images" in said.out
    assert said.err == (
        "note: --half-partials has no effect with --precision 32.32, only with 16.32 and 16.16\n"
        "resnet8 on generated, with random weights, so the score is chance\n"
    )


def test_a_run_says_which_options_of_the_seeds_do_nothing(run, capsys):
    words = ["--device", "cpu", "--precision", "16.32", "--half-partials", "--eight-bit-io"]
    assert main(["validate", str(run), *words]) == 0
    assert "note: --half-partials has no effect on cpu, only on a GPU\n" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["--data-dir", "DATA_DIR"])
def test_a_model_in_any_case_is_scored_on_what_lies_in_a_folder(tmp_path, monkeypatch, place):
    monkeypatch.delenv("DATA_DIR", raising=False)
    photos = tmp_path / "photos"
    write_photos(photos)
    if place == "DATA_DIR":
        monkeypatch.setenv("DATA_DIR", str(photos))
    flags = {"data-dir": str(photos)} if place == "--data-dir" else {}
    settings = read_untrained_settings("ResNet8", flags)
    assert settings is not None and settings.config.model.model == "resnet8"
    assert (settings.config.data.data, settings.config.data.data_dir) == ("folder", str(photos))


WRONG_TARGETS = {
    "demo --checkpoint last": (
        CONFIG,
        "--checkpoint last: demo is not a run, so it has no checkpoi",
    ),
    "demo --all": (CONFIG, "--all: demo is not a run, so it has no checkpoints; leave it out"),
    "demos": (CHECKPOINT, "demos: no such run, checkpoint, preset or model; did you mean 'demo'?"),
    "resnet8 --model resnet9": (
        CONFIG,
        "--model resnet9: the model is resnet8 already; give only one",
    ),
    "resnet8 --config demo": (CONFIG, "--config demo: resnet8 is already named; give only one"),
    "gone.yaml": (CONFIG, "gone.yaml: no such file; `phalanx presets ls` lists the presets"),
    "demo --init-weights gone.pth": (CHECKPOINT, "gone.pth: no such file; --init-weights takes"),
    "w.safetensors": (CHECKPOINT, "phalanx validate MODEL --init-weights w.safetensors"),
    "resnet8 --repeat 0": (CONFIG, "--repeat: expected a whole number from 1 to 10,000, got '0'"),
    "": (CONFIG, "name what to score: a run, a checkpoint, a preset or a model; see phalanx"),
}


@pytest.mark.parametrize("words", WRONG_TARGETS)
def test_what_cannot_be_scored_is_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("w.safetensors").write_bytes(b"")
    code, told = WRONG_TARGETS[words]
    assert main(["validate", *words.split()]) == code
    assert told in capsys.readouterr().err


# --- how fast ---


def test_batches_of_several_sizes_are_scored_in_turn(run, capsys):
    capsys.readouterr()
    assert main(["validate", str(run), "--batch-size", "1,8", "--repeat=3", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["batch_size"] for row in rows] == [1, 8]
    assert rows[0]["top1"] == rows[1]["top1"] and rows[0]["scored"] == 40
    for row in rows:
        assert len(row["rates"]) == 2, "without the first pass"
        assert min(row["rates"]) <= row["images_per_second"] <= max(row["rates"])
    assert main(["validate", str(run), "--batch-size=1,8", "--repeat=3"]) == 0
    out = capsys.readouterr().out
    assert "in batches of 8: top-1" in out and "of 2 passes after the first)" in out
    assert main(["validate", str(run), "--repeat=2"]) == 0
    assert capsys.readouterr().out.endswith(" images/s (of the second pass)\n")


@pytest.mark.parametrize("kind", ["synthetic", "generated"])
def test_noise_takes_the_place_of_the_data(kind, run, capsys):
    found = []
    for words in ([], [f"--{kind}-data"]):
        capsys.readouterr()
        assert main(["validate", str(run), *words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    data, noise = found  # of a run of ten classes
    assert noise["scored"] == 40 and noise["loss"] > data["loss"]
    words = [f"--{kind}-data", "--model=resnet8", "--data=imagenet", "--image-size=16"]
    assert main(["validate", *words, "--batch-size=2"]) == 0
    assert f"resnet8 on {kind}" in capsys.readouterr().err


def test_noise_is_as_large_as_the_images_of_the_data(capsys):
    settings = read_untrained_settings("demo", {})
    assert choose_image_size(use_random_data(settings, "synthetic").config) == 28
    unnamed = read_untrained_settings("resnet50", {})  # a model by name has images of its own size
    assert choose_image_size(use_random_data(unnamed, "synthetic").config) == 224
