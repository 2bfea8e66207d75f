"""Checkpoint folders on disk, as bytes: complete or absent, checked by hash, pruned. No torch.

A file is written and checked piece by piece, so that a save needs no memory for a second copy.

checkpoints/
  step-00000125/  manifest.json (format, and each file's size and sha256), facts.json,
                  weights.safetensors, optimizer.safetensors; average.safetensors if the
                  run keeps a live average; replicas.safetensors, the running statistics of
                  each replica, if there are several (weights.safetensors has their mean);
                  seen.safetensors, the checksums of the images that the run has read
  best            a link to the checkpoint with the highest score; a folder if the run was
  copied without links
  average/        the average of several, made on request: no step, never pruned or resumed from
  .part-...       being written, and
  .gone-...       being deleted: both are removed at the next resume

Format 1 had no replicas.safetensors, and is read as a checkpoint of one replica.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from phalanx.disk import convert_disk_errors, sync_folder, write_synced
from phalanx.errors import CheckpointError, DiskError

FORMAT = 2  # raise it when the layout changes, and teach `read_files` the older one
_NAME = re.compile(r"^step-(\d{8,})$")
_PART, _GONE = ".part-", ".gone-"
_BEST, AVERAGE_NAME = "best", "average"
FACTS, WEIGHTS, OPTIMIZER = "facts.json", "weights.safetensors", "optimizer.safetensors"
_FACT_TYPES = {  # written by every release, and always needed
    "run": str, "config": dict, "classes": list, "preprocessing.image_size": int,
    "plan.total_steps": int, "plan.train_images": int, "plan.valid_images": int,
    "global_batch": int, "state.step": int,
}  # fmt: skip
AVERAGE_WEIGHTS = "average.safetensors"  # the live average of the weights
REPLICAS = "replicas.safetensors"
FileContent = bytes | Iterable[memoryview]  # the whole file, or its pieces


def write_checkpoint(folder: Path, step: int, files: Mapping[str, FileContent]) -> Path:
    """Write the checkpoint of a step, in training."""
    return write_checkpoint_as(folder, _name_step(step), files, noun="--run-dir")


def write_checkpoint_as(
    folder: Path, name: str, files: Mapping[str, FileContent], *, noun: str = "folder"
) -> Path:
    """Write a checkpoint; it gets its name only after all bytes were read back and compared.

    noun: what the user can choose another of if the disk refuses it.
    """
    target = folder / name
    part = folder / f"{_PART}{target.name}"
    with convert_disk_errors(target, noun):
        shutil.rmtree(part, ignore_errors=True)
        if not folder.exists():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)
        part.mkdir()
        sums = {file: _write_file(part / file, content) for file, content in files.items()}
        manifest = {"format": FORMAT, "files": sums}
        write_synced(part / "manifest.json", [json.dumps(manifest, indent=1).encode()])
        sync_folder(part)
    try:
        for file, expected in _list_files(part).items():
            _check_file(part / file, expected)
    except CheckpointError as error:
        raise DiskError(f"{target}: what was written does not read back ({error})") from error
    with convert_disk_errors(target, noun):
        if target.exists():
            _remove(target)
        part.rename(target)
        sync_folder(folder)
    return target


def _write_file(path: Path, content: FileContent) -> dict[str, Any]:
    """Write a file; returns its size and sha256, as stored in the manifest."""
    size, digest = 0, sha256()

    def summed() -> Iterator[bytes | memoryview]:
        nonlocal size
        for piece in [content] if isinstance(content, bytes) else content:
            size += len(piece)
            digest.update(piece)
            yield piece

    write_synced(path, summed())
    return {"bytes": size, "sha256": digest.hexdigest()}


def read_files(checkpoint: Path, *needed: str) -> dict[str, bytes]:
    """All files of a checkpoint, each checked against the manifest, which must list `needed`."""
    files = _list_files(checkpoint, *needed)
    return {name: _read_file(checkpoint / name, expected) for name, expected in files.items()}


def read_optional_file(checkpoint: Path, name: str) -> bytes | None:
    """A file of a checkpoint, checked against the manifest; None if the manifest lists no such."""
    expected = _list_files(checkpoint).get(name)
    return None if expected is None else _read_file(checkpoint / name, expected)


def _list_files(checkpoint: Path, *needed: str) -> dict[str, Any]:
    """The manifest's entry for each file; those needed must be among them."""
    files = _read_manifest(checkpoint)["files"]
    for name in needed:
        if name not in files:
            raise CheckpointError(f"{checkpoint}: incomplete checkpoint ({name} is not listed)")
    return dict(files)


