"""The curl lines of docs/serve.md, run against a real server."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from small_server import NAME, RunningServer, make_png

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def find_commands() -> list[str]:
    fences = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for fence in fences for line in fence.splitlines() if line.strip()]


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
