"""Benchmarks as real processes: results on disk, failures, time limits and signals."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.benchmarks.file import read_specs
from phalanx.benchmarks.results import SpecRun, build_table
from phalanx.benchmarks.runner import RunObserver, find_exit_code, run_variants
from phalanx.benchmarks.schema import Selection, build_variants
from phalanx.cli.main import main

PRINTING = f"""
speed:
  cmd: {sys.executable} -c "import os; print('rate', {{n}}, os.getcwd(), os.environ['MODE'])"
  env: {{MODE: fast}}
  parameters: {{n: "3,40"}}
  pre_run_commands: ["{sys.executable} -c 'open(\\"made\\", \\"a\\").write(\\"{{n}} \\")'"]
  data: {{throughput: {{regexp: 'rate (\\d+)'}}}}
"""
FACTS = {
    "kind": "infer", "images_per_second": 12.0, "median": 11.5, "low": 11.0, "high": 13.0, "n": 3,
    "rates": [11.0, 11.5, 13.0], "latency_ms": {"p50": 80.0, "p95": None, "p99": 95.0, "n": 9},
    "peak_memory_bytes": 2**30, "data": "synthetic", "batch": {"global": 4, "micro": 4},
    "problems": [], "environment": {"commit": "abc", "torch": "2.13", "date": "2026-11-16"},
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Runs the benchmarks of a text; gives how they ended and what was told meanwhile."""

    def run_text(text, **options):
        (tmp_path / "spec.yml").write_text(text)
        found = read_specs([tmp_path / "spec.yml"]).values()
        variants = [
            v for b in found for v in build_variants(b, Selection(), known=lambda _: frozenset())
        ]
        told = []
        observer = RunObserver(told.append, lambda number, result: told.append((number, result)))
        empty = SpecRun("phalanx bench", ("spec.yml",), "2026-11-16", {"cores": 2}, len(variants))
        (tmp_path / "out").mkdir()
        return run_variants(variants, empty, tmp_path / "out", observer, **options), told

    return run_text


def write_script(tmp_path, *objects, code=0):
    """A command that prints objects as JSON and ends with a code."""
    path = tmp_path / f"say{len(list(tmp_path.glob('say*')))}.py"
    lines = [f"print({json.dumps(one)!r})" for one in objects]
    path.write_text("\n".join([*lines, f"raise SystemExit({code})"]))
    return f"{sys.executable} {path} --json"


def test_variants_run_where_and_as_the_file_says(run, tmp_path):
    done, told = run(PRINTING)
    assert [r.result for r in done.results] == ["passed", "passed"], done.results
    assert [r.metrics for r in done.results] == [{"throughput": 3}, {"throughput": 40}]
    assert [number for number, _ in told if isinstance(number, int)] == [1, 2]
    assert (tmp_path / "made").read_text() == "3 40 "  # by what runs before, in the same folder
    assert (tmp_path / "out" / "speed_n_3.out").read_text() == f"rate 3 {tmp_path} fast\n"
    assert find_exit_code(done) == 0


def test_results_are_written_as_json_csv_and_markdown(run, tmp_path):
    done, _ = run(f"whole: {{cmd: '{write_script(tmp_path, FACTS)}'}}")
    out = tmp_path / "out"
    assert json.loads((out / "benchmark_results.json").read_text()) == json.loads(
        json.dumps(done.to_dict())
    )
    facts = done.to_dict()
    assert facts["results"][0]["facts"] == FACTS and facts["done"] == facts["planned"] == 1
    row = next(csv.DictReader((out / "benchmark_results.csv").read_text().splitlines()))
    assert (row["benchmark"], row["throughput"], row["latency_p99"]) == ("whole", "12.0", "95.0")
    assert (row["median"], row["n"], row["commit"], row["result"]) == ("11.5", "3", "abc", "passed")
    text = (out / "benchmark_results.md").read_text()
    assert "`phalanx bench`" in text and "2026-11-16; cores 2." in text
    head, _, cells = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert [name.strip("| ") for name in head] == [
        "benchmark", "images/s", "latency p50, ms", "latency p99, ms", "range", "n",
        "peak memory", "result",
    ]  # fmt: skip
    assert [cell.strip("| ") for cell in cells] == [
        "whole", "12", "80", "95", "11 to 13", "3", "1.0 GiB", "passed"
    ]  # fmt: skip