def _read_file(path: Path, expected: dict[str, Any]) -> bytes:
    """A file's bytes, checked against the manifest."""
    with _convert_incomplete_errors(path):
        content = path.read_bytes()
    _compare(path, len(content), sha256(content).hexdigest(), expected=expected)
    return content


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    """Check a file against the manifest, without reading all of it into memory."""
    with _convert_incomplete_errors(path), path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
        size = file.tell()
    _compare(path, size, digest, expected=expected)


@contextmanager
def _convert_incomplete_errors(path: Path) -> Iterator[None]:
    """Context that turns an OSError into a CheckpointError: the checkpoint is incomplete."""
    try:
        yield
    except OSError as error:
        _refuse_deleted(path.parent)
        raise CheckpointError(f"{path}: {error.strerror}; the checkpoint is incomplete") from None


def _refuse_deleted(checkpoint: Path) -> None:
    """Raise CheckpointError if a checkpoint that was found is no longer there."""
    if not checkpoint.exists():
        raise CheckpointError(
            f"{checkpoint}: was deleted in the meantime; a run that is still training keeps only "
            "its newest checkpoints and the best one, so run the command again"
        )


def _compare(path: Path, size: int, digest: str, *, expected: dict[str, Any]) -> None:
    """Raise CheckpointError if a file differs from its entry in the manifest."""
    if size != expected["bytes"]:
        raise CheckpointError(
            f"{path}: {size:,} bytes where the manifest says {expected['bytes']:,}; "
            "it was cut off or changed"
        )
    if digest != expected["sha256"]:
        raise CheckpointError(f"{path}: its contents were changed (the sha256 differs)")


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; a CheckpointError says why it cannot be read."""
    path = checkpoint / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        written_by, files = manifest["format"], manifest["files"]
        if not isinstance(written_by, int):
            raise TypeError
        for name, expected in files.items():
            size, digest = expected["bytes"], expected["sha256"]
            if not (isinstance(size, int) and isinstance(digest, str)) or Path(name).name != name:
                raise TypeError
    except FileNotFoundError:
        _refuse_deleted(checkpoint)
        raise CheckpointError(
            f"{checkpoint}: not a Phalanx checkpoint (no manifest.json)"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: damaged, or not written by Phalanx") from None
    if written_by > FORMAT:
        raise CheckpointError(
            f"{checkpoint}: format {written_by} is newer than this Phalanx reads ({FORMAT}); "
            "install the version that wrote it, or a later one"
        )
    return manifest


def read_facts(checkpoint: Path) -> dict[str, Any]:
    """The contents of a checkpoint's facts.json, after checking all its files."""
    path = checkpoint / FACTS
    files = _list_files(checkpoint, FACTS, WEIGHTS, OPTIMIZER)
    for name, expected in files.items():
        _check_file(checkpoint / name, expected)
    content = _read_file(path, files[FACTS])
    try:
        facts = json.loads(content)
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: is damaged, it is not JSON") from None
    for dotted, kind in _FACT_TYPES.items():
        value = facts
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{path}: is damaged, or not written by Phalanx: it has no {dotted}"
            )
    if not all(isinstance(name, str) for name in facts["classes"]):
        raise CheckpointError(f"{path}: is damaged, its classes are not all names")
    for name, value in facts["config"].items():
        if isinstance(value, dict | list):
            raise CheckpointError(f"{path}: is damaged, its option {name} has no single value")
    if not _is_image_check(facts["state"].get("image_check")):
        raise CheckpointError(f"{path}: is damaged, its image_check is invalid")
    return dict(facts)


