"""The progress line: rewritten on a terminal, few lines in a log, none where none is wanted."""

import io
import math
import sys

import pytest

from phalanx.cli import progress
from phalanx.cli.progress import ImageProgress, ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def use_terminal(monkeypatch):
    """What is written to a terminal from now on; set in the test, as pytest sets stderr before."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_terminal_gets_one_line_that_is_rewritten_now_and_then(clock, monkeypatch):
    terminal = use_terminal(monkeypatch)
    line = ProgressLine(0.1)
    line.show("1 of 9")
    line.show("2 of 9")  # too soon
    clock[0] += 0.2
    line.show("3 of 9")
    line.show("9 of 9", is_last=True)
    assert terminal.getvalue() == "\r\033[K1 of 9\r\033[K3 of 9\r\033[K9 of 9\n"


def test_a_line_that_was_not_the_last_can_be_ended(clock, monkeypatch):
    terminal = use_terminal(monkeypatch)
    line = ProgressLine()
    line.show("1 of 9")
    line.show("2 of 9")
    line.end()
    assert terminal.getvalue() == "\r\033[K1 of 9\r\033[K2 of 9\n"


@pytest.mark.parametrize(
    ("every", "told"), [(None, ""), (math.inf, "9 of 9\n"), (10.0, "3 of 9\n9 of 9\n")]
)
def test_a_log_gets_as_much_as_it_is_meant_to(clock, capsys, every, told):
    line = ProgressLine(log_s=every)
    line.show("1 of 9")
    clock[0] += 11
    line.show("3 of 9")
    line.show("9 of 9", is_last=True)
    line.end()
    assert capsys.readouterr().err == told


def test_images_are_told_with_their_rate_and_what_is_left(clock, monkeypatch):
    terminal = use_terminal(monkeypatch)
    images = ImageProgress("done")
    images("train", 100, 1000)
    clock[0] += 2
    images("train", 300, 1000)
    clock[0] += 7
    images("train", 1000, 1000)
    images("valid", 16, 40)
    clock[0] += 0.1
    images("valid", 40, 40)  # two bursts say nothing about the rate
    lines = terminal.getvalue().replace("\n", "").split("\r\033[K")[1:]
    assert lines == [
        "train: 100 of 1,000 images done",
        "train: 300 of 1,000 images done, 100/s, 7s left",
        "train: 1,000 of 1,000 images done, 100/s",
        "valid: 40 of 40 images done",
    ]
