"""`phalanx request --serve`: export, server, images, end, in one command."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from phalanx.cli.main import main
from small_runs import read_result, run_phalanx, small_run
from small_server import make_png, write_model


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed in range(4):
        (folder / f"{seed}.png").write_bytes(make_png(seed))
    return folder


def test_a_file_is_served_and_asked_and_the_server_is_gone(tmp_path, photos, capsys):
    file = write_model(tmp_path / "tiny.onnx")
    assert main(["request", str(photos), "--serve", str(file), "--protocol", "v2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("0.png: class ") == 1 and "answered    4 images" in printed.out
    port = re.search(r"serving tiny on http://127\.0\.0\.1:(\d+)/", printed.err)[1]
    assert "the server has stopped" in printed.err
    assert main(["request", str(photos), "--url", f"localhost:{port}"]) == 8


def test_a_file_does_not_know_its_data(tmp_path, capsys):
    file = write_model(tmp_path / "tiny.onnx")
    assert main(["request", "--serve", str(file)]) == 2
    assert "a file does not say where its run's data is; name images" in capsys.readouterr().err


def test_what_is_no_run_is_told_without_a_server(tmp_path, photos, capsys):
    assert main(["request", "--serve", str(tmp_path / "gone")]) == 4
    assert "gone" in capsys.readouterr().err


def test_a_signal_stops_the_server_too(tmp_path, photos):
    file = write_model(tmp_path / "tiny.onnx")
    words = ["request", photos, "--serve", file, "--num-images", "100000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = process.stderr.readline()
    assert line.startswith("serving tiny on ")
    time.sleep(0.3)
    children = find_children(process.pid)
    assert len(children) == 1
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped by SIGTERM" in said
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def find_children(pid):
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_a_preset_is_served_with_random_weights(tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text("extends: demo\nmodel: resnet8\ndata: mnist\nimage-size: 12\n")
    done = run_phalanx("request", "--serve", config, "--batch-size", "50", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["answered"], found["failed"], found["weights"]) == (200, 0, "random")
    assert found["accuracy"] is None, "images that come with Phalanx are no digits"
    assert (
        "its data (mnist) is not on this machine: sending images that come with Phalanx"
        in done.stderr
    )
    assert "has random weights: its answers mean nothing" in done.stderr


def test_options_of_a_model_go_with_a_name_alone(digits, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(small_run(digits, run)) == 0
    assert main(["request", "--serve", str(run), "--model", "resnet8"]) == 2
    assert "already says what its model is" in capsys.readouterr().err
    assert main(["request", "x.png", "--init-weights", "w.pth"]) == 2
    assert "--init-weights: goes with --serve RUN" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_example_in_one_command(digits, tmp_path):
    run = tmp_path / "run"
    assert run_phalanx(*small_run(digits, run)).returncode == 0
    done = run_phalanx("request", "--serve", run, "--batch-size", "8", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answered"] == 40 and found["failed"] == 0, "all validation images"
    scored = read_result(run)
    said = re.findall(r"^(exporting|serving|the server has stopped)", done.stderr, flags=re.M)
    assert said == ["exporting", "serving", "the server has stopped"]
    assert found["accuracy"]["n"] == 40
    assert found["accuracy"]["top1"] == pytest.approx(scored["best"]["top1"], abs=0.001)
    assert not list(tmp_path.glob("phalanx-request-*"))
