"""`phalanx bench serve` as a command."""

import json

import pytest

from phalanx.cli.main import main
from small_runs import run_phalanx
from small_server import write_model


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["."], 2, "--latency-ms: which latency is the goal? Give milliseconds, such as 50"),
        ([".", "--latency-ms", "0"], 2, "--latency-ms: expected milliseconds up to 60000, got '0'"),
        (
            [".", "--latency-ms", "9", "--percentile", "p9"],
            2,
            "--percentile p9: did you mean 'p99'",
        ),
        ([".", "--latency-ms", "9", "--protocol", "grpc"], 2, "--protocol grpc: choose from"),
        (["gone.onnx", "--latency-ms", "9"], 3, "gone.onnx: no such file or run"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(words, code, said, capsys):
    assert main(["bench", "serve", *words]) == code
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_search_ends_with_the_command_that_serves(tmp_path):
    file = write_model(tmp_path / "tiny.onnx")
    words = ["bench", "serve", file, "--latency-ms", "500", "--seconds", "0.4"]
    done = run_phalanx(*words, "--max-connections", "8")
    assert done.returncode in (0, 7), done.stderr  # 7: this machine has other work
    assert (done.returncode == 7) == ("unreliable: " in done.stderr)
    lines = done.stdout.splitlines()
    assert lines[0] == f"{file}, requests by predict; goal: p99 500 ms"
    assert lines[1].split()[:4] == ["max-batch", "max-wait-ms", "workers", "connections"]
    assert lines[-2].startswith("chosen, and measured again: ")
    assert lines[-1].startswith(f"phalanx serve {file} --max-batch ")
    done = run_phalanx(*words, "--max-connections", "2", "--json", "--protocol", "v2")
    found = json.loads(done.stdout)
    assert found["chosen"]["latency_ms"]["p99"] <= 500 and len(found["points"]) >= 3
    assert found["trusted"] == (done.returncode == 0)
    done = run_phalanx("bench", "serve", file, "--latency-ms", "0.01", "--seconds", "0.2")
    assert done.returncode == 2
    assert "--latency-ms 0.01: no setting meets it; the lowest p99 is " in done.stderr
