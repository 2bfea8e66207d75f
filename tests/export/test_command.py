"""`phalanx export`: what it prints, and how it answers mistakes."""

import json
import shutil
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import phalanx
from phalanx.cli.main import main
from phalanx.export import options
from phalanx.export.metadata import check_model_name, make_model_name


def test_it_says_where_the_model_is_and_how_it_compares(run, tmp_path, capsys):
    out = tmp_path / "w.safetensors"
    words = ["export", str(run), "--format", "safetensors", "--checkpoint", "last"]
    assert main([*words, "--averaged", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(
        "agrees with the checkpoint on 40 validation images of its data (mnist), in batches "
        "of 1, 2 and 32: logits within "
    )
    assert f"{out}: resnet8, float32, " in printed.out
    assert f"  model card: {tmp_path / 'README.md'}\n" in printed.out
    assert "the newest checkpoint; its averaged weights" in printed.err
    assert main([*words, "--json", "--dtype", "bfloat16", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(out) and told["bytes"] == out.stat().st_size
    assert told["checked"]["images"] == 40 and told["metadata"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--format", "onx"], 2, "--format onx: did you mean 'onnx'?"),
        (["--dtype", "int8"], 2, "--dtype int8: choose from float32, float16, bfloat16"),
        (
            ["--dtype", "bfloat16"],
            2,
            "--dtype bfloat16: onnxruntime has no bfloat16 convolutions on a CPU, so the file "
            "could not be checked; use float16, or --format pt2",
        ),
        (
            ["--format", "timm", "--with-preprocessing"],
            2,
            "--with-preprocessing: --format timm holds weights alone, which take no input; leave "
            "the option out, or use --format onnx",
        ),
        (
            ["--name", "a/b"],
            2,
            "--name 'a/b': a name has up to 100 letters, digits, '.', '_'",
        ),
        (["--name", ".."], 2, "--name '..': a name has up to 100 letters"),
        (["--name", "a" * 101], 2, "a': a name has up to 100 letters"),
        (["--max-batch", "0"], 2, "--max-batch: expected a whole number from 1 to 4,096, got '0'"),
        (["--image-sise", "32"], 2, "--image-sise: no such option"),
        (
            ["--init-weights", "w.pth"],
            2,
            "already says what its model is; only a preset or a model by name takes such options, "
            "as in: phalanx export resnet50",
        ),
        (
            ["--out", "model.pt2"],
            2,
            "--out model.pt2: ends in .pt2, and --format onnx writes .onnx; change one of them",
        ),
        (["--out", "dd/x.txt"], 2, "--out dd/x.txt: ends in .txt, and --format onnx writes .onnx;"),
        (["--out", "x.ONNX"], 2, "--out x.ONNX: ends in .ONNX, and --format onnx writes .onnx;"),
        (
            ["--out", "x.pth", "--format", "triton"],
            2,
            "--out x.pth: ends in .pth, and --format triton writes a folder; change one of them",
        ),
        (["--images", "nowhere.png"], 3, "nowhere.png: no such file or folder"),
        (["--checkpoint", "77"], 4, "no checkpoint of step 77 is kept"),
    ],
)
def test_mistakes_are_told_before_torch_is_asked(run, words, code, message, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "phalanx.export.run", None)  # which imports torch
    assert main(["export", str(run), *words]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("model.onnx", b"\x08\x0a", "an ONNX model, which is exported already"),
        ("cat.jpg", b"\xff\xd8\xff\xe0", "a JPEG image"),
        ("old.pth", b"PK\x03\x04", "a zip archive, as torch's .pth and .pt2 files are"),
        ("page.pth", b"<!DOCTYPE html>", "a web page"),
        ("w.safetensors", b"\x10\0\0\0\0\0\0\0{}", "weights alone"),
        ("empty", b"", "it is empty"),
        ("notes.txt", b"my notes", "it begins with b'my notes'"),
    ],
)
def test_a_file_that_is_no_run_is_called_what_it_is(tmp_path, name, content, what, capsys):
    (tmp_path / name).write_bytes(content)
    assert main(["export", str(tmp_path / name)]) == 4
    told = f"{tmp_path / name}: is a file ({what}); name the run or the checkpoint to export"
    if name.endswith((".pth", ".safetensors")):
        told += f", or the model: phalanx export MODEL --init-weights {tmp_path / name}"
    assert f"{told}\n" in capsys.readouterr().err


def test_a_missing_package_is_told_with_the_line_that_installs_it(run, capsys, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "onnxruntime" else name)
    assert main(["export", str(run)]) == 2
    assert (
        "--format onnx: onnxruntime is not installed; pip install 'phalanx[export]'"
    ) in capsys.readouterr().err


def test_a_run_without_averages_says_so(run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run / "checkpoints" / "best", copy)
    assert main(["export", str(copy)]) == 2
    assert "is in no run folder to write to; say where the export goes" in capsys.readouterr().err
    (copy / "average.safetensors").unlink()
    assert main(["export", str(copy), "--averaged"]) == 4
    assert "has no averaged weights, because the run was not trained" in capsys.readouterr().err


def change_facts(run, copy, change):
    """A checkpoint of the run whose facts are others, as if they had been saved so."""
    shutil.copytree(run / "checkpoints" / "best", copy)
    facts = json.loads((copy / "facts.json").read_text())
    change(facts)
    content = json.dumps(facts).encode()
    (copy / "facts.json").write_bytes(content)
    manifest = json.loads((copy / "manifest.json").read_text())
    sums = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    manifest["files"]["facts.json"] = sums
    (copy / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda facts: facts["preprocessing"].update(mean=[0.5, 0.5, 0.5]),
            "its preprocessing is not the one it was saved with",
        ),
        (
            lambda facts: facts["classes"].pop(),
            "fc.weight is (10, 64) in the file, (9, 64) in the model",
        ),
    ],
)
def test_facts_that_do_not_fit_the_weights_are_refused(run, tmp_path, change, message, capsys):
    change_facts(run, tmp_path / "checkpoint", change)
    out = tmp_path / "w.safetensors"
    words = ["export", str(tmp_path / "checkpoint"), "--format", "safetensors", "--out", str(out)]
    assert main(words) == 4
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_what_a_killed_export_left_is_removed_by_the_next(run, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".w.safetensors.{dead.pid}.part"
    left.mkdir()
    (left / "w.safetensors").write_bytes(b"half")
    phalanx.export(run, format="safetensors", out=tmp_path / "w.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "w.safetensors"]


def test_a_place_that_cannot_be_written_is_told(run, capsys):
    words = ["export", str(run), "--format", "safetensors", "--out", "/proc/nowhere/w.safetensors"]
    assert main(words) == 6
    assert "cannot be written" in (told := capsys.readouterr().err)
    assert told.endswith("fix that or choose another --out\n")


def test_names_that_are_not_utf8_are_escaped_or_refused(tmp_path, capsys):
    for split in ("train", "val"):
        for name in ("cat\udcff", "dog"):
            folder = tmp_path / "pets" / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / "0.png")
    small = {"model": "resnet8", "image_size": 8, "batch_size": 2, "steps": 1, "workers": 0}
    run = tmp_path / "run\udcff"
    phalanx.train(data_dir=tmp_path / "pets", run_dir=run, device="cpu", **small)
    done = phalanx.export(run, format="safetensors", out=tmp_path / "a.safetensors")
    assert done.metadata.classes == (r"cat\udcff", "dog")
    assert r"run\udcff" in done.card.read_text()
    assert main(["export", str(run)]) == 2
    assert (
        "is not UTF-8, and the libraries that open models accept no other paths"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["_a.b-c", "a" * 100, "7"])
def test_names_of_an_export_and_of_a_server_are_the_same(name):
    assert make_model_name(name) == name
    check_model_name(name)
    assert options.ExportOptions(name=name).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [("..", ""), ("-über uns-", "ber-uns"), (f"{'a' * 99}/{'b' * 9}", f"{'a' * 99}-")],
)
def test_a_name_from_any_text(text, name):
    assert make_model_name(text) == name
    if name:
        check_model_name(name)


def test_a_folder_may_have_a_dot_in_its_name(tmp_path):
    (tmp_path / "there.txt").mkdir()
    for name in ("v1.2", "there.txt"):
        asked = options.ExportOptions(name="digits", out=tmp_path / name)
        assert asked.choose_path(None) == tmp_path / name / "digits.onnx"


def test_names_are_made_of_what_an_address_can_hold(run, tmp_path):
    done = phalanx.export(run, format="safetensors", out=tmp_path / "folder")
    assert done.path == tmp_path / "folder" / "bars-digits.safetensors"
    named = phalanx.export(run, format="safetensors", name="digits.v2", out=tmp_path / "folder")
    assert named.path.name == "digits.v2.safetensors"
    first, second = load_file(done.path), load_file(named.path)
    assert all(np.array_equal(first[name], second[name]) for name in first)
