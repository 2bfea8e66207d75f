"""Commands that are broken off: killed, stopped by a signal, or out of disk."""

import shutil
import signal
import subprocess
from pathlib import Path
from random import Random

from torture.command import KILLED, Break, run
from torture.law import (
    STOPPED,
    Outcome,
    Violation,
    check_end,
    check_same_run,
    describe,
)
from torture.material import BUILDS, Material, train_words

MOST_BREAKS = 3
LONGEST_S = 1.2  # of a training here, in which a signal may come
WRITES = 90  # of a training here, about
_MIN_AFTER_S = 0.03  # before it, the command has not begun


def break_training(material: Material, folder: Path, chance: Random) -> tuple[str, Outcome]:
    """A training is killed or stopped up to three times; the last resume ends like none."""
    form = chance.choice(material.forms)
    material.lay_out(folder, form, half=False)
    words, told = train_words(form, f"--workers={chance.choice('0001')}"), []
    for _ in range(chance.randint(1, MOST_BREAKS)):
        stop, name = _choose_break(chance)
        ended = run(words, folder, stop=stop)
        check_end(ended, killed=stop.by is signal.SIGKILL)
        told.append(name)
        begun = (folder / "run" / "run.json").exists()
        if ended.code not in (0, KILLED, *STOPPED):
            raise Violation(f"not broken off but refused\n{describe(ended)}")
        if begun:
            words = ["train", "--resume", "run"]
        elif (folder / "run").exists():
            shutil.rmtree(folder / "run")  # killed before there was a run
    ended = run(words, folder)
    outcome = check_same_run(ended, material.whole(form) / "run", folder / "run")
    how = f"{' and '.join(told)}, {form}"
    if outcome is Outcome.REFUSED:
        raise Violation(f"{how}: the run does not go on\n{describe(ended)}")
    return how, outcome


def _choose_break(chance: Random) -> tuple[Break, str]:
    if chance.random() < 0.5:
        number = chance.randint(1, WRITES)
        return Break(before_write=number), f"SIGKILL before write {number}"
    which = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    after_s = round(chance.uniform(_MIN_AFTER_S, LONGEST_S), 3)
    return Break(after_s=after_s, by=which), f"{which.name} after {after_s} s"


def break_build(material: Material, folder: Path, chance: Random) -> tuple[str, Outcome]:
    """A conversion is killed; run again, it gives the same bytes."""
    form = chance.choice(sorted(BUILDS))
    (folder / "in").symlink_to(material.data("jpeg folder"))
    words = ["data", "build", "in", "--to", form.split()[0], "--out", "out", "--workers", "1"]
    words += BUILDS[form]
    if chance.random() < 0.5:
        stop, name = _choose_break(chance)
    else:
        number = chance.randint(1, 12)
        stop, name = Break(before_write=number), f"SIGKILL before write {number}"
    check_end(run(words, folder, stop=stop), killed=stop.by is signal.SIGKILL)
    ended = run(words, folder)
    check_end(ended)
    if ended.code or _read_tree(folder / "out") != _read_tree(material.data(form)):
        raise Violation(f"{name}, {form}: built again, it is not the same\n{describe(ended)}")
    return f"{name}, data build --to {form}", Outcome.IDENTICAL


def _read_tree(folder: Path) -> dict[str, bytes]:
    """The content of all files by name, without indices."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".index")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# --- full disks ---


def _mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True, check=False).returncode == 0


def fill_disk(material: Material, folder: Path, chance: Random) -> tuple[str, Outcome]:
    """A training or a conversion on a small disk: code 6, and the same once there is room."""
    disk, size = folder / "disk", chance.randint(1, 24) * 128
    disk.mkdir()
    if not _mount("-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(disk)):
        return "mounting a tmpfs is not allowed here", Outcome.SKIPPED
    try:
        if chance.random() < 0.3:
            return _build_on(disk, size, material, folder, chance)
        return _train_on(disk, size, material, folder, chance)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def _train_on(
    disk: Path, size: int, material: Material, folder: Path, chance: Random
) -> tuple[str, Outcome]:
    form = chance.choice(["packed", "idx"])
    material.lay_out(folder, form, half=False)
    how = f"{size} KiB for a training ({form})"
    words = [word.replace("--run-dir=run", "--run-dir=disk/run") for word in train_words(form)]
    whole, here = material.whole(form) / "run", disk / "run"
    ended = run(words, folder)
    outcome = check_same_run(ended, whole, here)
    if outcome is Outcome.IDENTICAL:
        return how, outcome
    if ended.code != 6:
        raise Violation(f"{how}: code {ended.code}, not 6\n{describe(ended)}")
    if not (here / "run.json").exists():
        return how, outcome
    if not _mount("-o", "remount,size=64m", str(disk)):
        return how, outcome
    ended = run(["train", "--resume", "disk/run"], folder)
    if check_same_run(ended, whole, here) is Outcome.REFUSED:
        raise Violation(f"{how}: with room again, it does not go on\n{describe(ended)}")
    return f"{how}, then 64 MiB", Outcome.IDENTICAL


def _build_on(
    disk: Path, size: int, material: Material, folder: Path, chance: Random
) -> tuple[str, Outcome]:
    form = chance.choice(sorted(BUILDS))
    (folder / "in").symlink_to(material.data("jpeg folder"))
    room = chance.randint(0, 48) * 1024  # the data has some 40 KiB
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, size * 1024 - room)))
    words = ["data", "build", "in", "--to", form.split()[0], "--out", "disk/out", "--workers", "1"]
    ended = run([*words, *BUILDS[form]], folder)
    how = f"{room // 1024} KiB for data build --to {form}"
    if check_end(ended) is Outcome.REFUSED:
        if ended.code != 6:
            raise Violation(f"{how}: code {ended.code}, not 6\n{describe(ended)}")
        filler.unlink()
        _mount("-o", "remount,size=64m", str(disk))
        ended = run([*words, *BUILDS[form]], folder)
        check_end(ended)
    if ended.code or _read_tree(disk / "out") != _read_tree(material.data(form)):
        raise Violation(f"{how}: with room again, it is not the same\n{describe(ended)}")
    return how, Outcome.IDENTICAL
