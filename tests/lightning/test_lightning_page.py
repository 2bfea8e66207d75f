"""docs/lightning.md: its code and commands run, and its table names what is refused."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.config.schema import OPTIONS
from phalanx.lightning.recipe import TRAINER_OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text(encoding="utf-8")


def test_the_table_names_what_is_the_trainers():
    table = [line for line in PAGE.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall("`([a-z-]+)`", line.split("|")[1])}
    assert len(named) > 8 and named <= TRAINER_OPTIONS.keys() <= OPTIONS.keys()


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    blocks = re.findall("```python\n(.*?)```", PAGE, re.DOTALL)
    commands = [line for line in PAGE.splitlines() if line.startswith("phalanx ")]
    assert len(blocks) == len(commands) == 2
    words = [[sys.executable, "-c", block] for block in blocks]
    words += [[sys.executable, "-m", *shlex.split(line)] for line in commands]
    words[2] += ["--pairs", "2", "--steps", "3"]  # bench engines
    for command in words:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        if "bench" in command:
            assert "equal, bit for bit" in done.stdout
