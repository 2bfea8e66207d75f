"""Files that change behind a run's back: in its checkpoints, its folder, or its data."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from torture.law import (
    Outcome,
    Violation,
    check_end,
    check_same_answer,
    check_same_run,
    describe,
    find_difference,
    read_summary,
)
from torture.material import ANSWERS, FORMS, HAVE_SUMS, Trial, train_words

INDEX_FOLDER = ".phalanx"


def _flip(data: bytearray, chance: Random) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _overwrite(data: bytearray, chance: Random) -> None:
    begin = chance.randrange(len(data))
    data[begin : begin + chance.randint(1, 64)] = chance.randbytes(chance.randint(1, 64))


def _zero(data: bytearray, chance: Random) -> None:
    begin = chance.randrange(len(data))
    end = min(len(data), begin + chance.choice([1, 16, 512, 4096]))
    data[begin:end] = bytes(end - begin)


def _cut(data: bytearray, chance: Random) -> None:
    del data[chance.randrange(len(data)) :]


def _append(data: bytearray, chance: Random) -> None:
    data += chance.randbytes(chance.choice([1, 7, 512]))


def _swap(data: bytearray, chance: Random) -> None:
    """Another digit where there is one: what a person would edit."""
    places = [n for n, byte in enumerate(data) if 48 <= byte <= 57] or [0]
    data[chance.choice(places)] = 48 + chance.randrange(10)


_CHANGES: dict[str, Callable[[bytearray, Random], None]] = {
    "flip a bit of": _flip,
    "overwrite some bytes of": _overwrite,
    "zero a block of": _zero,
    "cut short": _cut,
    "append to": _append,
    "change a digit of": _swap,
}
_REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "remove": lambda path: None,
    "put a folder in place of": Path.mkdir,
    "put a looping link in place of": lambda path: path.symlink_to(path.name),
}
_SPECIAL = {  # only among data, where anything may lie
    "put a FIFO in place of": os.mkfifo,
    "put a link to /dev/zero in place of": lambda path: path.symlink_to("/dev/zero"),
}


def damage(path: Path, chance: Random, *, special: bool = False) -> str:
    """Damage a file; says how. Flips come most often, as they are the hardest to see."""
    replacements = _REPLACEMENTS | (_SPECIAL if special else {})
    how = chance.choice([*_CHANGES, *["flip a bit of"] * 4, chance.choice([*replacements])])
    if how in replacements:
        path.unlink()
        replacements[how](path)
        return how
    data = bytearray(path.read_bytes())
    if data:
        _CHANGES[how](data, chance)
    path.write_bytes(data)
    return how


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _choose(chance: Random, paths: list[Path]) -> Path:
    """One of the files: an index or a note now and then, else what holds images or labels."""
    notes = [path for path in paths if INDEX_FOLDER in path.parts or path.suffix == ".json"]
    images = [path for path in paths if path not in notes]
    return chance.choice(notes if notes and chance.random() < 0.25 else images)


def damage_checkpoint(trial: Trial) -> Outcome:
    """A file of the newest checkpoint changes; then a resume, or a command that reads it."""
    chance = trial.chance
    form = chance.choice(["packed", "idx"])
    trial.lay_out(form, half=True)
    newest = max((trial.folder / "run" / "checkpoints").glob("step-*"))
    _damage_one(trial, chance.choice(_files_below(newest)))
    return _judge_run(trial, form, chance.choice(["resume", *ANSWERS]))


def damage_records(trial: Trial) -> Outcome:
    """A file of the run folder changes; then a resume, or a command that reads it."""
    chance, run_folder = trial.chance, trial.folder / "run"
    form = chance.choice(["packed", "idx"])
    whole = trial.material.whole(form) / "run"
    finished = chance.random() < 0.3
    trial.lay_out(form, half=not finished)
    if finished:
        trial.tell("of a finished run:")
        shutil.copytree(whole, run_folder, symlinks=True)
        shutil.copytree(whole, trial.folder / "other", symlinks=True)
    _damage_one(trial, chance.choice([p for p in sorted(run_folder.iterdir()) if p.is_file()]))
    if finished:  # there is nothing left to compute: what is asked for is an orderly end
        commands = (["report", "run"], ["train", "--resume", "run"], ["compare", "run", "other"])
        return check_end(trial.run(chance.choice(commands)))
    return _judge_run(trial, form, chance.choice(["resume", "resume", *ANSWERS]))


def _damage_one(trial: Trial, path: Path, *, special: bool = False) -> None:
    how = damage(path, trial.chance, special=special)
    trial.tell(f"{how} {path.relative_to(trial.folder)}")


def _judge_run(trial: Trial, form: str, command: str) -> Outcome:
    if command == "resume":
        ended = trial.run(["train", "--resume", "run"])
        return check_same_run(ended, trial.material.whole(form) / "run", trial.folder / "run")
    ended = trial.run(ANSWERS[command])
    if ended.code == 0 and '"as_recorded": false' in ended.out:
        return check_end(ended)  # replay says that the record tells something else
    return check_same_answer(ended, trial.material.answer(form, command), trial.folder)


def damage_data(trial: Trial) -> Outcome:
    """A file of the data changes before a training, or between a kill and its resume."""
    chance, here = trial.chance, trial.folder / "run"
    form, resumes = chance.choice(trial.material.forms), chance.random() < 0.6
    trial.lay_out(form, half=resumes)
    trial.tell(f"{form}{', killed halfway' if resumes else ''}:")
    path = _choose(chance, _files_below(trial.folder / "data"))
    _damage_one(trial, path, special=True)
    whole = trial.material.whole(form) / "run"
    workers = chance.choice(["0", "0", "0", "1"])
    if resumes:
        ended = trial.run(["train", "--resume", "run", "--workers", workers])
        outcome = check_same_run(ended, whole, here)
        if outcome is Outcome.REFUSED and ended.code not in (3, 4):
            raise Violation(f"code {ended.code} for damaged data\n{describe(ended)}")
        return outcome
    ended = trial.run(train_words(form, f"--workers={workers}"))
    if check_end(ended) is Outcome.REFUSED:
        return Outcome.REFUSED
    difference = find_difference(whole, here)
    if not difference:
        return Outcome.IDENTICAL
    is_checked = INDEX_FOLDER in path.parts or (form in HAVE_SUMS and path.suffix != ".txt")
    if is_checked and "weights" in difference and not read_summary(here)["bad_images"]:
        raise Violation(f"trained on it, and {difference}\n{describe(ended)}")
    return Outcome.CLEAN  # data of this form tells nobody what it was


def read_damaged_data(trial: Trial) -> Outcome:
    """A file of the data changes before a command that only looks at it."""
    form = trial.chance.choice(trial.material.forms)
    trial.lay_out(form, half=False)
    trial.tell(f"{form}:")
    _damage_one(trial, _choose(trial.chance, _files_below(trial.folder / "data")), special=True)
    commands = (
        ["data", "verify", "data", "--workers", "1"],
        ["data", "list", "data"],
        ["data", "build", "data", "--to", "packed", "--out", "out", "--workers", "1"],
        ["plan", "--data", FORMS[form][0], "--data-dir", "data"],
    )
    return check_end(trial.run(trial.chance.choice(commands)))
