"""Old weights into a safetensors file that --init-weights takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import NORM_LAYOUT_KEY
from phalanx.config.schema import OPTIONS
from phalanx.disk import convert_out_errors, write_atomically
from phalanx.errors import CheckpointError, ConfigError, suggest
from phalanx.port_weights.match import Array, ModelMatch, match_models
from phalanx.port_weights.model_layers import COUNTER, has_layers, iterate_layers
from phalanx.port_weights.naming import LAYOUTS
from phalanx.port_weights.programs import PROGRAMS, Program
from phalanx.port_weights.read import OldFile, read_old_file
from phalanx.units import format_some

_SHOWN = 3
_SMALL_IMAGE = 64  # pixels
_STORED_OPTIONS = {  # with a .pt file, as the PyTorch program spelt them
    "norm_num_groups": "norm-num-groups",
    "norm_eps": "norm-eps",
    "enable_fast_groupnorm": "enable-fast-groupnorm",
}


@dataclass(frozen=True, kw_only=True)
class PortedWeights:
    """What became of a file."""

    source: Path
    names: str  # whose names it has
    model: str
    classes: int
    options: dict[str, str]  # that make our network the same
    tensors: dict[str, Array]  # under our names
    used: dict[str, str]  # the file's names to ours
    left_over: dict[str, str]  # the file's names, and what they are
    notes: tuple[str, ...]


def port_weights(path: Path, model: str | None) -> PortedWeights:
    """Read old weights and give them our names, layouts and types."""
    file = read_old_file(path)
    match = _choose_match(file, _find_model(model) if model else "")
    program = _find_program(match)
    if file.settings and match.naming.program == "efficientnet_pytorch":
        program = replace(program, eps={})  # that program put norms of its own into the package's
    tensors = _convert_tensors(file.arrays, match)
    known = program.small_notes if _is_small(match) else program.notes
    options, doubts = _find_options(match, program, settings=file.settings)
    return PortedWeights(
        source=path,
        names=match.naming.title,
        model=match.model,
        classes=match.classes,
        options=options,
        tensors=tensors,
        used={old: place.name for old, place in match.used.items()},
        left_over={**match.left_over, **dict.fromkeys(file.others, "no numbers")},
        notes=(*_describe_changes(file, match, tensors=tensors), *doubts, *known),
    )


def write_ported(ported: PortedWeights, out: Path) -> None:
    """Write weights.safetensors, whole or not at all."""
    layout = "interleaved" if "enable-fast-groupnorm" in ported.options else "contiguous"
    metadata = {"format": "pt", NORM_LAYOUT_KEY: layout}
    with convert_out_errors(out, "then run the command again"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, save(dict(ported.tensors), metadata))


# --- which model ---


def _find_model(name: str) -> str:
    """A model's name today; those of older programs are understood."""
    known = OLD_NAMES.get(name, name)
    if known not in MODELS:
        raise ConfigError(f"--model: no model is called {name!r}; {suggest(name, MODELS)}")
    if not has_layers(MODELS[known]):
        raise ConfigError(f"--model {name}: no older program had it; leave --model out")
    return known


def _choose_match(file: OldFile, model: str) -> ModelMatch:
    """The model that has a place for every tensor, and the file a tensor for each of its places."""
    where = str(file.path)
    matches = match_models(file.arrays, file.namings, where=where)
    if file.others and not file.arrays:
        raise CheckpointError(
            f"{where}: holds no numbers, only text or pickled objects, which are not read "
            f"({format_some(sorted(file.others), _SHOWN)}); save the weights as arrays of numbers"
        )
    if not matches:
        some = format_some(sorted(file.arrays), _SHOWN) or "none at all"
        raise CheckpointError(
            f"{where}: these {file.kind} are of no network that older programs had; it holds {some}"
        )
    own = [match for match in matches if match.model == model] if model else matches
    if own and own[0].is_complete:
        return own[0]
    best = matches[0]
    if model and not own:
        problems = [f"{model} is no {best.variant.family}, and the file is"]
    else:
        problems = _describe_misfit(own[0])
    asked = model or f"any model; the nearest is {best.model}"
    way_out = _suggest_model(best, model)
    raise CheckpointError("\n  ".join([f"{where}: does not fit {asked}", *problems, way_out]))


def _suggest_model(best: ModelMatch, model: str) -> str:
    if best.is_complete:
        return f"it fits {best.model}: leave out --model, or give --model {best.model}"
    if any(name.endswith("/proxy") for name in best.left_over):
        return "it was trained with proxy norm, which Phalanx does not have"
    if model and best.model != model:
        return f"the nearest model is {best.model}, where {best.similarity:.0%} of the tensors fit"
    return "is it a network of your own, or a file that was cut? nothing has been written"


