"""Files and values that nobody means to give, each answered with where, what and the way out."""

import os

import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.errors import ConfigError, UserError
from small_runs import small_run


def test_a_run_dir_that_is_too_long(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo", "--steps=1", "--run-dir", "a" * 300]) == 6
    assert "the name is too long; choose a shorter --run-dir" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["run-dir", "data-dir"])
def test_a_folder_without_a_name(flag, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo", "--steps=1", f"--{flag}", ""]) == 2
    assert f"--{flag}: is empty; name a file or folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_preset_that_is_no_text(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "odd.yaml").write_bytes(b"# \xff\xfe\nlr: 1\n")
    assert main(["presets", "ls"]) == 0
    printed = capsys.readouterr()
    assert "not UTF-8 text" in printed.out and "demo" in printed.out
    for words in (["presets", "cat"], ["plan"]):
        assert main([*words, "odd"]) == 2
        assert "presets/odd.yaml: not UTF-8 text" in capsys.readouterr().err


def test_yaml_that_is_too_deep(capsys, tmp_path):
    file = tmp_path / "deep.yaml"
    file.write_text("[" * 5000)
    assert main(["plan", str(file)]) == 2
    assert "deep.yaml: lists and mappings are nested too deeply" in capsys.readouterr().err
    file.write_text("lr: " + "[" * 300 + "]" * 300)
    assert main(["sweep", str(file)]) == 2


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["plan", "options.yaml"], 2, "options.yaml: is not a regular file"),
        (["sweep", "options.yaml"], 2, "options.yaml: is not a regular file"),
        (["bench", "--spec", "options.yaml"], 2, "options.yaml: is not a regular file"),
        (
            ["plan", "--data-dir=.", "--labels=options.yaml"],
            3,
            "(a named pipe, not a regular file)",
        ),
    ],
)
def test_a_pipe_is_not_called_missing(words, code, problem, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("options.yaml")
    assert main(words) == code
    assert problem in capsys.readouterr().err


def test_records_that_are_no_text(capsys, tmp_path, digits):
    run = tmp_path / "run"
    assert main(small_run(digits, run, steps=1)) == 0
    for name in ("training.csv", "validation.csv", "metrics.jsonl", "predictions.csv"):
        before = (run / name).read_bytes()
        (run / name).write_bytes(before + b"\xff\xfe\n")
        code = main(["report", str(run)])
        printed = capsys.readouterr().err
        assert code == 0 or (code == 4 and f"{name}: is damaged" in printed), (name, code, printed)
        assert name != "training.csv" or code == 4
        (run / name).write_bytes(before)
    deep = "[" * 100_000
    (run / "run.json").write_text(deep)
    assert main(["report", str(run)]) == 4
    assert "run.json: is damaged: it is not JSON" in capsys.readouterr().err


def test_paths_and_numbers_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run-dir: contains a zero byte"):
        phalanx.train("demo", steps=1, run_dir="a\0b")
    with pytest.raises(ConfigError, match="run_dir: expected text, not bytes"):
        phalanx.train("demo", steps=1, run_dir=b"x")
    for give in (phalanx.validate, phalanx.load, phalanx.report):
        for path in (b"x", "a\0b", 7):
            with pytest.raises(ConfigError, match="expected the path of a file or folder"):
                give(path)
    with pytest.raises(ConfigError, match=r"--steps: .* are more than can be counted"):
        phalanx.train("demo", steps=2**70)
    for options in ({"steps": 10**400}, {"epochs": 1e300}, {"epochs": 1e18, "batch_size": 65536}):
        with pytest.raises(UserError):
            phalanx.plan("demo", **options)
    assert not list(tmp_path.iterdir())
