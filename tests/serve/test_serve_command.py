"""The command: what it refuses to start with, keys, the port, the log, and a run by torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx import load
from phalanx.assemble.dataset_summary import Preprocessing
from phalanx.cli.main import main
from phalanx.export.metadata import METADATA_FORMAT
from phalanx.serve.backend import BackendOptions, PaddedModel, open_backends
from small_runs import small_run
from small_server import (
    CLASSES,
    RunningServer,
    make_metadata,
    make_png,
    open_server,
    write_model,
)

PNG = {"Content-Type": "image/png"}
KEY = "correct horse battery staple"


def refuse(capfd, *words) -> tuple[int, str]:
    """The exit code and the message of a server that does not start; one that does is stopped."""
    stop = threading.Timer(20, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    code = main(["serve", *map(str, words), "--port", "0"])
    stop.cancel()
    said = capfd.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return code, said.err


# --- files ---

FILES = {
    "image.onnx": (b"\xff\xd8\xff\xe0 jpeg", "is a JPEG image; name a run"),
    "weights.pth": (b"PK\x03\x04 zip", "is a zip archive, as torch's .pth"),
    "program.pt2": (b"PK\x03\x04 zip", "is an exported program of torch (pt2)"),
    "weights.safetensors": (b"\x10\0\0\0\0\0\0\0{}", "is a safetensors file: weights without"),
    "empty.onnx": (b"", "is an empty file"),
    "pointer.onnx": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "page.onnx": (b"<!DOCTYPE html><html>", "is a web page"),
    "notes": (b"some notes\n", "is text"),
    "notes.onnx": (b"some notes\n", "is text; name a run"),
    "noise.onnx": (bytes(range(100, 200)), "onnxruntime cannot load it"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_model_is_called_what_it_is(tmp_path, capfd, name):
    content, what = FILES[name]
    (tmp_path / name).write_bytes(content)
    code, said = refuse(capfd, tmp_path / name)
    assert code == 4 and what in said and f"{tmp_path / name}: " in said


def test_a_folder_that_is_no_run_is_called_what_it_is(tmp_path, capfd):
    code, said = refuse(capfd, tmp_path / "nothing")
    assert code == 4 and "no such file or folder" in said
    for files, what in (
        ((), "an empty folder"),
        (("config.pbtxt",), "a repository for Triton"),
        (("config.json", "model.safetensors"), "a folder for timm"),
        (("saved_model.pb",), "a SavedModel of TensorFlow"),
        (("shoe.png",), "neither a run nor a checkpoint"),
    ):
        folder = tmp_path / f"folder of {len(what)}"
        folder.mkdir()
        for file in files:
            (folder / file).write_text("x")
        code, said = refuse(capfd, folder)
        assert code == 4 and what in said, said


@pytest.mark.parametrize("name", ["demo", "resnet8"])
def test_a_preset_is_exported_first(name, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, said = refuse(capfd, name)
    assert code == 4 and said.endswith(f"and serve the file: phalanx export {name}\n")


def with_format(number: int) -> str:
    return json.dumps(json.loads(make_metadata().model_dump_json()) | {"format": number})


def with_preprocessing(**changes) -> str:
    facts = {"image_size": 32, "augment": "none", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    made = Preprocessing(**(facts | changes))
    found = make_metadata(preprocessing=made, preprocessing_fingerprint=made.fingerprint)
    return found.model_dump_json()


MODELS = {
    "of another program": ({"metadata": "{}"}, "its metadata is damaged"),
    "of a newer format": (
        {"metadata": with_format(METADATA_FORMAT + 1)},
        f"format {METADATA_FORMAT + 1} of a newer Phalanx",
    ),
    "of another size": (
        {"metadata": with_preprocessing(image_size=28)},
        "prepares input tensor(float) [N, 3, 28, 28], and the model takes input tensor(float) "
        "[N, 3, 32, 32]: another preprocessing",
    ),
    "of another preprocessing than its run's": (
        {"metadata": make_metadata(preprocessing_fingerprint="0").model_dump_json()},
        "preprocessing",
    ),
    "of unknown crops": (
        {"metadata": with_preprocessing(augment="mosaic")},
        "prepared by 'mosaic', which this Phalanx does not know",
    ),
    "of pixels": (
        {"metadata": make_metadata(input="image").model_dump_json()},
        "prepares image tensor(uint8) [N, 32, 32, 3], and the model takes input",
    ),
    "of more classes than labels": (
        {"classes": CLASSES + 3},
        f"the model gives {CLASSES + 3} classes, and its metadata names {CLASSES}; export it again",
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_does_not_fit_its_metadata_is_refused(tmp_path, capfd, what):
    changes, reason = MODELS[what]
    code, said = refuse(capfd, write_model(tmp_path / "model.onnx", **changes))
    assert code == 4 and reason in said


def test_an_onnx_file_without_our_metadata_is_refused(tmp_path, capfd):
    code, said = refuse(capfd, write_model(tmp_path / "model.onnx", metadata=""))
    assert code == 4 and "an ONNX file of another program" in said


# --- options ---

WORDS = {
    ("--max-batch", "0"): "--max-batch: expected a whole number from 1 to 4,096, got '0'",
    ("--max-wait-ms", "-1"): "--max-wait-ms: expected a number from 0",
    ("--max-wait-ms", "nan"): "--max-wait-ms: expected a number from 0",
    ("--workers", "x"): "--workers: expected a whole number from 1 to 64",
    ("--port", "65536"): "--port: expected a whole number from 0 to 65,535",
    ("--port", "9" * 5000): f"--port: expected a whole number from 0 to 65,535, got '{'9' * 80}'",
    ("--name", "a b"): "--name 'a b': a name has up to 100 letters",
    ("--name=-a", "--port=0"): "--name '-a': a name has up to 100 letters",
    ("--host", "0.0.0.0"): "--host 0.0.0.0: other machines could use the model; give --api-key",
    ("--api-key-file", "/nothing"): "--api-key-file /nothing: cannot be read",
    ("--max-bach", "3"): "--max-batch",
    ("--checkpoint", "last"): "--checkpoint last: {file} is a file, which has it already",
    ("--averaged",): "--averaged: {file} is a file, which has it already",
    ("--precision", "16.32"): "--precision 16.32: {file} is a file, which has it already",
    ("--device", "cuda:0,1"): "--device cuda:0,1: a server uses one device; start one for each",
    ("--device", "cuda"): "this onnxruntime has no CUDA; use --device cpu",
}


@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(words)[:60])
def test_options_that_make_no_sense_are_refused(model_file, capfd, monkeypatch, words):
    monkeypatch.delenv("PHALANX_API_KEY", raising=False)
    code = main(["serve", str(model_file), *words])
    said = capfd.readouterr()
    reason = WORDS[words].replace("{file}", str(model_file))
    assert code == 2 and reason in said.err and said.out == ""


def test_keys_that_are_none_are_refused(model_file, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("PHALANX_API_KEY", raising=False)
    for text, reason in (
        ("", "is empty; make a key"),
        ("short", "at least 8"),
        ("a\nbcdefgh", "one"),
    ):
        (tmp_path / "key").write_text(text)
        code, said = refuse(capfd, model_file, "--api-key-file", tmp_path / "key")
        assert code == 2 and reason in said
    monkeypatch.setenv("PHALANX_API_KEY", KEY)
    code, said = refuse(capfd, model_file, "--no-auth")
    assert code == 2 and "--no-auth: contradicts PHALANX_API_KEY" in said


def test_a_port_in_use_is_told_before_the_model_is_loaded(capfd, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code = main(["serve", str(write_model(tmp_path / "m.onnx")), "--port", str(port)])
    said = capfd.readouterr().err
    assert code == 8
    assert f"--port {port}: another program listens on port {port} of 127.0.0.1" in said
    assert "--port 0 for any that is free" in said


def test_help_and_mistakes_need_neither_torch_nor_the_packages(tmp_path):
    code = (
        "import sys; from phalanx.cli.main import main; main(['serve', '--help']); "
        f"main(['serve', {str(tmp_path)!r}, '--workers']); "
        "sys.exit(bool({'torch', 'onnxruntime', 'uvicorn', 'starlette'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_onnxruntime_reports_nothing(model_file, tmp_path, monkeypatch):
    """It would keep a number for this machine, and send what is run to its maker."""
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    with open_server(model_file, environment={"HOME": str(tmp_path)}) as found:
        assert found.stop(signal.SIGHUP) == 0  # as when its terminal is closed
    assert list(tmp_path.rglob("*")) == []


def test_missing_packages_are_named(model_file, capfd, monkeypatch):
    monkeypatch.setattr("phalanx.cli.serve.find_spec", lambda name: None)
    code, said = refuse(capfd, model_file)
    assert code == 2
    assert "needs starlette, uvicorn, httptools, orjson: pip install 'phalanx[serve]'" in said


def test_a_log_that_cannot_be_written_is_told_once_and_requests_are_answered(model_file):
    with open_server(model_file, "--access-log", "/dev/full") as found:
        assert [found.ask("/health").status for _ in range(3)] == [200] * 3
        found.process.terminate()
        _, said = found.process.communicate(timeout=30)
    told = "phalanx serve: --access-log /dev/full: No space left on device; requests are answered, "
    assert said == f"{told}not logged\n"


# --- a server with a key, a name, a log, and a run behind it ---


@pytest.fixture(scope="module")
def log_file(tmp_path_factory):
    return tmp_path_factory.mktemp("logs") / "access.jsonl"


@pytest.fixture(scope="module")
def guarded(model_file, log_file):
    words = (model_file, "--workers", "2", "--access-log", log_file, "--name", "a-run")
    words += ("--host", "0.0.0.0")
    with open_server(*words, environment={"PHALANX_API_KEY": KEY}) as found:
        yield found


def test_a_run_is_answered_by_torch(digits, tmp_path):
    place = tmp_path / "a run"
    assert main(small_run(digits, place, steps=2, model="resnet8", ema_decay=0.99)) == 0
    options = BackendOptions(device="cpu", threads=1, max_batch=4, flags={})
    first, second = open_backends(place, options, count=2)
    metadata = first.metadata
    assert (metadata.name, metadata.model, metadata.step) == ("a run", "resnet8", 2)
    assert "torch" in first.runtime and first.input_kinds == ("tensor", "image")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 12, 12, 3), np.uint8)
    model = load(place)
    with torch.inference_mode():
        wanted = model.module(model.preprocess(pixels)).numpy()
    PaddedModel(first, 4).warm_up()
    found = PaddedModel(first, 4).run(pixels)
    assert np.allclose(found["logits"], wanted, atol=1e-5)
    assert metadata.has_activation_map and found["activation_map"].shape == (3, 3, 3)
    tensor = model.preprocess(pixels).numpy()
    assert np.allclose(second.run(tensor)["logits"], wanted, atol=1e-5)
    assert not metadata.averaged
    average = place / "checkpoints/best/average.safetensors"
    with torch.inference_mode():
        wanted = load(average).module(model.preprocess(pixels)).numpy()
    assert np.abs(found["logits"] - wanted).max() > 1e-3, "the average is the same"
    for path, how in ((place, replace(options, averaged=True)), (average, options)):
        (backend,) = open_backends(path, how, count=1)
        assert backend.metadata.averaged
        assert np.allclose(backend.run(tensor)["logits"], wanted, atol=1e-5)


def test_a_key_is_asked_for_where_the_model_is(guarded: RunningServer):
    assert guarded.line.startswith("serving a-run on http://0.0.0.0:")
    assert "key required" in guarded.line
    for headers in ({}, {"X-API-Key": KEY[:-1]}, {"Authorization": f"Basic {KEY}"}):
        for path in ("/predict", "/v1/models/a-run", "/v2/models/a-run", "/metrics", "/nothing"):
            answer = guarded.ask(path, headers=headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert "needs its key" in answer.json["error"]
    for headers in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
        assert guarded.ask("/v2/models/a-run", headers=headers).status == 200
    for path in ("/health", "/v2/health/live", "/v2/health/ready", "/docs", "/openapi.json"):
        assert guarded.ask(path).status == 200
    assert guarded.ask("/openapi.json").json["security"] == [{"bearer": []}, {"header": []}]


def test_ctrl_c_ends_it_and_the_log_has_a_line_for_each_request(guarded: RunningServer, log_file):
    """The last test of this server."""
    headers = {**PNG, "X-API-Key": KEY}
    guarded.ask("/predict?top=2", make_png(), headers)
    guarded.ask("/predict", b"none", headers)
    with socket.create_connection(("127.0.0.1", guarded.port)) as connection:
        connection.sendall(b"GET /x?secret HTTP/1.1\r\nA: " + b"x" * 40_000)
        assert connection.recv(99).startswith(b"HTTP/1.1 431")
    assert guarded.stop(signal.SIGINT) == 0
    *_, good, bad, refused = map(json.loads, log_file.read_text().splitlines())
    assert (good["method"], good["path"], good["status"], good["images"]) == (
        "POST", "/predict", 200, 1,
    )  # fmt: skip
    assert good["client"] == "127.0.0.1" and good["bytes"] > 100 and "error" not in good
    assert 0 < good["ms"]["compute"] < good["ms"]["total"]
    assert bad["status"] == 400 and "not a JPEG" in bad["error"]
    assert (refused["path"], refused["status"], refused["client"]) == ("/x", 431, "127.0.0.1")
    assert "headers are larger" in refused["error"]
    assert KEY not in log_file.read_text()
