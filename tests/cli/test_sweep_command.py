"""`phalanx sweep`: its words, its mistakes, and what it says before anything is trained."""

import json

import pytest

from phalanx.cli.main import main

CONFIG, CHECKPOINT = 2, 4
TEXT = "preset: demo\noptions: {epochs: 4}\nsearch:\n  lr: [0.1, 0.2]\nmethod: grid\n"


@pytest.fixture
def file(tmp_path, monkeypatch) -> str:
    """A sweep's file in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates.yaml").write_text(TEXT)
    return "rates.yaml"


def test_a_dry_run_tells_everything_and_writes_nothing(file, tmp_path, capsys):
    assert main(["sweep", file, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in said] == [
        "preset demo",
        "options epochs 4",
        "lr 0.1, 0.2",
        "method grid, seed 0",
        "trials 2 of 2 points",
        "goal highest top-1",
        "prune none",
        "folder sweeps/rates",
    ]
    assert main(["sweep", file, "--dry-run", "--json", "--sweep-dir", "here"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["folder"] == "here" and facts["search"] == {"lr": ["0.1", "0.2"]}
    assert [path.name for path in tmp_path.iterdir()] == ["rates.yaml"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([], CONFIG, "name the YAML file of the sweep, or a folder to continue: --resume DIR"),
        (["no.yaml"], CONFIG, "no.yaml: no such file"),
        (["."], CONFIG, ".: is a folder; to continue a sweep, give --resume ."),
        (["--resume", "x"], CHECKPOINT, "x: there is no such folder; start one with: phalanx swee"),
        (["--resume", "."], CHECKPOINT, ".: holds no sweep; start one with: phalanx sweep FILE"),
        (["rates.yaml", "--resume", "."], CONFIG, "--resume DIR continues the sweep in DIR"),
        (["rates.yaml", "--trails", "3"], CONFIG, "--trails: no such option"),
        (["rates.yaml", "--sweep-dir", "rates.yaml"], CONFIG, "--sweep-dir rates.yaml: is a file"),
    ],
)
def test_a_mistake_is_told_with_the_way_out(file, capsys, words, code, told):
    assert main(["sweep", *words]) == code
    assert capsys.readouterr().err.startswith(f"phalanx sweep: {told}")


def test_a_mistake_in_the_file_ends_the_command_before_it_begins(file, tmp_path, capsys):
    (tmp_path / file).write_text(TEXT.replace("[0.1, 0.2]", "[0.1, -3]") + "goal: best\n")
    assert main(["sweep", file]) == CONFIG
    assert capsys.readouterr().err == (
        "phalanx sweep: 2 problems:\n"
        "  rates.yaml:4: lr: must be at least 0.0, got -3.0\n"
        "  rates.yaml:6: goal: expected top1, top5, loss, got 'best'\n"
    )
    assert not (tmp_path / "sweeps").exists()


def test_help_shows_real_examples(capsys):
    assert main(["sweep", "--help"]) == 0
    said = capsys.readouterr().out
    for words in (
        "usage: phalanx sweep FILE",
        "--sweep-dir",
        "--dry-run",
        "phalanx sweep --resume",
    ):
        assert words in said
