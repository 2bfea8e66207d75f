"""Options of the input through a whole run: what they may change, and what they must not."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import phalanx
from phalanx.assemble.prepare import prepare_new_run
from phalanx.assemble.scoring_target import read_checkpoint
from phalanx.assemble.session import Session
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.errors import CheckpointError, ConfigError
from small_runs import read_result, small_run

MIXED = {
    "mixup_alpha": 0.2,
    "cutmix_lambda_low": 0.5,
    "cutmix_lambda_high": 1.0,
    "cutmix_disable_prob": 0.2,
}


def weights_of(run) -> str:
    return read_result(run)["weights_sha256"]


@pytest.fixture(scope="module")
def plain(digits, tmp_path_factory):
    run = tmp_path_factory.mktemp("plain") / "run"
    assert main(small_run(digits, run)) == 0
    return run


@pytest.mark.parametrize(
    "options",
    [
        {"eight_bit_io": "false"},
        {"normalization_location": "host"},
        {"dataloader_rebatch_size": 3, "workers": 2},
        {"dataset_cache": "true", "workers": 1},
        {"keep_on_device": "true"},
    ],
    ids=" ".join,
)
def test_how_images_travel_changes_no_weight(digits, plain, tmp_path, options):
    assert main(small_run(digits, tmp_path / "run", **options)) == 0
    assert weights_of(tmp_path / "run") == weights_of(plain)


@pytest.mark.parametrize(
    "options",
    [{}, {"mixup_alpha": 0.5}, {"cutmix_lambda": 0.5}, MIXED | {"repeated_augmentation": 2}],
    ids=" ".join,
)
def test_a_drawn_step_is_what_the_model_sees(digits, tmp_path, options):
    run, sheet, seen = tmp_path / "run", tmp_path / "sheet.png", []
    options = {"batch_size": 8, "gradient_accumulation": 2, "seed": 3, **options}
    words = small_run(digits, run, normalization_location="none", **options)[1:]
    flags = dict(word.removeprefix("--").split("=", 1) for word in words)
    prepared = prepare_new_run(read_settings(None, flags), line="test")
    with Session(prepared.config, prepared.plan) as session:
        session.model.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
        session.train_step(next(session.feed.batches_from(1)), 0.0)
    assert main(["data", "show", str(run), "--step", "2", "--out", str(sheet)]) == 0
    drawn, middles = np.asarray(Image.open(sheet)), 10 * np.arange(12) + 5
    for number, image in enumerate(torch.cat(seen).numpy().transpose(0, 2, 3, 1)):
        rows, columns = 36 + number // 4 * 146 + middles, 8 + number % 4 * 128 + middles
        assert np.allclose(drawn[np.ix_(rows, columns)], 255 * image, atol=1)


@pytest.mark.parametrize(
    "options",
    [{"normalization_location": "none"}, {"repeated_augmentation": 2}, {"mixup_alpha": 0.2}],
    ids=" ".join,
)
def test_what_the_model_sees_does(digits, plain, tmp_path, options):
    assert main(small_run(digits, tmp_path / "run", **options)) == 0
    assert weights_of(tmp_path / "run") != weights_of(plain)


@pytest.mark.parametrize(
    "options",
    [MIXED, {"cutmix_lambda": 0.6}, {"repeated_augmentation": 3}, {"keep_on_device": "true"},
     {"progressive_resolution": "8:30%,10:60%"}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_a_resume_ends_with_the_same_bits(digits, tmp_path, options):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(small_run(digits, whole, **options)) == 0
    assert main(small_run(digits, cut, **options)) == 0
    (cut / "summary.json").unlink()
    for checkpoint in sorted((cut / "checkpoints").glob("step-*"))[1:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    assert main(["train", "--resume", str(cut)]) == 0
    assert weights_of(cut) == weights_of(whole)


def test_a_step_cut_into_passes_mixes_within_each(digits, tmp_path):
    """Partners come from the same micro-batch: its size is part of the maths."""
    assert main(small_run(digits, tmp_path / "one", **MIXED)) == 0
    halves = {**MIXED, "batch_size": 8, "gradient_accumulation": 2}
    assert main(small_run(digits, tmp_path / "two", **halves)) == 0
    assert weights_of(tmp_path / "one") != weights_of(tmp_path / "two")


def test_sizes_that_do_not_grow_are_refused(digits, tmp_path):
    for text, told in (
        ("8:60%,10:30%", "each must come after the one before"),
        ("12:50%", "expected sizes below --image-size 12"),
        ("8", "such as 128:30%,176:60%"),
    ):
        with pytest.raises(ConfigError, match=told):
            phalanx.plan(
                data="mnist", data_dir=str(digits), image_size=12, progressive_resolution=text
            )


def test_keeping_photographs_on_the_device_is_refused(tmp_path, capsys):
    for number in range(8):
        path = tmp_path / "photos" / ("train" if number < 4 else "val") / "ab"[number % 2]
        path.mkdir(parents=True, exist_ok=True)
        pixels = np.full((40, 40, 3), number * 20, np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.jpg")
    words = ["train", "--data", "folder", "--data-dir", str(tmp_path / "photos"), "--device=cpu"]
    words += ["--model=resnet8", "--image-size=32", "--batch-size=2", "--epochs=1"]
    words += ["--warmup-epoch=0", "--keep-on-device", "--run-dir", str(tmp_path / "run")]
    assert main(words) == 2
    assert "--keep-on-device: folder is not a set of small images" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_is_scored_without_what_served_its_training(digits, tmp_path, capsys):
    run, alone = tmp_path / "run", tmp_path / "alone"
    options = {"keep_on_device": "true", "dataset_cache": "true"}
    assert main(small_run(digits, run, steps=6, **options)) == 0
    top1 = read_result(run)["top1"]
    alone.mkdir()
    for file in digits.glob("t10k-*"):
        (alone / file.name).write_bytes(file.read_bytes())
    capsys.readouterr()
    assert main(["validate", str(run), "--data-dir", str(alone), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == top1


def test_the_size_a_run_had_by_itself_may_be_said(plain):
    assert phalanx.validate(str(plain), image_size=12) is not None


def test_sizes_on_the_way_are_checked_as_the_last_one_is(tmp_path, capsys):
    words = ["plan", "--model=resnet18", "--data=generated", "--image-size=64", "--batch-size=1"]
    assert main([*words, "--progressive-resolution=8:50%"]) == 2
    assert "resnet18 halves the image" in capsys.readouterr().err
    assert main([*words, "--progressive-resolution=32:100%"]) == 2
    assert "no step is left at --image-size" in capsys.readouterr().err


def test_every_checkpoint_says_how_images_were_prepared(plain):
    facts = read_checkpoint(plain, {}).start.facts
    assert len(facts["preprocessing_fingerprint"]) == 64
    assert facts["preprocessing"]["image_size"] == 12 and facts["data_manifest"] is None


@pytest.mark.parametrize(
    ("option", "value", "trained"),
    [("eval_crop", 0.5, 0.875), ("normalization", "mean", "mean-std"), ("image_size", 14, 12)],
)
def test_another_preprocessing_is_refused(plain, option, value, trained):
    name = option.replace("_", "-")
    with pytest.raises(CheckpointError, match=f"--{name} {value}: .* trained with {trained}"):
        phalanx.validate(str(plain), **{option: value})


def test_validate_refuses_another_crop_with_an_exit_code(plain, capsys):
    assert main(["validate", str(plain), "--eval-crop", "1"]) == 4
    assert "--eval-crop 1.0" in capsys.readouterr().err


def test_the_summary_and_the_report_say_who_waited(digits, tmp_path):
    assert main(small_run(digits, tmp_path / "run", epochs=6)) == 0  # the first steps go untimed
    found = read_result(tmp_path / "run")["input"]
    assert found["images_per_second_available"] > 0 and found["images_per_second_needed"] > 0
    assert set(found["stages"]) == {"read", "augment", "both"}
    assert "images/s; resnet" in found["verdict"]
    assert "images/s; resnet" in (tmp_path / "run" / "report.html").read_text()


def test_the_manifest_is_forgotten_when_a_file_changes(tmp_path, capsys):
    root = tmp_path / "photos"
    for number in range(12):
        path = root / ("train" if number < 8 else "val") / "ab"[number % 2]
        path.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(path / f"{number}.jpg")
    words = ["--data=folder", f"--data-dir={root}", "--device=cpu", "--model=resnet8"]
    words += ["--image-size=32", "--batch-size=2", "--steps=2", "--warmup-epoch=0", "--workers=0"]
    assert main(["data", "verify", str(root)]) == 0
    assert main(["train", *words, f"--run-dir={tmp_path / 'one'}"]) == 0
    known = read_checkpoint(tmp_path / "one", {}).start.facts["data_manifest"]
    file = root / "train" / "a" / "0.jpg"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1  # the same size, another content
    file.write_bytes(data)
    assert main(["train", *words, f"--run-dir={tmp_path / 'two'}"]) == 0
    assert known and read_checkpoint(tmp_path / "two", {}).start.facts["data_manifest"] is None


def test_a_cache_that_does_not_fit_leaves_no_run(digits, tmp_path, monkeypatch, capsys):
    root = tmp_path / "photos"
    for number in range(8):
        path = root / ("train" if number < 4 else "val") / "ab"[number % 2]
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), number * 20, np.uint8)).save(path / f"{number}.jpg")
    monkeypatch.setattr("phalanx.data.loading.cache.read_free_memory", lambda: 1000)
    words = ["train", "--data=folder", f"--data-dir={root}", "--device=cpu", "--model=resnet8"]
    words += ["--image-size=32", "--batch-size=2", "--steps=2", "--warmup-epoch=0"]
    assert main([*words, "--dataset-cache", f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "--dataset-cache: " in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_manifest_of_verified_data_is_in_every_checkpoint(digits, tmp_path, capsys):
    assert main(["data", "verify", str(digits), "--json"]) in (0, 3)
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert main(small_run(digits, tmp_path / "run", steps=6)) == 0
    assert read_checkpoint(tmp_path / "run", {}).start.facts["data_manifest"] == manifest
