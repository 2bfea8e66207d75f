"""The OpenAPI document against the server, by schemathesis: requests that nobody thought of."""

import subprocess
import sys
from pathlib import Path

import pytest

from small_server import RunningServer

pytest.importorskip("schemathesis", reason="needs schemathesis")

# a schema cannot say which bytes are an image, or how long an array is for its shape: requests
# that it allows may be refused, by one of these
CONFIG = """
[checks]
positive_data_acceptance.enabled = false
[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 408, 413, 415, 429]
"""


def run_schemathesis(server: RunningServer, folder: Path, *words: str) -> None:
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run"]
    command += [f"{server.url}/openapi.json", "--no-color", "--generation-database", "none", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert " generated, " in done.stdout and " passed" in done.stdout, done.stdout
    assert server.process.poll() is None and server.ask("/health").status == 200


def test_schemathesis_finds_nothing(server: RunningServer, tmp_path):
    paths = ("/predict", "/v2/models/{name}/infer")
    words = [word for path in paths for word in ("--include-path", path)]
    words += ["--phases", "coverage"]
    run_schemathesis(server, tmp_path, *words)


@pytest.mark.slow
def test_schemathesis_finds_nothing_in_many_tries(server: RunningServer, tmp_path):
    run_schemathesis(server, tmp_path, "--phases", "coverage,fuzzing", "--max-examples", "200")
