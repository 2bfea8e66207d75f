"""Files that change behind a run's back: in its checkpoints, its folder, or its data."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

from torture.command import run
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
from torture.material import ANSWERS, FORMS, HAVE_SUMS, Material, train_words

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


def damage_checkpoint(material: Material, folder: Path, chance: Random) -> tuple[str, Outcome]:
    """A file of the newest checkpoint changes; then a resume, or a command that reads it."""
    form = chance.choice(["packed", "idx"])
    material.lay_out(folder, form, half=True)
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    path = chance.choice(_files_below(newest))
    how = f"{damage(path, chance)} {path.relative_to(folder)}"
    return how, _judge_run(material, folder, form, chance.choice(["resume", *ANSWERS]))


def damage_records(material: Material, folder: Path, chance: Random) -> tuple[str, Outcome]:
    """A file of the run folder changes; then a resume, or a command that reads it."""
    form = chance.choice(["packed", "idx"])
    finished = chance.random() < 0.3
    material.lay_out(folder, form, half=not finished)
    if finished:
        shutil.copytree(material.whole(form) / "run", folder / "run", symlinks=True)
    path = chance.choice([path for path in sorted((folder / "run").iterdir()) if path.is_file()])
    how = f"{damage(path, chance)} {path.relative_to(folder)}"
    if finished:  # there is nothing left to compute: what is asked for is an orderly end
        words = chance.choice([["report", "run"], ["train", "--resume", "run"]])
        shutil.copytree(material.whole(form) / "run", folder / "other", symlinks=True)
        words = chance.choice([words, ["compare", "run", "other"]])
        return f"{how} of a finished run", check_end(run(words, folder))
    return how, _judge_run(material, folder, form, chance.choice(["resume", "resume", *ANSWERS]))


def _judge_run(material: Material, folder: Path, form: str, command: str) -> Outcome:
    if command == "resume":
        ended = run(["train", "--resume", "run"], folder)
        return check_same_run(ended, material.whole(form) / "run", folder / "run")
    ended = run(ANSWERS[command], folder)
    return check_same_answer(ended, material.answer(form, command), folder)


def damage_data(material: Material, folder: Path, chance: Random) -> tuple[str, Outcome]:
    """A file of the data changes before a training, or between a kill and its resume."""
    form, resumes = chance.choice(material.forms), chance.random() < 0.6
    material.lay_out(folder, form, half=resumes)
    files = _files_below(folder / "data")
    path = _choose(chance, files)
    how = f"{damage(path, chance, special=True)} {path.relative_to(folder)} ({form})"
    whole = material.whole(form) / "run"
    workers = chance.choice(["0", "0", "0", "1"])
    if resumes:
        ended = run(["train", "--resume", "run", "--workers", workers], folder)
        outcome = check_same_run(ended, whole, folder / "run")
        if outcome is Outcome.REFUSED and ended.code not in (3, 4):
            raise Violation(f"code {ended.code} for damaged data\n{describe(ended)}")
        return f"{how}, then resume", outcome
    ended = run(train_words(form, f"--workers={workers}"), folder)
    if check_end(ended) is Outcome.REFUSED:
        return how, Outcome.REFUSED
    difference = find_difference(whole, folder / "run")
    if not difference:
        return how, Outcome.IDENTICAL
    is_index = INDEX_FOLDER in path.parts
    known = is_index or (form in HAVE_SUMS and path.suffix != ".txt")
    if known and "weights" in difference and not read_summary(folder / "run")["bad_images"]:
        raise Violation(f"{how}: trained on it, and {difference}\n{describe(ended)}")
    return how, Outcome.CLEAN  # data of this form tells nobody what it was


def read_damaged_data(material: Material, folder: Path, chance: Random) -> tuple[str, Outcome]:
    """A file of the data changes before a command that only looks at it."""
    form = chance.choice(material.forms)
    material.lay_out(folder, form, half=False)
    path = _choose(chance, _files_below(folder / "data"))
    how = f"{damage(path, chance, special=True)} {path.relative_to(folder)} ({form})"
    words = chance.choice(
        [
            ["data", "verify", "data", "--workers", "1"],
            ["data", "list", "data"],
            ["data", "build", "data", "--to", "packed", "--out", "out", "--workers", "1"],
            ["plan", "--data", FORMS[form][0], "--data-dir", "data"],
        ]
    )
    return how, check_end(run(words, folder))
