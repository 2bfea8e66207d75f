"""The same road on a CUDA device."""

import csv
import json
import os

import pytest
import torch

from phalanx.assemble.dataset_summary import plan_run
from phalanx.assemble.session import Session
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.data.loading.gpu_decode import find_gpu_decode_problem, has_decoding_engines
from phalanx.data.loading.gpu_share import ImageCheck
from phalanx.engine.checkpoint_store import find_newest_checkpoint, read_facts
from small_photos import write_photos
from small_runs import read_result, rewind, run_phalanx, small_run

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["32.32", "16.32"])
def test_training_validation_and_fork(digits, tmp_path, capsys, precision):
    run, fork = tmp_path / "run", tmp_path / "fork"
    assert main(small_run(digits, run, epochs=10, device="cuda", precision=precision)) == 0
    summary = read_result(run)
    capsys.readouterr()
    assert main(["validate", str(run), "--json", "--checkpoint", "last"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == summary["top1"]
    assert main(["train", "--fork", str(run), "--run-dir", str(fork), "--epochs", "11"]) == 0
    assert read_result(fork)["steps"] == 66


def test_a_run_begun_on_the_gpu_is_scored_on_the_cpu(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(small_run(digits, run, device="cuda", precision="32.32")) == 0
    top1 = read_result(run)["top1"]
    capsys.readouterr()
    assert main(["validate", str(run), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == pytest.approx(top1, abs=0.051)


def fed_images(digits, steps=5, *, check=None, **flags):
    """The normalised images and labels of the first steps and of the validation split."""
    flags = {"data": "mnist", "data-dir": str(digits), "image-size": "12", "batch-size": "16",
             "model": "resnet8", "device": "cuda", **flags}  # fmt: skip
    settings = read_settings(None, flags)
    plan, _ = plan_run(settings)
    with Session(settings.config, plan, image_check=check) as session:
        feed, found = session.feed, []
        for (batch,), _ in zip(feed.batches_from(0), range(steps), strict=False):
            torch.cuda._sleep(20_000_000)  # the copies run ahead of the work
            found += [batch.images.clone(), batch.labels]
        for scored in feed.validation_batches():  # what is sent is padded, what lies there is not
            real = scored.indices >= 0
            found += [scored.images[real], scored.labels[real], scored.indices[real]]
        return feed.loader.on_device, [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_set_on_the_device_gives_the_hosts_images(digits, workers):
    there, kept = fed_images(digits)  # by itself: the set is small
    here, sent = fed_images(digits, **{"keep-on-device": "false", "workers": workers})
    assert there and not here
    assert all(torch.equal(a, b) for a, b in zip(kept, sent, strict=True))


def test_floats_that_travel_are_the_same_images(digits):
    usual = fed_images(digits, **{"keep-on-device": "false"})[1]
    floats = fed_images(digits, **{"keep-on-device": "false", "eight-bit-io": "false"})[1]
    host = fed_images(digits, **{"normalization-location": "host"})[1]
    assert all(torch.equal(a, b) for a, b in zip(usual, floats, strict=True))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(usual, host, strict=True))


def test_photographs_are_shared_with_the_cores_to_the_same_images(tmp_path):
    if why := find_gpu_decode_problem(CUDA):
        pytest.skip(why)
    photos = write_photos(tmp_path / "photos")
    flags = {"data": "folder", "image-size": "32", "model": "resnet18"}
    found = {
        (share, workers): fed_images(
            photos, 3, **flags, **{"gpu-decode": share, "workers": workers}
        )
        for share in ("false", "0.4", "true")
        for workers in ("0", "2")
    }
    for share in ("false", "0.4", "true"):
        pairs = zip(found[share, "0"][1], found[share, "2"][1], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert [found[share, "2"][0] for share in ("false", "0.4")] == [False, True]
    images = [found[share, "2"][1][0] for share in ("false", "0.4", "true")]
    takes = torch.arange(16) * 40 % 100 < 40
    assert torch.equal(images[1][takes], images[2][takes])
    assert torch.equal(images[1][~takes], images[0][~takes])
    assert not torch.equal(images[0], images[2])


def test_photographs_are_the_gpus_when_the_cores_have_decoded_each_once(tmp_path):
    if (why := find_gpu_decode_problem(CUDA)) or not has_decoding_engines(CUDA):
        pytest.skip(why or "this GPU has no engines for JPEGs")
    photos = write_photos(tmp_path / "photos", size=(1400, 1000))
    flags = {"data": "folder", "image-size": "32", "model": "resnet18", "epochs": "9"}
    decided = ImageCheck(since=0, is_decided=True, waited=0.5)
    usual = fed_images(photos, 6, check=decided, **flags)[1]
    by_cores, by_gpu = (
        fed_images(photos, 6, **flags, **{"gpu-decode": share})[1] for share in ("false", "true")
    )
    for number, (images, cores, gpu) in enumerate(zip(usual, by_cores, by_gpu, strict=True)):
        later = 6 <= number < 12  # images and labels of six steps, then what is scored
        assert torch.equal(images, gpu if later else cores), number
        assert torch.equal(cores, gpu) == (not images.is_floating_point()), number
    run = tmp_path / "run"
    for photo in list(photos.glob("train/*/*.jpg")):  # more than are read while kernels compile
        for number in range(19):
            os.link(photo, photo.with_stem(f"{photo.stem}-{number}"))
    words = {**flags, "data-dir": photos, "batch-size": 16, "device": "cuda", "epochs": 2}
    words |= {"keep": 9, "workers": 1}  # which cannot keep up
    assert main(["train", *(f"--{n}={v}" for n, v in words.items()), f"--run-dir={run}"]) == 0
    log, result = (run / "log.txt").read_text(), read_result(run)
    newest = find_newest_checkpoint(run / "checkpoints")
    waited = read_facts(newest)["state"]["image_check"]["waited"]
    assert waited > 0.2
    assert "note: the cores decode every image once, up to step 60; then the GPU does, if" in log
    why = f"the GPU spent {waited:.0%} of its time waiting for images"
    assert f"note: the GPU decodes JPEGs from step 61 on: {why}" in log
    assert "decoded on the device from step 61 on" in result["input"]["verdict"]
    rewind(run, step=60)  # saved after scoring, before a step of the second epoch was asked for
    assert main(["train", "--resume", str(run), "--workers", "16"]) == 0  # which may keep up
    assert (run / "log.txt").read_text().count(f"from step 61 on: {why}") == 2


def test_mixing_trains_on_the_device(digits, tmp_path):
    mixed = {"mixup_alpha": 0.2, "cutmix_lambda_low": 0.5, "cutmix_lambda_high": 1.0}
    assert main(small_run(digits, tmp_path / "run", device="cuda", epochs=12, **mixed)) == 0
    assert read_result(tmp_path / "run")["top1"] > 0.3


def test_the_cpu_scores_while_the_gpu_trains(digits, tmp_path):
    options = {"device": "cuda", "precision": "32.32", "determinism": "strict"}
    rows = []
    for name, more in (("gpu", {}), ("cpu", {"validation_device": "cpu"})):
        assert main(small_run(digits, tmp_path / name, epochs=10, **options, **more)) == 0
        with (tmp_path / name / "validation.csv").open(newline="") as file:
            rows.append(list(csv.DictReader(file)))
    summaries = [read_result(tmp_path / name) for name in ("gpu", "cpu")]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for gpu, cpu in zip(*rows, strict=True):
        assert (gpu["scored"], cpu["scored"]) == ("40", "40")
        assert float(cpu["loss"]) == pytest.approx(float(gpu["loss"]), rel=1e-3)
    told = (tmp_path / "cpu" / "log.txt").read_text()
    assert "on cuda in 32.32" in told and "--validation-device" not in told


def test_devices_that_are_not_asked_for_are_left_alone(digits, capsys):
    words = ["validate", "resnet8", "--data", "mnist", "--data-dir", str(digits)]
    words += ["--image-size", "12", "--device", "cuda", "--json"]
    assert main(words) == 0
    alone = json.loads(capsys.readouterr().out)
    found = run_phalanx(*words, "--devices", "1")
    assert found.returncode == 0 and json.loads(found.stdout)["scored"] == alone["scored"]
    there = torch.cuda.device_count()
    found = run_phalanx(*words, "--devices", there + 1)
    assert found.returncode == 2
    assert f"--device cuda:{there}: this machine has {there} CUDA device" in found.stderr
