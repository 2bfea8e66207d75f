import os
import re
import select
import subprocess
import sys
import time

import pytest

from phalanx.errors import DiskError
from phalanx.report.console import Console, StepTimer
from synthetic_run import log_row, score_row


class Terminal:
    """A real terminal of the system, 120 columns wide, and what was written to it."""

    def __init__(self):
        self.master, slave = os.openpty()
        self.stream = os.fdopen(slave, "w")

    def read(self):
        self.stream.flush()
        seen = b""
        while select.select([self.master], [], [], 0.05)[0]:
            seen += os.read(self.master, 1 << 16)
        return seen.decode()

    def close(self):
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


def talk(console):
    with console:
        console.print("resnet20 on embedded")
        for step in range(1, 126):
            console.progress(step)
            if step % 25 == 0:
                console.log(log_row(step))
        console.evaluation_progress(750, 1_500)
        console.score(score_row(125), best=True)
        console.warn("train/cat/17.jpg does not decode")


def test_a_full_bar_does_not_look_like_an_empty_one_where_there_are_few_colours(
    terminal, monkeypatch
):
    monkeypatch.setenv("TERM", "screen")  # as tmux has it; 16 colours
    monkeypatch.delenv("COLORTERM", raising=False)
    with Console(total_steps=2, epochs=1, stream=terminal.stream) as console:
        terminal.read()
        console.progress(2)
        drawn = terminal.read()
    assert "\x1b[36m━━━" in drawn and "\x1b[90m━" not in drawn


def test_what_is_left_of_the_bar_is_grey_on_light_and_dark_terminals(terminal):
    with Console(total_steps=4, epochs=1, stream=terminal.stream) as console:
        terminal.read()
        console.progress(2)
        assert re.search("\x1b\\[36m━+.*\x1b\\[90m╺?━+", terminal.read())


def test_a_warning_can_be_read_on_a_white_background(terminal):
    with Console(total_steps=4, epochs=1, stream=terminal.stream) as console:
        console.warn("train/cat/17.jpg does not decode")
        assert "\x1b[35mwarning: train/cat" in terminal.read()


def test_without_a_terminal_every_log_point_and_score_is_one_plain_line(tmp_path):
    path = tmp_path / "out.txt"
    with path.open("w", encoding="ascii") as stream:
        talk(Console(total_steps=625, epochs=5, stream=stream))
    text = path.read_text(encoding="ascii")
    assert all(c == "\n" or c.isprintable() for c in text)
    lines = text.splitlines()
    assert len(lines) == 8
    assert re.fullmatch(
        r"step  25/625  epoch 0\.20  loss 2\.\d{4}  top-1 \d+\.\d\d%  lr 0\.09961  "
        r"grad 1\.89  2,295 images/s  data wait 1\.6%  .*left",
        lines[1],
    )
    assert lines[6] == (
        "step 125/625  epoch 1.00  valid top-1 64.27% (95% interval 61.81% to 66.65%)"
        "  top-5 99.00%  loss 0.8346  1,500 images  best"
    )
    assert lines[7] == "warning: train/cat/17.jpg does not decode"


def test_the_log_keeps_every_line_with_its_time(tmp_path):
    with (tmp_path / "out.txt").open("w") as stream:
        console = Console(total_steps=625, epochs=5, log_file=tmp_path / "log.txt", stream=stream)
        talk(console)
    said = (tmp_path / "out.txt").read_text().splitlines()
    logged = (tmp_path / "log.txt").read_text().splitlines()
    stamp = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ  ")
    assert all(stamp.match(line) for line in logged)
    assert [stamp.sub("", line) for line in logged] == said


def test_a_terminal_gets_one_live_line_and_the_log_still_gets_all(tmp_path, terminal):
    log = tmp_path / "log.txt"
    talk(Console(total_steps=625, epochs=5, log_file=log, stream=terminal.stream))
    shown = terminal.read()
    assert "epoch 1.0/5" in shown
    assert "125/625" in shown
    assert "images/s" in shown
    assert "valid top-1 64.27%" in shown
    assert "grad 1.89" not in shown  # log points move the live line and take none of their own
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert len(log.read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("columns", "known"),
    [(44, ""), (60, "loss"), (80, "loss im/s wait"), (120, "loss images/s data wait")],
)
def test_the_live_line_leaves_out_what_does_not_fit(terminal, monkeypatch, columns, known):
    monkeypatch.setenv("COLUMNS", str(columns))
    with Console(total_steps=625, epochs=2.93333, stream=terminal.stream) as console:
        console.log(log_row(125))
        terminal.read()
        time.sleep(0.15)  # the line is redrawn ten times per second
        console.evaluation_progress(750, 1_500)
        drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.read()).strip("\r\n")
    assert re.match("epoch 0.6/2.933  [━╸].*validating 50% *$", drawn)
    assert "…" not in drawn and len(drawn) <= columns
    assert [word for word in known.split() if word not in drawn] == []


