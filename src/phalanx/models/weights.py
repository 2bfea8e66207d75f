"""Weights from elsewhere: read without running code, renamed to timm's names, checked by name."""

import json
import pickle
import re
import struct
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.catalog.variant import METADATA_KEY, NORM_LAYOUT_KEY
from phalanx.errors import CheckpointError
from phalanx.units import format_some

_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")  # where scripts put them
_OPTION_KEYS = ("opts", "args")  # where scripts put their options
_LEAST_WRAPPED = 1 / 3  # of a file's tensors are the network's, beside copies and other heads
_COUNTER = "num_batches_tracked"  # older files have none; nothing depends on it
_MAGIC_BYTES = (b"PK\x03\x04", b"\x80")  # a zip archive, or the pickle of older versions
_SHOWN = 3
_MODEL_SUFFIXES = {".onnx": "an ONNX model", ".pt2": "a model of torch.export"}
# what torch's reader raises for a file that is cut short or is something else
_READ_ERRORS = (
    *(RuntimeError, OSError, ValueError, LookupError, AssertionError, EOFError, struct.error),
    *(TypeError, AttributeError),  # of a pickle with one byte changed
)


def read_weights(path: Path, wanted: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pth file, under timm's names.

    wanted: the names of the model they are for, which may have a wrapper's before them.
    """
    if path.suffix in _MODEL_SUFFIXES:
        raise CheckpointError(
            f"{path}: is {_MODEL_SUFFIXES[path.suffix]}, not a file of weights; "
            "`phalanx export RUN --format safetensors` writes those of a run, `phalanx port "
            "weights` those of an older program"
        )
    is_safe = path.suffix == ".safetensors"
    tensors = read_safetensors(path) if is_safe else read_pickled(path)[0]
    wrappers = _find_wrappers(tensors, wanted)
    if len(wrappers) > 1:
        raise CheckpointError(
            f"{path}: holds the network more than once, in {' and in '.join(wrappers)}; save one "
            "of them alone"
        )
    return to_timm_names(_unwrap(tensors, wrappers[0], wanted))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: is not a whole safetensors file: {error}; download it again"
        ) from error


def read_norm_layout(path: Path) -> str:
    """How the group norms of a file's model group their channels."""
    if path.suffix != ".safetensors":
        return "contiguous"
    with safe_open(path, framework="pt") as file:
        return str((file.metadata() or {}).get(NORM_LAYOUT_KEY, "contiguous"))


def read_exported_classes(path: Path) -> tuple[str, ...]:
    """The classes that `phalanx export` wrote into a file; none for any other file."""
    if path.suffix != ".safetensors":
        return ()
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(METADATA_KEY, "{}")
    try:
        return tuple(map(str, json.loads(text).get("classes", ())))
    except (ValueError, TypeError, AttributeError, RecursionError):  # another program wrote it
        return ()


def read_pickled(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state dict of a .pth file, and the options that some scripts store beside it.

    By torch's reader that takes tensors alone, and a Namespace, which is no more than a dict.
    """
    _check_magic_bytes(path)
    warned: list[warnings.WarningMessage] = []
    try:
        with (
            torch.serialization.safe_globals([Namespace]),
            warnings.catch_warnings(record=True, action="always") as warned,
        ):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _explain_unreadable(path, str(error), [str(w.message) for w in warned]) from error
    except _READ_ERRORS as error:
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: is a TorchScript program, which Phalanx does not run; save only the "
                "state dict where it was trained, preferably as .safetensors"
            ) from error
        raise CheckpointError(f"{path}: is truncated or damaged; download it again") from error
    tensors = _find_state_dict(content)
    if not tensors:
        raise CheckpointError(
            f"{path}: holds no weights, only a {type(content).__name__}; save the state dict"
        )
    stored = [content[key] for key in _OPTION_KEYS if isinstance(content.get(key), Namespace)]
    return tensors, dict(vars(stored[0])) if stored else {}


def _explain_unreadable(path: Path, refused: str, warned: list[str]) -> CheckpointError:
    """Why torch's safe reader did not read a file; warned: what it said before."""
    protocol = re.search(r"pickle protocol (\d+)", " ".join(warned))
    if protocol and "Unsupported operand" in refused:
        return CheckpointError(
            f"{path}: has pickle protocol {protocol[1]}, which torch's tensors-only reader cannot "
            "read; save it again where it was trained, with torch.save's default protocol or as "
            ".safetensors"
        )
    found = re.search(r"GLOBAL (\S+)", refused)
    what = found[1] if found else "objects that are not tensors"
    return CheckpointError(
        f"{path}: wants to run code ({what}), which Phalanx never does; save only the state "
        "dict where it was trained, preferably as .safetensors"
    )


def _check_magic_bytes(path: Path) -> None:
    """Refuse what torch never wrote, such as a web page that was saved under the name."""
    with path.open("rb") as file:
        first = file.read(16)
    if not first.startswith(_MAGIC_BYTES):
        found = f"it begins with {first!r}" if first else "it is empty"
        raise CheckpointError(f"{path}: is not a file of torch weights, {found}; download it again")


def _find_state_dict(content: Any) -> dict[str, Tensor]:
    """The state dict among what a training script saved; empty where there is none."""
    if not isinstance(content, Mapping):
        return {}
    for wrapper in _STATE_DICT_KEYS:
        if isinstance(content.get(wrapper), Mapping):
            return _find_state_dict(content[wrapper])
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _find_wrappers(tensors: Mapping[str, Tensor], wanted: Collection[str]) -> list[str]:
    """What stands before the most names of the model: `model.`, `module.backbone.`, or nothing."""
    under: Counter[str] = Counter()  # by what names begin with: how many do
    known: Counter[str] = Counter()  # ... and how many of these go on with a name of the model
    for name in tensors:
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))):
            rest = name[start:]
            under[name[:start]] += 1
            known[name[:start]] += rest in wanted or _to_timm_name(rest) in wanted
    most = max((known[p] for p in known if under[p] >= _LEAST_WRAPPED * len(tensors)), default=0)
    if known[""] == most:
        return [""]
    return [p for p in known if known[p] == most and under[p] >= _LEAST_WRAPPED * len(tensors)]


