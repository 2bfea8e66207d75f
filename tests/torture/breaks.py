"""Commands that are broken off: killed, stopped by a signal, or out of disk."""

import shutil
import signal
import subprocess
from pathlib import Path

from torture.command import KILLED, Break, Ended
from torture.law import (
    STOPPED,
    Outcome,
    Violation,
    check_end,
    check_same_run,
    describe,
)
from torture.material import BUILDS, Trial, train_words

MOST_BREAKS = 3
LONGEST_S = 1.2  # of a training here, in which a signal may come
WRITES, BUILD_WRITES = 90, 12  # of a training and a build here, about
_MIN_AFTER_S = 0.03  # before it, the command has not begun


def break_training(trial: Trial) -> Outcome:
    """A training is killed or stopped up to three times; the last resume ends like none."""
    chance, here = trial.chance, trial.folder / "run"
    form = chance.choice(trial.material.forms)
    trial.lay_out(form, half=False)
    trial.tell(f"{form}:")
    words = train_words(form, f"--workers={chance.choice('0001')}")
    for _ in range(chance.randint(1, MOST_BREAKS)):
        ended = _break_once(trial, words, writes=WRITES)
        if ended.code not in (0, KILLED, *STOPPED):
            raise Violation(f"not broken off but refused\n{describe(ended)}")
        if (here / "run.json").exists():
            words = ["train", "--resume", "run"]
        elif here.exists():
            shutil.rmtree(here)  # killed before there was a run
    ended = trial.run(words)
    if check_same_run(ended, trial.material.whole(form) / "run", here) is Outcome.REFUSED:
        raise Violation(f"the run does not go on\n{describe(ended)}")
    return Outcome.IDENTICAL


def _break_once(trial: Trial, words: list[str], *, writes: int) -> Ended:
    """The command, killed before a write, or ended by a signal at some moment."""
    chance = trial.chance
    if chance.random() < 0.5:
        number = chance.randint(1, writes)
        stop = Break(before_write=number)
        trial.tell(f"SIGKILL before write {number},")
    else:
        which = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        stop = Break(after_s=round(chance.uniform(_MIN_AFTER_S, LONGEST_S), 3), by=which)
        trial.tell(f"{which.name} after {stop.after_s} s,")
    ended = trial.run(words, stop)
    check_end(ended, killed=stop.by is signal.SIGKILL)
    return ended


def break_build(trial: Trial) -> Outcome:
    """A conversion is killed or stopped; run again, it gives the same bytes."""
    form, words = _choose_build(trial, out="out")
    _break_once(trial, words, writes=BUILD_WRITES)
    return _check_built(trial, form, trial.run(words), out="out")


def _choose_build(trial: Trial, *, out: str) -> tuple[str, list[str]]:
    form = trial.chance.choice(sorted(BUILDS))
    (trial.folder / "in").symlink_to(trial.material.data("jpeg folder"))
    trial.tell(f"data build --to {form}:")
    words = ["data", "build", "in", "--to", form.split(maxsplit=1)[0], "--out", out]
    return form, [*words, "--workers", "1", *BUILDS[form]]


def _check_built(trial: Trial, form: str, ended: Ended, *, out: str) -> Outcome:
    check_end(ended)
    if ended.code or _read_tree(trial.folder / out) != _read_tree(trial.material.data(form)):
        raise Violation(f"built again, it is not the same\n{describe(ended)}")
    return Outcome.IDENTICAL


def _read_tree(folder: Path) -> dict[str, bytes]:
    """The content of all files by name, without indices."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".index")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# --- full disks ---


def _mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


def fill_disk(trial: Trial) -> Outcome:
    """A training or a conversion on a small disk: code 6, and the same once there is room."""
    disk, size = trial.folder / "disk", trial.chance.randint(1, 24) * 128
    disk.mkdir()
    if not _mount("-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)):
        trial.tell("mounting a tmpfs is not allowed here")
        return Outcome.SKIPPED
    try:
        fill = _build_on if trial.chance.random() < 0.3 else _train_on
        return fill(trial, disk, size)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def _train_on(trial: Trial, disk: Path, size: int) -> Outcome:
    form = trial.chance.choice(["packed", "idx"])
    trial.lay_out(form, half=False)
    trial.tell(f"training on {form}, {size} KiB for the run,")
    words = [word.replace("--run-dir=run", "--run-dir=disk/run") for word in train_words(form)]
    whole, here = trial.material.whole(form) / "run", disk / "run"
    ended = trial.run(words)
    if check_same_run(ended, whole, here) is Outcome.IDENTICAL:
        return Outcome.IDENTICAL
    if ended.code != 6:
        raise Violation(f"code {ended.code}, not 6\n{describe(ended)}")
    if not (here / "run.json").exists() or not _mount("-o", "remount,size=64m", str(disk)):
        return Outcome.REFUSED
    trial.tell("then 64 MiB and a resume")
    ended = trial.run(["train", "--resume", "disk/run"])
    if check_same_run(ended, whole, here) is Outcome.REFUSED:
        raise Violation(f"with room again, it does not go on\n{describe(ended)}")
    return Outcome.IDENTICAL


def _build_on(trial: Trial, disk: Path, size: int) -> Outcome:
    form, words = _choose_build(trial, out="disk/out")
    room_kib = trial.chance.randint(0, 48)  # the data has some 40
    trial.tell(f"{room_kib} KiB for it,")
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, size - room_kib) * 1024))
    ended = trial.run(words)
    if check_end(ended) is Outcome.REFUSED:
        if ended.code != 6:
            raise Violation(f"code {ended.code}, not 6\n{describe(ended)}")
        filler.unlink()
        if not _mount("-o", "remount,size=64m", str(disk)):
            return Outcome.REFUSED
        trial.tell("then 64 MiB")
        ended = trial.run(words)
    return _check_built(trial, form, ended, out="disk/out")
