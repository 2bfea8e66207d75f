"""EXIF orientation by the real commands: training, prediction, and what older runs had."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.cli.main import main
from small_photos import encode, photo, write_photos
from small_runs import read_result

SMALL_RUN = [
    *("--model", "resnet8", "--image-size", "24", "--batch-size", "4", "--steps", "2"),
    *("--warmup-epoch", "0", "--device", "cpu"),
]


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Twelve photos, all of which lie on their side."""
    root = write_photos(tmp_path_factory.mktemp("photos"), {"train": 4, "val": 1})
    for number, path in enumerate(sorted(root.rglob("*.jpg"))):
        path.write_bytes(encode(photo(number), exif=exif_of(6)))
    return root


def train(photos, run, *more):
    line = ["train", "--data-dir", str(photos), "--run-dir", str(run), *SMALL_RUN]
    assert main([*line, "--workers", "0", *more]) == 0
    return read_weights(run)


def read_weights(run):
    return read_result(run)["weights_sha256"]


def test_a_run_keeps_its_rule(photos, tmp_path, capsys):
    stored, upright = tmp_path / "stored", tmp_path / "upright"
    before = train(photos, stored, "--exif-orientation", "false")
    assert train(photos, upright) != before
    facts = [
        json.loads(next(run.glob("checkpoints/step-*/facts.json")).read_text())
        for run in (stored, upright)
    ]
    assert [fact["preprocessing"]["exif_orientation"] for fact in facts] == [False, True]
    capsys.readouterr()
    assert main(["validate", str(stored), "--exif-orientation", "true"]) == 4
    assert "--exif-orientation true: " in capsys.readouterr().err

    # a run of before there was such an option
    config = stored / "config.yaml"
    lines = config.read_text().splitlines(True)
    config.write_text("".join(line for line in lines if not line.startswith("exif-")))
    shutil.rmtree(stored / "checkpoints")
    (stored / "summary.json").unlink()
    assert main(["train", "--resume", str(stored), "--workers", "0"]) == 0
    assert read_weights(stored) == before


def test_predict_sees_a_photo_upright_and_an_older_checkpoint_as_stored(photos, tmp_path, capsys):
    run = tmp_path / "run"
    train(photos, run)
    lying = Image.fromarray(np.rot90(np.asarray(photo(70, size=(60, 80)))).copy())  # by a quarter
    (tmp_path / "lying.png").write_bytes(encode(lying, "PNG", exif=exif_of(6)))
    (tmp_path / "standing.png").write_bytes(encode(photo(70, size=(60, 80)), "PNG"))
    (tmp_path / "stored.png").write_bytes(encode(lying, "PNG"))
    files = [str(tmp_path / f"{name}.png") for name in ("lying", "standing", "stored")]
    answers = predict(run, files, capsys)
    assert answers[0] == answers[1] != answers[2]

    forget_orientation(next(run.glob("checkpoints/step-*")))
    answers = predict(run, files, capsys)
    assert answers[1] != answers[0] == answers[2]


def predict(run, files, capsys):
    capsys.readouterr()
    assert main(["predict", str(run), *files, "--json"]) == 0
    return [json.loads(line)["guesses"] for line in capsys.readouterr().out.splitlines()]


def forget_orientation(checkpoint):
    """Make a checkpoint one of before there was such an option."""
    path = checkpoint / "facts.json"
    facts = json.loads(path.read_text())
    del facts["config"]["exif-orientation"], facts["preprocessing"]["exif_orientation"]
    path.write_text(json.dumps(facts))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["files"][path.name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_the_fingerprint_of_older_preprocessing_stays():
    older = {
        "image_size": 32,
        "augment": "none",
        "mean": [0.5],
        "std": [0.25],
        "eval_crop": 0.875,
        "normalization": "mean-std",
    }
    known = hashlib.sha256(json.dumps(older, sort_keys=True).encode()).hexdigest()
    assert Preprocessing(**older).fingerprint == known
    assert Preprocessing(**older, exif_orientation=True).fingerprint != known
