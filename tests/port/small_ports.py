"""Old commands for tests: those of the READMEs, and a quick way to port one."""

import json
import re
from pathlib import Path
from typing import Any

from phalanx.cli.main import main

_FILE = Path(__file__).with_name("old_commands.txt")


def read_old_commands() -> dict[str, list[str]]:
    """The commands of the READMEs by section; a section has as many as its heading says."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^=== ", _FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        name, count = heading.split()
        found[name] = [text.strip() for text in body.strip().split("\n\n")]
        assert len(found[name]) == int(count), f"{name}: {len(found[name])} commands"
    return found


def port(capsys: Any, *words: str) -> dict[str, Any]:
    """The answer of `phalanx port --json` for a command."""
    code = main(["port", "--json", *words])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return dict(json.loads(printed.out))


def find_tried(*texts: str) -> set[str]:
    """The options that stand in any of the texts, without dashes and values."""
    words = [word for text in texts for word in text.split()]
    return {word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")}


def check_effect(answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that a command could start, and that its config has these values."""
    assert answer["problem"] is None
    assert {name: answer["resolved"][name] for name in expected} == expected


def find_last_row(answer: dict[str, Any]) -> dict[str, str]:
    """What became of the last option that the command gives itself."""
    return [row for row in answer["options"] if row["source"] == "command"][-1]