def _unwrap(
    tensors: Mapping[str, Tensor], wrapper: str, wanted: Collection[str]
) -> dict[str, Tensor]:
    """The tensors inside a wrapper, by the names they have there.

    What is outside of it, such as another head or a loss, is none of the network's, unless the
    model knows its name.
    """
    outside = {n: t for n, t in tensors.items() if not n.startswith(wrapper) and n in wanted}
    inside = {n.removeprefix(wrapper): t for n, t in tensors.items() if n.startswith(wrapper)}
    return {**outside, **inside}


_FIRST_STAGE = ("conv_dw bn1", "se", "conv_pw bn2")  # torchvision's EfficientNet, stage by stage
_LATER_STAGES = ("conv_pw bn1", "conv_dw bn2", "se", "conv_pwl bn3")
_TORCHVISION_NAMES = {
    "features.0.0": "conv_stem",
    "features.0.1": "bn1",
    "features.8.0": "conv_head",
    "features.8.1": "bn2",
    "classifier.1": "classifier",
}
_TORCHVISION_BLOCK = re.compile(r"features\.(\d)\.(\d+)\.block\.(\d)\.(0|1|fc1|fc2)\.(\w+)")
_SQUEEZE = {"fc1": "conv_reduce", "fc2": "conv_expand"}


def to_timm_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchvision's EfficientNet under timm's names; everything else as it is."""
    if "features.0.0.weight" not in tensors:
        return tensors
    return {_to_timm_name(name): tensor for name, tensor in tensors.items()}


def _to_timm_name(name: str) -> str:
    """timm's name for one of torchvision's EfficientNet; what is none of its names stays."""
    match = _TORCHVISION_BLOCK.fullmatch(name)
    if match is None:
        path, _, leaf = name.rpartition(".")
        return f"{_TORCHVISION_NAMES.get(path, path)}.{leaf}"
    stage, index, step, part, leaf = match.groups()
    steps = _FIRST_STAGE if stage == "1" else _LATER_STAGES
    modules = steps[int(step)] if int(step) < len(steps) else ""
    if (modules == "se") != (part in _SQUEEZE):
        return name  # another network with names like these
    inner = f"se.{_SQUEEZE[part]}" if part in _SQUEEZE else modules.split()[int(part)]
    return f"blocks.{int(stage) - 1}.{index}.{inner}.{leaf}"


def load_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], *, where: str, skip: str = ""
) -> None:
    """Copy tensors into a model; names and shapes must be its own.

    skip: a module's path whose weights stay as they are, whatever the tensors hold.
    """

    def without_skipped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: t for n, t in tensors.items() if not (skip and n.startswith(f"{skip}."))}

    found = without_skipped(tensors)
    problems = find_mismatches(without_skipped(model.state_dict()), found)
    if problems:
        raise CheckpointError("\n  ".join([f"{where}: does not fit the model", *problems]))
    model.load_state_dict(found, strict=False)


def find_mismatches(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    """Why tensors cannot be a model's: by kind, a few names and shapes of either side."""
    both = [name for name in expected if name in tensors]
    shapes = {n: (tuple(tensors[n].shape), tuple(expected[n].shape)) for n in both}
    kinds = {
        "not in the file": [
            f"{name} {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name not in tensors and not name.endswith(_COUNTER)
        ],
        "not in the model": [
            f"{name} {tuple(tensor.shape)}"
            for name, tensor in tensors.items()
            if name not in expected
        ],
        "other shapes": [
            f"{name} is {theirs} in the file, {ours} in the model"
            for name, (theirs, ours) in shapes.items()
            if theirs != ours
        ],
        "no plain numbers": [
            f"{name} ({tensors[name].dtype}, {tensors[name].layout})"
            for name in both
            if tensors[name].layout != torch.strided
            or tensors[name].is_meta
            or tensors[name].is_complex()
        ],
    }
    return [f"{kind}: {format_some(items, _SHOWN)}" for kind, items in kinds.items() if items]
