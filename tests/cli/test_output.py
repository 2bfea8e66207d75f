"""What reaches standard output: clean text, in any encoding, or code 6 where nothing can."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from phalanx.cli.main import main
from phalanx.report.terminal import escape_text
from small_runs import read_result, small_run

HOSTILE = "c\x1b[2J\x07\x7f\u009b\u202eb"
STEERING = ("\x1b", "\x07", "\x7f", "\u009b", "\u202e")


def run_in_shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A shell command in which $PHALANX is the command line."""
    return subprocess.run(
        line.replace("PHALANX", f"{sys.executable} -m phalanx"),
        shell=True,
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def hostile_images(tmp_path):
    """Classes and files whose names steer a terminal, one image that cannot be read among them."""
    root = tmp_path / "data"
    for split in ("train", "val"):
        for number, name in enumerate((HOSTILE, "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (8, 8), (90 * number, 0, 0)).save(folder / f"{HOSTILE}.png")
    (root / "train" / HOSTILE / f"{HOSTILE}2.png").write_bytes(b"no image")
    return root


def test_text_is_cleaned_and_json_stays_what_it_is():
    assert escape_text("a\tb\nc\r\n") == "a\tb\nc\r\n"
    assert escape_text("über 日本 👩‍👩‍👧") == "über 日本 👩‍👩‍👧"
    assert escape_text("\r\x1b[K\u2066\udcff") == "\\u000d\\u001b[K\\u2066\\udcff"
    assert json.loads(escape_text(json.dumps(HOSTILE))) == HOSTILE


def assert_clean(text: str) -> None:
    assert text and not [mark for mark in STEERING if mark in text], repr(text)


@pytest.mark.parametrize("words", [["data", "verify"], ["data", "list"]])
def test_names_do_not_steer_the_terminal(words, hostile_images, capsys):
    main([*words, str(hostile_images)])
    printed = capsys.readouterr()
    assert_clean(printed.out + printed.err)
    main([*words, str(hostile_images), "--json"])
    assert json.loads(capsys.readouterr().out)


def test_a_build_names_bad_images_without_steering_the_terminal(hostile_images, capsys, tmp_path):
    main(["data", "build", str(hostile_images), "--to=packed", f"--out={tmp_path / 'out'}"])
    printed = capsys.readouterr()
    assert "\\u001b[2J" in printed.out
    assert_clean(printed.out + printed.err)


def test_a_run_its_scores_and_its_answers_are_clean(hostile_images, capsys, tmp_path):
    run = tmp_path / f"run {HOSTILE}"
    words = (
        "train --data=folder --model=resnet8 --image-size=8 --batch-size=2 --steps=1 --workers=0"
    )
    paths = [f"--data-dir={hostile_images}", f"--run-dir={run}"]
    assert main([*words.split(), *paths, "--warmup-epoch=0", "--device=cpu"]) == 0
    assert main(["validate", str(run)]) == 0
    images = hostile_images / "val"
    for form in ([], ["--csv"]):
        assert main(["predict", str(run), str(images), *form]) == 0
    assert main(["predict", str(run), str(hostile_images / "train" / HOSTILE)]) == 3
    assert main(["report", str(tmp_path / HOSTILE)]) == 4
    printed = capsys.readouterr()
    assert "\\u001b[2J" in printed.out and "\\u001b[2J" in printed.err
    assert_clean(printed.out + printed.err)
    assert_clean((run / "log.txt").read_text())
    main(["predict", str(run), str(images), "--json"])
    assert HOSTILE in json.loads(capsys.readouterr().out.splitlines()[0])["image"]


def test_help_keeps_its_style_on_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    words = [sys.executable, "-m", "phalanx", "plan", "--help"]
    process = subprocess.Popen(words, stdout=theirs, env=env)
    os.close(theirs)
    shown = b""
    while not shown.endswith(b"(the demo)") and (part := read_terminal(ours)):
        shown += part
    assert process.wait() == 0
    os.close(ours)
    assert b"\x1b[1musage" in shown and b"\\u001b" not in shown


def read_terminal(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:  # the other side has left
        return b""


CLOSED = "standard output is closed; send it to a file, or to /dev/null\n"


@pytest.mark.parametrize("command", ["train demo --run-dir=run", "plan demo", "--version"])
def test_a_closed_standard_output_is_code_6(command, tmp_path):
    done = run_in_shell(f"PHALANX {command} >&-", tmp_path)
    assert done.returncode == 6 and done.stderr.endswith(CLOSED)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["plan --help", "models ls", "data list"])
def test_a_full_standard_output_is_code_6(command, tmp_path):
    done = run_in_shell(f"PHALANX {command} >/dev/full", tmp_path)
    assert done.returncode == 6
    assert "standard output: cannot be written (No space left on device)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_whose_output_does_not_fit_is_trained_and_is_code_6(digits, tmp_path):
    words = " ".join(small_run(digits, tmp_path / "run", steps=1, workers=0))
    done = run_in_shell(f"PHALANX {words} >/dev/full", tmp_path)
    assert done.returncode == 6
    assert done.stderr == (
        "phalanx train: standard output: could not be written (No space left on device); the run "
        f"continued to its end, and {tmp_path / 'run' / 'log.txt'} has what is missing here\n"
    )
    assert read_result(tmp_path / "run")["finished"]
    assert "valid top-1" in (tmp_path / "run" / "log.txt").read_text()


def test_a_full_or_closed_standard_error_changes_no_code(tmp_path):
    for where in ("/dev/full", "&-"):
        assert run_in_shell(f"PHALANX nothing 2>{where}", tmp_path).returncode == 2
        assert run_in_shell(f"PHALANX models ls 2>{where}", tmp_path).returncode == 0


def test_a_reader_who_leaves_is_no_mistake(tmp_path):
    done = run_in_shell("(PHALANX models ls; echo code $? >&2) | true", tmp_path)
    assert done.stderr == "code 0\n"


def test_what_an_encoding_lacks_is_replaced(tmp_path):
    done = run_in_shell("PHALANX plan demo", tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0 and "?" in done.stdout and not done.stderr


def test_a_bug_is_one_line_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(
        "phalanx.assemble.find_data.read_settings_with_data", lambda *_, **__: 1 / 0
    )
    assert main(["plan", "demo"]) == 70
    printed = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero. Please" in printed and printed.count("\n") == 1
    (file,) = tmp_path.glob("phalanx-traceback-*.txt")
    assert str(file) in printed and "ZeroDivisionError: division by zero" in file.read_text()


def test_a_bug_of_a_run_is_written_into_its_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("phalanx.assemble.train.open_training", lambda *_, **__: 1 / 0)
    run = tmp_path / "run"
    assert main(["train", "demo", "--steps=1", "--run-dir", str(run)]) == 70
    assert f"is in {run / 'phalanx-traceback.txt'}" in capsys.readouterr().err
    assert "ZeroDivisionError" in (run / "phalanx-traceback.txt").read_text()


def test_a_file_the_system_refuses_is_code_6(tmp_path, capsys):
    assert main(["validate", "a" * 300]) == 6
    assert capsys.readouterr().err == (
        f"phalanx validate: {'a' * 60}... (300 characters): File name too long; "
        "fix that, or name another file\n"
    )


def test_long_values_are_not_echoed(tmp_path, capsys):
    file = tmp_path / "long.yaml"
    file.write_text(f"model: {'a' * 300_000}\ndata: '{'a b ' * 70_000}'\n")
    assert main(["plan", str(file)]) == 2
    printed = capsys.readouterr().err
    assert f"no model is called '{'a' * 60}... (300,000 characters)'" in printed
    assert "no dataset is called 'a b a b" in printed and len(printed) < 1000
