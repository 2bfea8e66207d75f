"""What a resume finds: records that its checkpoint presumes, and leftovers of a kill."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import CheckpointError
from small_runs import small_run

METRICS, TRAINING, VALIDATION = "metrics.jsonl", "training.csv", "validation.csv"


@pytest.fixture(scope="module")
def finished(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: 18 steps, validations after 6, 12 and 18, log points at every third step."""
    run = tmp_path_factory.mktemp("history") / "run"
    assert main(small_run(digits, run, logs_per_epoch=2, keep=9)) == 0
    return run


@pytest.fixture
def stopped(finished, tmp_path) -> Path:
    """The run as if it had been killed after step 16; its newest rows are beyond that."""
    return kill_after_16(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def kill_after_16(run: Path) -> Path:
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000018")
    return run


def drop_lines(path: Path, *which: int) -> None:
    """Remove lines, counted from 0."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for n, line in enumerate(lines) if n not in which))


def change_digit(path: Path) -> None:
    """Make one digit of the first row another one."""
    header, first, *others = path.read_bytes().splitlines(keepends=True)
    digit = first.rstrip()[-1:]
    first = first.rstrip()[:-1] + (b"8" if digit == b"7" else b"7") + b"\n"
    path.write_bytes(b"".join([header, first, *others]))


DAMAGES = {
    "metrics cut to three lines": (
        lambda run: drop_lines(run / METRICS, *range(3, 30)),
        "metrics.jsonl lacks steps 4 to 16, "
        "metrics.jsonl lacks the evaluation after steps 6, 12, though step-00000016 was saved",
    ),
    "no metrics": (lambda run: (run / METRICS).unlink(), "metrics.jsonl lacks steps 1 to 16, "),
    "gaps": (
        lambda run: drop_lines(run / METRICS, 0, 2, 4, 5, 8, 10),
        "metrics.jsonl lacks steps 1, 3, 5 to 6 and 2 more ranges, though",
    ),
    "an evaluation": (
        lambda run: drop_lines(run / METRICS, 6),
        "metrics.jsonl lacks the evaluation after step 6, though",
    ),
    "no log points": (
        lambda run: (run / TRAINING).unlink(),
        "training.csv lacks steps 3, 6, 9 and 2 more ranges, though",
    ),
    "a log point": (lambda run: drop_lines(run / TRAINING, 3), "training.csv lacks step 9, though"),
    "a validation": (
        lambda run: drop_lines(run / VALIDATION, 2),
        "validation.csv lacks step 12, though",
    ),
    "another number": (
        lambda run: change_digit(run / VALIDATION),
        "validation.csv has changed, though",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_without_its_records_is_refused_and_says_what_is_missing(stopped, capsys, damage):
    break_it, told = DAMAGES[damage]
    break_it(stopped)
    before = {name: (stopped / name).read_bytes() for name in (METRICS, TRAINING, VALIDATION)
              if (stopped / name).exists()}  # fmt: skip
    assert main(["train", "--resume", str(stopped)]) == CheckpointError.exit_code
    said = capsys.readouterr().err
    assert f"phalanx train: {stopped}: {told}" in said
    assert f"phalanx train --fork {stopped} --run-dir NEW" in said
    assert all((stopped / name).read_bytes() == content for name, content in before.items())


def test_a_fork_goes_on_without_the_records_and_then_has_its_own(stopped, tmp_path, capsys):
    (stopped / METRICS).unlink()
    fork = tmp_path / "fork"
    assert main(["train", "--fork", str(stopped), "--run-dir", str(fork)]) == 0
    assert (fork / METRICS).read_text().startswith('{"step": 17, ')
    (fork / "summary.json").unlink()
    assert main(["train", "--resume", str(fork)]) == 0
    (fork / "summary.json").unlink()
    drop_lines(fork / METRICS, 0)
    assert main(["train", "--resume", str(fork)]) == CheckpointError.exit_code
    assert "metrics.jsonl lacks step 17, though step-00000018" in capsys.readouterr().err


def test_rows_beyond_the_checkpoint_and_a_torn_line_are_no_hindrance(stopped, finished):
    with (stopped / METRICS).open("ab") as file:
        file.write(b'{"step": 19, "epo')
    assert main(["train", "--resume", str(stopped)]) == 0
    assert (stopped / METRICS).read_bytes() == (finished / METRICS).read_bytes()


@pytest.mark.parametrize("rate", ["3", "0"])
def test_log_points_of_another_interval_are_no_hindrance(stopped, rate):
    resume = ["train", "--resume", str(stopped)]
    assert main([*resume, "--logs-per-epoch", rate]) == 0
    kill_after_16(stopped)
    assert main(resume) == 0


@pytest.mark.parametrize("option", ["--disable-metrics=true", "--validation=false"])
def test_what_a_run_does_not_record_is_not_missed(digits, tmp_path, option):
    run = tmp_path / "run"
    words = [*small_run(digits, run, keep=9, logs_per_epoch=0), option]
    assert main(words) == 0
    (run / TRAINING).unlink()
    assert main(["train", "--resume", str(kill_after_16(run))]) == 0


# --- leftovers ---


def test_what_a_killed_process_had_begun_to_write_is_removed(stopped):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    ours = [stopped / f".predictions.csv.{gone.pid}.part", stopped / f".run.json.{gone.pid}.part"]
    theirs = [
        stopped / f".predictions.csv.{os.getppid()}.part",  # of a process that is at work
        stopped / f"predictions.csv.{gone.pid}.part",
        stopped / ".notes.part",
    ]
    for path in (*ours, *theirs):
        path.write_text("")
    assert main(["train", "--resume", str(stopped)]) == 0
    assert [path.exists() for path in ours] == [False, False]
    assert [path.exists() for path in theirs] == [True, True, True]
    ours[0].write_text("")
    assert main(["train", "--resume", str(stopped)]) == 0, "it is finished by now"
    assert not ours[0].exists()