def _describe_misfit(match: ModelMatch) -> list[str]:
    """By kind, a few of the tensors that have no counterpart."""
    kinds = {
        "missing in the file": [f"{name} {shape}" for name, shape in match.missing.items()],
        "other shapes": [f"{name} is {text}" for name, text in match.misshapen.items()],
        "left over": match.unexpected,
    }
    return [f"{kind}: {format_some(items, _SHOWN)}" for kind, items in kinds.items() if items]


# --- the tensors ---


def _convert_tensors(arrays: Mapping[str, Array], match: ModelMatch) -> dict[str, Array]:
    """Every tensor of the model, from the file."""
    found: dict[str, Array] = {}
    for old, place in match.used.items():
        order = LAYOUTS[place.layout]
        if not place.folded and not place.name.endswith(COUNTER):
            array = arrays[old].astype(np.float32)
            array = array if order is None else array.transpose(order)
            if len(place.shape) == 4:
                array = array[:, : place.shape[1]]  # a stem's fourth channel only saw zeros
            found[place.name] = np.ascontiguousarray(array)
    for old, place in match.used.items():
        if place.folded:
            exact = found[place.name].astype(np.float64) - arrays[old].astype(np.float64)
            found[place.name] = exact.astype(np.float32)
    for layer in iterate_layers(match.variant, match.classes):
        if COUNTER in layer.shapes:
            found[f"{layer.path}.{COUNTER}"] = np.zeros((), np.int64)
    return found


def _describe_changes(
    file: OldFile, match: ModelMatch, *, tensors: Mapping[str, Array]
) -> list[str]:
    """What was more than another name."""
    notes, arrays = [], file.arrays
    types = {file.types.get(old, arrays[old].dtype.name) for old in match.used}
    types -= {"float32", "int64"}
    if types:
        notes.append(f"{' and '.join(sorted(types))} became float32")
    stems = [
        place.name
        for old, place in match.used.items()
        if len(place.shape) == 4 and place.shape[1] == 3 and 4 in arrays[old].shape[1:3]
    ]
    notes += [f"{name}: its fourth input channel saw only zeros, and is left out" for name in stems]
    folded = sum(place.folded for place in match.used.values())
    if folded:
        notes.append(f"{folded} biases of convolutions went into the means of the norms after them")
    bad = [name for name, array in tensors.items() if not np.isfinite(array).all()]
    if bad:
        notes.append(f"not all values are finite in {format_some(bad, _SHOWN)}")
    return notes


# --- the options that make our network the same ---


def _find_program(match: ModelMatch) -> Program:
    """The program's conventions; a Keras ResNet with biases is keras.applications' own."""
    has_biases = any(place.folded for place in match.used.values())
    own = match.naming.program
    return PROGRAMS["keras_applications" if own == "keras" and has_biases else own]


def _is_small(match: ModelMatch) -> bool:
    """Whether the network is one for the images of CIFAR."""
    return match.variant.image_size <= _SMALL_IMAGE


def _find_options(
    match: ModelMatch, program: Program, *, settings: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """The options of a run that differ from their defaults, and what had to be assumed."""
    variant, norm, doubts = match.variant, match.variant.norm.type, []
    values: dict[str, Any] = {"norm-type": norm, "padding": program.padding}
    values["norm-eps"] = program.eps.get(norm, 1e-5)
    if norm == "group":
        groups = program.small_groups if _is_small(match) else program.groups
        values["norm-num-groups"] = groups
        values["enable-fast-groupnorm"] = program.interleaved
        if "norm_num_groups" not in settings:
            doubts.append(
                f"the file does not say how many groups its norms have: {program.title}'s default "
                f"of {groups} is assumed; else give --norm-num-groups"
            )
    if isinstance(variant, ResNetVariant):
        own = MODELS[match.model]
        assert isinstance(own, ResNetVariant)
        values["stride-in"] = program.stride_in if variant.block == "bottleneck" else "3x3"
        values["stage1-projection"] = variant.project_first
        # a preset may say B; where it is neither, saying it does no harm
        if variant.shortcut != "B" or own.shortcut != "B":
            values["shortcut-type"] = variant.shortcut
    if isinstance(variant, EfficientNetVariant):
        values["efficientnet-group-dim"] = variant.group_dim
        values["efficientnet-expand-ratio"] = variant.expand_ratio
    for theirs, ours in _STORED_OPTIONS.items():
        value = settings.get(theirs)
        if isinstance(value, int | float) and (norm == "group" or ours == "norm-eps"):
            values[ours] = value
    options = {
        name: "" if value is True else str(value)
        for name, value in values.items()
        if value != OPTIONS[name].default
    }
    return options, doubts