def test_a_benchmark_that_fails_is_told_and_the_others_go_on(run, tmp_path):
    doubtful = {**FACTS, "problems": ["the spread is 40 %"]}
    text = f"""
nothing: {{cmd: no-such-program --fast}}
unset: {{cmd: echo $NO_SUCH_VARIABLE}}
broken: {{cmd: "{sys.executable} -c 'raise SystemExit(5)'"}}
option: {{cmd: phalanx plan demo --epochz 3}}
silent: {{cmd: echo hello, data: {{throughput: {{regexp: "rate (.*)"}}}}}}
doubtful: {{cmd: '{write_script(tmp_path, doubtful, code=7)}'}}
good: {{cmd: '{write_script(tmp_path, FACTS)}'}}
"""
    done, _ = run(text)
    found = {r.benchmark: (r.result, r.exit_code, r.reason) for r in done.results}
    assert found == {
        "nothing": ("failed", 2, "no-such-program: No such file or directory"),
        "unset": (
            "failed",
            2,
            "NO_SUCH_VARIABLE is not set; export NO_SUCH_VARIABLE=..., or change the command",
        ),
        "broken": ("failed", 5, "exit code 5"),
        "option": ("failed", 2, "--epochz: no such option; did you mean '--epochs'?"),
        "silent": ("failed", 0, "throughput: the output has no value of it"),
        "doubtful": ("untrusted", 7, "the spread is 40 %"),
        "good": ("passed", 0, ""),
    }
    assert find_exit_code(done) == 2  # of the first that failed
    table = build_table(done.results)
    assert table[-2][-1] == "untrusted: the spread is 40 %" and table[-2][1] == "12"


def test_what_runs_before_is_no_part_of_the_measurement(run, tmp_path):
    done, _ = run(
        """
a:
  cmd: echo rate 10
  pre_run_commands: [echo rate 1000]
  data: {throughput: {regexp: 'rate (.*)'}}
b: {cmd: echo hello, pre_run_commands: ["sh -c 'echo no disk >&2; exit 7'"]}
c: {cmd: echo hello, pre_run_commands: [sleep 60], timeout: 0.2}
"""
    )
    assert [(r.result, r.exit_code, r.metrics, r.reason) for r in done.results] == [
        ("passed", 0, {"throughput": 10}, ""),
        ("failed", 7, {}, "before it, sh -c echo no disk >&2; exit 7: no disk"),
        ("failed", None, {}, "before it, sleep 60: ended after 0.2 s, its time limit"),
    ]
    assert (tmp_path / "out" / "a.pre.out").read_text() == "rate 1000\n"
    assert (tmp_path / "out" / "b.pre.err").read_text() == "no disk\n"
    assert not (tmp_path / "out" / "b.out").exists()


def test_the_processes_of_mpirun_are_counted_with_variables_replaced(run, tmp_path, monkeypatch):
    (tmp_path / "mpirun").write_text("#!/bin/sh\necho rate 10\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done, _ = run(
        "a: {cmd: mpirun -np $N x.py, env: {N: 4}, data: {throughput: {regexp: 'rate (.*)'}}}"
    )
    assert done.results[0].metrics == {"throughput": 40}


def test_a_value_keeps_its_spaces_and_quotes(run, tmp_path):
    script = tmp_path / "say.py"
    script.write_text("import sys; print('words', len(sys.argv), sys.argv[1])")
    text = f"""
a:
  cmd: {sys.executable} {script} {{name}}
  pre_run_commands: ["{sys.executable} {script} {{name}}"]
  parameters: {{name: ["it's", "two words"]}}
  data: {{words: {{regexp: 'words (.)'}}}}
"""
    done, _ = run(text)
    assert [(r.metrics, r.reason) for r in done.results] == [({"words": 2}, "")] * 2
    assert done.results[1].command.endswith("say.py 'two words'")
    kinds = [path.name for path in sorted((tmp_path / "out").glob("a_*.pre.out"))]
    assert kinds == ["a_name_it-s.pre.out", "a_name_two-words.pre.out"]


def test_a_command_that_measures_and_prints_no_figure_fails(run):
    done, _ = run(
        "a: {cmd: phalanx bench train --help}\n"
        "b: {cmd: phalanx launch --num-replicas 1 --dry-run -- bench train demo}\n"
    )
    assert [(r.result, r.reason) for r in done.results] == [("failed", "no figure was found")] * 2
    assert find_exit_code(done) == 1


