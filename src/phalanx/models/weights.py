"""Weights from elsewhere: read without running code, renamed to timm's names, checked by name."""

import pickle
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.errors import CheckpointError

NORM_LAYOUT_KEY = "norm-layout"  # in a file's metadata; see Norm.layout
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")  # where scripts put them
_PREFIXES = ("module.", "_orig_mod.")  # left by DistributedDataParallel and torch.compile
_COUNTER = "num_batches_tracked"  # older files have none; nothing depends on it
_MAGIC_BYTES = (b"PK\x03\x04", b"\x80")  # a zip archive, or the pickle of older versions
_SHOWN = 3
# what torch's reader raises for a file that is cut short or is something else
_BROKEN = (RuntimeError, OSError, ValueError, LookupError, AssertionError, EOFError, struct.error)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pth file, under timm's names."""
    read = _read_safetensors if path.suffix == ".safetensors" else _read_pickled
    return to_timm_names({_without_prefixes(name): tensor for name, tensor in read(path).items()})


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: is not a whole safetensors file: {error}; fetch it again"
        ) from error


def read_norm_layout(path: Path) -> str:
    """How the group norms of a file's model group their channels."""
    if path.suffix != ".safetensors":
        return "contiguous"
    with safe_open(path, framework="pt") as file:
        return str((file.metadata() or {}).get(NORM_LAYOUT_KEY, "contiguous"))


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """The state dict of a .pth file, by torch's reader that takes tensors alone."""
    _check_magic_bytes(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else "objects that are no tensors"
        raise CheckpointError(
            f"{path}: wants to run code ({what}), which Phalanx never does; where it comes from, "
            "save the state dict alone, best as .safetensors"
        ) from error
    except _BROKEN as error:
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: is a TorchScript program, which Phalanx does not run; where it comes "
                "from, save the state dict alone, best as .safetensors"
            ) from error
        raise CheckpointError(f"{path}: is cut short or damaged; fetch it again") from error
    tensors = _find_state_dict(content)
    if not tensors:
        raise CheckpointError(f"{path}: holds no weights, only a {type(content).__name__}")
    return tensors


def _check_magic_bytes(path: Path) -> None:
    """Refuse what torch never wrote, such as a web page that was saved under the name."""
    with path.open("rb") as file:
        first = file.read(16)
    if not first.startswith(_MAGIC_BYTES):
        found = f"it begins with {first!r}" if first else "it is empty"
        raise CheckpointError(f"{path}: is not a file of torch weights, {found}; fetch it again")


def _find_state_dict(content: Any) -> dict[str, Tensor]:
    """The state dict among what a training script saved; empty where there is none."""
    if not isinstance(content, Mapping):
        return {}
    for wrapper in _STATE_DICT_KEYS:
        if isinstance(content.get(wrapper), Mapping):
            return _find_state_dict(content[wrapper])
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _without_prefixes(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    return name


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
    problems = sorted(find_mismatches(without_skipped(model.state_dict()), found))
    if problems:
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"{where}: {'; '.join(problems[:_SHOWN])}{more}")
    model.load_state_dict(found, strict=False)


def find_mismatches(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    """Why tensors cannot be a model's, one reason each."""
    for name in wanted.keys() - found.keys():
        if not name.endswith(_COUNTER):
            yield f"{name} is missing"
    for name in found.keys() - wanted.keys():
        yield f"{name} is not of this model"
    for name in wanted.keys() & found.keys():
        if found[name].shape != wanted[name].shape:
            has, wants = tuple(found[name].shape), tuple(wanted[name].shape)
            yield f"{name} is {has}, the model wants {wants}"
        elif found[name].layout != torch.strided or found[name].is_meta or found[name].is_complex():
            yield f"{name} holds no plain numbers ({found[name].dtype}, {found[name].layout})"