@pytest.mark.parametrize(
    ("columns", "interval"), [(80, "(61.8%"), (108, "(61.8%"), (118, "(95% interval 61.8")]
)
def test_a_score_is_shortened_where_it_would_not_fit(terminal, monkeypatch, columns, interval):
    monkeypatch.setenv("COLUMNS", str(columns))
    with Console(total_steps=125, epochs=1, stream=terminal.stream) as console:
        terminal.read()
        console.progress(124)
        console.progress(125)
        console.score(score_row(125), best=True)
        drawn = terminal.read()
    (line,) = [line for line in drawn.splitlines() if "valid top-1" in line]
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line).strip()
    assert interval in plain and len(plain) <= columns
    assert "left" not in drawn  # after the last step


def test_no_color_is_respected(terminal, monkeypatch):
    colours = re.compile(r"\x1b\[[0-9;]*3[0-9;]*m")
    talk(Console(total_steps=625, epochs=5, stream=terminal.stream))
    assert colours.search(terminal.read())
    monkeypatch.setenv("NO_COLOR", "1")
    talk(Console(total_steps=625, epochs=5, stream=terminal.stream))
    assert not colours.search(terminal.read())


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    talk(Console(total_steps=625, epochs=5, stream=terminal.stream))
    shown = terminal.read()
    assert "\x1b" not in shown
    assert "grad 1.89" in shown


def test_the_cursor_comes_back_for_a_process_about_to_vanish(terminal):
    with Console(total_steps=10, epochs=1, stream=terminal.stream) as console:
        terminal.read()
        console.restore_terminal()
        assert terminal.read().startswith("\x1b[?25h")


def test_characters_that_steer_a_terminal_are_not_passed_on(tmp_path):
    with (tmp_path / "out.txt").open("w", encoding="ascii") as stream:
        console = Console(total_steps=1, epochs=1, stream=stream)
        console.print("a\x1b[2Jb\ttab\nsecond caf\u00e9")
    assert (tmp_path / "out.txt").read_text() == "a\\u001b[2Jb  tab\nsecond caf\\xe9\n"


def test_a_reader_who_leaves_does_not_end_the_run(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from phalanx.report.console import Console\n"
        "with Console(total_steps=1, epochs=1, log_file=Path(sys.argv[1])) as console:\n"
        "    sys.stdin.read()\n"
        "    for k in range(3): console.print(f'line {k}')\n"
    )
    log = tmp_path / "log.txt"
    # Python's own last flush must find something to fail on
    env = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = subprocess.Popen(
        [sys.executable, "-c", code, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with run:
        run.stdout.close()
        run.stdin.close()
        assert run.stderr.read() == b""
        assert run.wait() == 0
    assert [line[-6:] for line in log.read_text().splitlines()] == ["line 0", "line 1", "line 2"]


def test_a_log_that_cannot_be_written_is_a_disk_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (tmp_path / "out.txt").open("w") as stream:
        console = Console(
            total_steps=1, epochs=1, log_file=tmp_path / "file" / "log.txt", stream=stream
        )
        with pytest.raises(DiskError, match=r"log\.txt: a part of this path is a file"):
            console.print("hello")


def test_noting_a_step_costs_microseconds(terminal):
    with Console(total_steps=10_000, epochs=1, stream=terminal.stream) as console:
        started_at = time.perf_counter()
        for step in range(10_000):
            console.progress(step)
        elapsed_s = time.perf_counter() - started_at
    assert elapsed_s < 0.5  # 50 microseconds each, on a busy machine


def test_time_left_leaves_the_first_step_out():
    timer = StepTimer()
    assert timer.seconds_for(10) is None
    timer.record(1, 100.0)  # compiled for a minute and more
    timer.record(2, 101.0)
    assert timer.seconds_for(10) is None
    timer.record(4, 102.0)
    assert timer.seconds_for(10) == 5.0