def _is_image_check(value: Any) -> bool:
    """Whether these are the fields of an ImageCheck, or None where no images are checked."""
    if value is None:
        return True
    kinds = {"since": int, "is_decided": bool, "waited": float | int | None, "cores_only": list}
    return (
        isinstance(value, dict)
        and value.keys() == kinds.keys()
        and all(isinstance(value[name], kind) for name, kind in kinds.items())
        and all(isinstance(index, int) for index in value["cores_only"])
    )


def _name_step(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def parse_step(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.match(checkpoint.name)
    assert match
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.match(path.name)), key=parse_step)


def list_weights(folder: Path) -> list[Path]:
    """All weights in a folder: checkpoints, the live average in each, the average of several."""
    live = [path for one in list_checkpoints(folder) for path in (one, one / AVERAGE_WEIGHTS)]
    return [path for path in (*live, folder / AVERAGE_NAME) if path.exists()]


def find_newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a resume continues from."""
    return next(reversed(list_checkpoints(folder)), None)


def list_checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Every complete checkpoint by its step, oldest first."""
    kept = {parse_step(path): path for path in list_checkpoints(folder)}
    if _is_copied_best(folder):
        kept.setdefault(_read_step(folder / _BEST), folder / _BEST)
    return dict(sorted(kept.items()))


def find_best_step(folder: Path) -> int | None:
    """The step of the checkpoint with the highest score, or None if there are no scores."""
    best = folder / _BEST
    if (best / "manifest.json").is_file():
        return _read_step(best)
    newest = find_newest_checkpoint(folder)  # the link was not copied: the newest has all scores
    scores = read_facts(newest)["state"].get("scores") if newest else None
    if not isinstance(scores, dict):
        return None
    known = {int(s): top1 for s, top1 in scores.items() if isinstance(top1, float)}
    return choose_best_step(folder, known)


def _is_copied_best(folder: Path) -> bool:
    """Whether `best` is a folder: the run was copied by a program that follows links."""
    best = folder / _BEST
    return best.is_dir() and not best.is_symlink()


def _read_step(best: Path) -> int:
    """The step of the best checkpoint, from the link's target or from its facts."""
    target = best.resolve()
    return parse_step(target) if _NAME.match(target.name) else read_facts(best)["state"]["step"]


def restore_best_link(folder: Path) -> None:
    """If copying turned the link `best` into a folder, make that a checkpoint and link to it."""
    if not _is_copied_best(folder):
        return
    copied = folder / _BEST
    try:
        step = _read_step(copied)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Remove {copied}: it is only a copy of the best checkpoint"
        ) from error
    with convert_disk_errors(copied):
        if (folder / _name_step(step)).exists():
            _remove(copied)
        else:
            copied.rename(folder / _name_step(step))
        _link_best(folder, step)
        sync_folder(folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    with convert_disk_errors(folder):
        for path in folder.glob(".*"):
            if path.is_symlink():
                path.unlink()
            elif path.name.startswith((_PART, _GONE)):
                shutil.rmtree(path)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a kill leaves no incomplete one."""
    gone = checkpoint.with_name(_GONE + checkpoint.name)
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint.rename(gone)
    shutil.rmtree(gone)


def choose_best_step(folder: Path, scores: dict[int, float]) -> int | None:
    """The step of the existing checkpoint with the best score; the earliest of equal ones."""
    scored = [step for step in map(parse_step, list_checkpoints(folder)) if step in scores]
    return max(scored, key=lambda step: (scores[step], -step), default=None)


def prune_checkpoints(folder: Path, *, keep: int, scores: dict[int, float]) -> None:
    """Delete all but the best and the newest `keep` checkpoints, and link to the best."""
    with convert_disk_errors(folder):
        best = choose_best_step(folder, scores)
        for checkpoint in list_checkpoints(folder)[:-keep]:
            if parse_step(checkpoint) != best:
                _remove(checkpoint)
        if best is not None:
            _link_best(folder, best)


def _link_best(folder: Path, step: int) -> None:
    """Make the link `best` point at the checkpoint of a step."""
    link = folder / f"{_PART}{_BEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(_name_step(step))
    link.replace(folder / _BEST)
