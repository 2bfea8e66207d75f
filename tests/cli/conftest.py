"""What tests of several commands use."""

from collections.abc import Callable

import pytest

from phalanx.cli.main import main


@pytest.fixture
def read_plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, list[str]]]:
    """The rows of `phalanx plan` with some words, by their names."""

    def read(*words: str) -> dict[str, list[str]]:
        assert main(["plan", *words]) == 0
        rows: dict[str, list[str]] = {}
        name = ""
        for line in capsys.readouterr().out.splitlines():
            name = line[:14].strip() or name
            rows.setdefault(name, []).append(line[14:])
        return rows

    return read