def test_the_exit_code_says_what_is_worst(run, tmp_path):
    doubtful = {**FACTS, "problems": ["noise"]}
    text = f"a: {{cmd: '{write_script(tmp_path, doubtful, code=7)}'}}"
    assert find_exit_code(run(text)[0]) == 7


def test_a_failure_without_a_code_still_fails(run):
    text = "a: {cmd: echo hello, data: {throughput: {regexp: 'rate (.*)'}}}"
    assert find_exit_code(run(text)[0]) == 1


def test_the_first_failure_stops_if_it_is_told_to(run):
    done, _ = run("a: {cmd: no-such-program}\nb: {cmd: echo hello}", stop_on_error=True)
    assert [r.benchmark for r in done.results] == ["a"] and (done.done, done.planned) == (1, 2)


def test_a_command_with_several_measurements_has_a_row_each(run, tmp_path):
    other = {**FACTS, "data": "generated", "images_per_second": 6.0, "problems": ["noise"]}
    done, _ = run(f"both: {{cmd: '{write_script(tmp_path, FACTS, other, code=7)}'}}")
    assert [(r.variant, r.metrics["throughput"], r.result) for r in done.results] == [
        ("both_synthetic_4", 12, "passed"),
        ("both_generated_4", 6, "untrusted"),
    ]


def test_a_command_that_takes_too_long_is_ended_with_all_it_started(run, tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    done, told = run(f"slow: {{cmd: '{sys.executable} {script}', timeout: 0.5}}")
    assert done.results[0].reason == "ended after 0.5 s, its time limit"
    pid = int((tmp_path / "out" / "slow.out").read_text().split()[1])
    assert not is_running(pid)
    assert told[0].variant == "slow" and told[0].number == told[0].count == 1
    assert any(progress.last_line.startswith("child") for progress in told[:-1])


def is_running(pid):
    """Whether a process is at work, and not only waits for its parent to notice."""
    for _ in range(50):
        state = ""
        with suppress(FileNotFoundError):
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        if state in ("", "Z"):
            return False
        time.sleep(0.1)
    return True


def test_a_signal_keeps_what_is_done_and_the_rest_is_run_later(tmp_path, monkeypatch, capsys):
    text = "a: {cmd: echo hello}\nb: {cmd: sleep $LONG}\n"
    (tmp_path / "spec.yml").write_text(text)
    command = [sys.executable, "-m", "phalanx", "bench", "--spec", "spec.yml", "--out", "here"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "LONG": "600"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("[1/2] a: passed")
        os.kill(process.pid, signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 75
    assert "phalanx bench: stopped after 1 of 2 benchmarks; their results are in here" in said
    facts = json.loads((tmp_path / "here" / "benchmark_results.json").read_text())
    assert [one["variant"] for one in facts["results"]] == ["a"]
    assert "the same command with --out here runs the rest" in said
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONG", "0")
    (tmp_path / "spec.yml").write_text(text.replace("hello", "good day"))
    assert main(command[3:]) == 2
    assert "--out here: holds the results of other commands" in capsys.readouterr().err
    (tmp_path / "spec.yml").write_text(text)
    assert main(command[3:]) == 0
    said = capsys.readouterr()
    assert "going on after 1 of 2, in here" in said.err
    assert said.out.startswith("[2/2] b: passed") and "\n2 passed;" in said.out
    whole = json.loads((tmp_path / "here" / "benchmark_results.json").read_text())
    assert whole["results"][:1] == facts["results"] and whole["done"] == 2
    assert main(command[3:]) == 2
    assert "--out here: already holds results" in capsys.readouterr().err
    facts["environment"]["torch"] = "1.0"
    (tmp_path / "here" / "benchmark_results.json").write_text(json.dumps(facts))
    assert main(command[3:]) == 2
    assert "--out here: its results are of another torch" in capsys.readouterr().err
    (tmp_path / "here" / "benchmark_results.json").write_text("[")
    assert main(command[3:]) == 2
    assert "--out here: benchmark_results.json cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_measurement_is_read(run):
    done, _ = run(
        "real: {cmd: phalanx bench train demo --seconds 0.5 --warmup 0.1 --blocks 3 --threads 1}"
    )
    (result,) = done.results
    assert result.result in ("passed", "untrusted"), result.reason
    assert result.facts is not None and result.facts["n"] == 3
    assert result.metrics == {"throughput": result.facts["images_per_second"]}
    assert find_exit_code(done) == (0 if result.result == "passed" else 7)
