"""The curl lines and the Python of docs/serve.md, run against a real server."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from small_server import NAME, RunningServer, make_png

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def find_fences(language: str) -> list[str]:
    marks = rf"^```{language}\n(.*?)^```$"
    return re.findall(marks, PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


def find_commands() -> list[str]:
    return [line for fence in find_fences("sh") for line in fence.splitlines() if line.strip()]


def test_the_python_of_the_page_runs(server: RunningServer, tmp_path):
    (tmp_path / "shoe.png").write_bytes(make_png())
    (code,) = find_fences("python")
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").replace('"demo"', f'"{NAME}"')
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(":class ") == 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_of_the_page_run(server: RunningServer, tmp_path):
    (tmp_path / "shoe.png").write_bytes(make_png())
    commands = find_commands()
    assert len(commands) >= 9
    for line in commands:
        own = line.replace("http://127.0.0.1:8000", server.url).replace(
            "models/demo", f"models/{NAME}"
        )
        own = own.replace("curl ", "curl --silent --fail-with-body ")
        done = subprocess.run(
            ["bash", "-c", own], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert json.loads(done.stdout), line
