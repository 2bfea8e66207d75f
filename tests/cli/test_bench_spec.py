"""`phalanx bench --spec`: its words, its mistakes, what it lists, and what it prints."""

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main

CONFIG = 2
SPEC = """\
speed:
  description: how fast
  cmd: phalanx plan demo --no-memory --epochs {epochs}
  parameters: {epochs: "1,2"}
  data: {steps: {regexp: 'length +([\\d,]+) steps'}}
hello:
  cmd: echo hello
other_conv:
  cmd: phalanx train demo
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of benchmarks in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yml").write_text(SPEC)
    return "mine.yml"


def test_a_dry_run_lists_and_checks_commands_and_writes_nothing(file, tmp_path, capsys):
    assert main(["bench", "--spec", file, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "speed: how fast",
        "    phalanx plan demo --no-memory --epochs 1",
        "    phalanx plan demo --no-memory --epochs 2",
        "hello",
        "    echo hello",
        "2 benchmarks, 3 commands, none of them wrong; nothing was run",
    ]
    assert main(["bench", "--spec", file, "--dry-run", "--json", "--include-convergence"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["variant"] for one in facts] == [
        "speed_epochs_1", "speed_epochs_2", "hello", "other_conv"
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_the_example_of_the_page_is_a_file_of_benchmarks(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("page.yml").write_text(page.split("```yaml\n")[1].split("```")[0])
    assert main(["bench", "--spec", "page.yml", "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "resnet50-latency: how long one batch takes"
    assert said[-1] == "2 benchmarks, 5 commands, none of them wrong; nothing was run"


def test_a_dry_run_tells_which_commands_are_wrong(file, tmp_path, capsys):
    (tmp_path / file).write_text(
        "a: {cmd: phalanx train demo --epochz 3}\n"
        "b: {cmd: phalanx train demo --optimizer sdg --mixup-alpha 1 --batch-size 1}\n"
        "c: {cmd: phalanx bench nothing}\n"
        "d: {cmd: phalanx launch --num-replicas 2 -- train demo}\n"
    )
    assert main(["bench", "--spec", file, "--dry-run"]) == CONFIG
    said = capsys.readouterr().out
    assert "wrong: --epochz: no such option; did you mean '--epochs'?" in said
    assert "wrong: --optimizer: no choice is called 'sdg'; did you mean 'sgd'?" in said
    assert "wrong: no command is called 'bench nothing'" in said
    assert said.splitlines()[-1] == "4 benchmarks, 4 commands, 3 of them wrong; nothing was run"


def test_benchmarks_run_and_are_printed_in_a_table(file, tmp_path, capsys):
    words = ["bench", "--spec", file, "--out", "here", "--set", "batch-size=32", "epochs=2"]
    assert main(words) == 0
    said, told = capsys.readouterr()
    lines = said.splitlines()
    assert lines[0].startswith("[1/2] speed_epochs_2: passed in ")
    assert lines[-4:-1] == [
        "benchmark       steps  result",
        "speed_epochs_2    500  passed",
        "hello                  passed",
    ]
    assert lines[-1] == "2 passed; results: here/benchmark_results.json, .csv, .md"
    assert told.splitlines() == [
        "note: --set batch-size=32: 1 of 2 commands has no such option",
        "note: --set epochs=2: 1 of 2 commands has no such option",
    ]
    facts = json.loads((tmp_path / "here" / "benchmark_results.json").read_text())
    assert facts["command"] == " ".join(["phalanx", *words])
    assert facts["results"][0]["command"].endswith("--epochs 2 --batch-size=32")
    assert main(["bench", "--spec", file, "--out", "here"]) == CONFIG
    assert "--out here: already holds results; choose another" in capsys.readouterr().err


def test_an_option_is_set_in_the_command_that_is_launched(file, tmp_path, capsys):
    (tmp_path / file).write_text(
        "a: {cmd: phalanx launch --num-replicas 2 --nodes 1 -- bench train demo --image-size 64}\n"
        "b: {cmd: mpirun -np 2 phalanx bench train demo --json}\n"
    )
    words = ["bench", "--spec", file, "--dry-run", "--set", "image-size=32"]
    assert main([*words, "replicas=4"]) == 0
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:4:2]] == [
        "phalanx launch --num-replicas 2 --nodes 1 -- bench train demo --image-size=32 "
        "--replicas=4",
        "mpirun -np 2 phalanx bench train demo --json --image-size=32 --replicas=4",
    ]
    assert main([*words, "nodes=2"]) == CONFIG  # an option of launch, which is not measured
    assert "--set nodes=2: no command here has such an option" in capsys.readouterr().err


def test_a_failure_is_in_the_json_and_in_the_exit_code(file, tmp_path, capsys):
    (tmp_path / file).write_text(SPEC.replace("echo hello", "phalanx plan demo --lr fast"))
    words = ["bench", "--spec", file, "--benchmark", "hello", "speed", "--json", "--set"]
    assert main([*words, "epochs=1"]) == CONFIG
    said, told = capsys.readouterr()
    facts = json.loads(said)
    assert [(one["variant"], one["result"]) for one in facts["results"]] == [
        ("hello", "failed"),
        ("speed_epochs_1", "passed"),
    ]
    assert "[1/2] hello: failed in " in told and "--lr: expected a number, got 'fast'" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--spec", "no.yml"], "bench: --spec no.yml: no such file; without --spec, ./benchmarks"),
        (
            ["--spec", "mine.yml", "--benchmark", "sped"],
            "bench: --benchmark sped: no benchmark is ",
        ),
        (["--spec", "mine.yml", "--set", "lr"], "bench: --set lr: expected NAME=VALUE, such as im"),
        (["--spec", "mine.yml", "--set", "ir=1"], "bench: --set ir=1: no command here has such an"),
        (["--spec", "mine.yml", "--timeout", "0"], "bench: --timeout: expected seconds, got '0'"),
        (["--spce", "mine.yml"], "bench: --spce: no such option; did you mean '--spec'?"),
        (["--spec", "mine.yml", "--out", "mine.yml/x"], "bench: mine.yml/x: a part of this path"),
        (["trian"], "no command is called 'bench trian'"),
    ],
)
def test_a_mistake_is_told_with_the_way_out(file, capsys, words, told):
    assert main(["bench", *words]) != 0
    said = capsys.readouterr().err
    assert said.removeprefix("phalanx ").removeprefix("phalanx: ").startswith(
        told
    ) or said.startswith(f"phalanx: {told}"), said


def test_a_wrong_key_is_told_by_its_line(file, tmp_path, capsys):
    (tmp_path / file).write_text("a:\n  cmd: echo\n  paramters: {b: 1}\n")
    assert main(["bench", "--spec", file]) == CONFIG
    said = capsys.readouterr().err
    assert said.startswith("phalanx bench: mine.yml:3: paramters: a has no such key; did you mean")


def test_bench_alone_lists_its_commands(capsys):
    assert main(["bench"]) == 0
    assert "bench overhead" in capsys.readouterr().out
