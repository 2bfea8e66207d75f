"""Which network a file of old weights is: names and shapes against those of every model."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Norm, Variant
from phalanx.errors import CheckpointError
from phalanx.port_weights.model_layers import COUNTER, Layer, Shape, has_layers, iterate_layers
from phalanx.port_weights.naming import Naming, permute_shape

Array = NDArray[np.generic]
_OUTSIDE = "not a part of the network"
_PADDED_CHANNELS = 4  # images had a fourth channel of zeros, which hardware liked better


@dataclass(frozen=True)
class _Counterpart:
    """The tensor of the model that one of the file belongs to."""

    name: str
    shape: Shape
    layout: str  # of the file's: a row of naming.LAYOUTS
    folded: bool = False  # a bias before a batch norm, whose mean takes it up


@dataclass(frozen=True, kw_only=True)
class ModelMatch:
    """One model against one file: what is used, and what is not."""

    model: str
    variant: Variant
    classes: int
    naming: Naming
    used: dict[str, _Counterpart] = field(default_factory=dict)  # by the file's name
    missing: dict[str, Shape] = field(default_factory=dict)  # by the model's name
    misshapen: dict[str, str] = field(default_factory=dict)  # by the file's name, what is wrong
    left_over: dict[str, str] = field(default_factory=dict)  # by the file's name, what it is

    @property
    def unexpected(self) -> list[str]:
        """What is left over although it should be a weight of this network."""
        return [name for name, reason in self.left_over.items() if not reason]

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of both has its counterpart."""
        return not (self.missing or self.misshapen or self.unexpected)

    @property
    def similarity(self) -> float:
        """How much of both is the same, from 0 to 1."""
        wrong = len(self.missing) + len(self.misshapen) + len(self.unexpected)
        return len(self.used) / max(len(self.used) + wrong, 1)


@dataclass(frozen=True)
class _NamedArrays:
    """The arrays of a file, found by the layers of a model."""

    arrays: Mapping[str, Array]
    naming: Naming
    prefix: str  # before every name, such as `all/` or `model.`

    def find_name(self, layer: Layer, tensor: str, norm: str) -> str | None:
        """What a layer's tensor is called in the file; None where it is not there."""
        own = self.naming.name_tensor(layer, tensor, norm)
        name = self.prefix + own
        return name if own and name in self.arrays else None

    def find_shape(self, layer: Layer, norm: str) -> Shape | None:
        """The shape of a layer's weight, laid out as ours."""
        name = self.find_name(layer, "weight", norm)
        layout = self.naming.find_layout(layer, "weight")
        return permute_shape(self.arrays[name].shape, layout) if name else None


def match_models(
    arrays: Mapping[str, Array], namings: tuple[Naming, ...], *, where: str
) -> list[ModelMatch]:
    """Every model of a family whose names the arrays have, the best match first."""
    matches = []
    for naming in namings:
        prefix = _find_prefix(arrays, naming, where=where)
        if prefix is not None:
            source = _NamedArrays(arrays, naming, prefix)
            matches += [_match_model(name, source) for name in _find_family(naming.family)]
    return sorted(matches, key=lambda match: (not match.is_complete, -match.similarity))


def _find_family(family: str) -> list[str]:
    """The models of a family."""
    return [name for name, v in MODELS.items() if has_layers(v) and v.family == family]


def _find_prefix(arrays: Mapping[str, Array], naming: Naming, *, where: str) -> str | None:
    """What stands before every name; None where the names are others.

    The stem's convolution and the first one of the first block are in every size of a family.
    """
    variant = MODELS[_find_family(naming.family)[0]]
    convs = [layer for layer in iterate_layers(variant, 1) if layer.kind == "conv"]
    first, second = (naming.name_tensor(conv, "weight", "none") for conv in convs[:2])
    found = [
        name.removesuffix(first)
        for name in arrays
        if name.endswith(first) and name.removesuffix(first) + second in arrays
    ]
    whole = [prefix for prefix in found if not prefix or prefix.endswith(naming.separator)]
    if len(whole) > 1:
        places = " and in ".join(prefix or "the file itself" for prefix in whole)
        raise CheckpointError(
            f"{where}: holds the network more than once, in {places}; save one of them alone"
        )
    return whole[0] if whole else None


# --- what the file says of the network's options ---


def _infer_options(variant: Variant, source: _NamedArrays) -> Variant:
    """The variant with those options that the names and shapes of the file show."""
    variant = replace(variant, norm=Norm(type=_find_norm_type(variant, source)))
    if isinstance(variant, ResNetVariant):
        return _infer_shortcuts(variant, source)
    if isinstance(variant, EfficientNetVariant):
        return _infer_widths(variant, source)
    return variant


def _find_norm_type(variant: Variant, source: _NamedArrays) -> str:
    """batch where there are running statistics, group where there are weights alone, else none."""
    for norm, tensor in (("batch", "running_mean"), ("group", "weight")):
        layers = iterate_layers(replace(variant, norm=Norm(type=norm)), 1)
        stem = next(layer for layer in layers if layer.kind == "norm")
        if source.find_name(stem, tensor, norm):
            return norm
    return "none"


def _infer_shortcuts(variant: ResNetVariant, source: _NamedArrays) -> ResNetVariant:
    """By where the file has projections: nowhere, where shapes change, or in other blocks too."""
    projects = {
        (layer.stage, layer.index)
        for layer in iterate_layers(replace(variant, shortcut="C"), 1)
        if layer.part == "projection" and source.find_name(layer, "weight", variant.norm.type)
    }
    shortcut = "C" if any(index for _, index in projects) else "B" if projects else "A"
    plain = replace(variant, shortcut=shortcut)
    also_first = (1, 0) in projects and not plain.projects(plain.blocks[0])
    return replace(plain, project_first=also_first)


def _infer_widths(variant: EfficientNetVariant, source: _NamedArrays) -> EfficientNetVariant:
    """By the shapes that most blocks have."""
    ratios: Counter[int] = Counter()
    group_dims: Counter[int] = Counter()
    for layer in iterate_layers(variant, 1):
        shape = source.find_shape(layer, variant.norm.type)
        if layer.kind == "conv" and shape and len(shape) == 4 and 0 not in shape:
            ratios.update([shape[0] // shape[1]] * (layer.part == "expand"))
            group_dims.update([shape[1]] * (layer.part == "depthwise"))
    return replace(
        variant,
        expand_ratio=max(1, ratios.most_common(1)[0][0]) if ratios else variant.expand_ratio,
        group_dim=group_dims.most_common(1)[0][0] if group_dims else variant.group_dim,
    )


# --- tensor by tensor ---


def _match_model(name: str, source: _NamedArrays) -> ModelMatch:
    """Look for every tensor of the model in the file, and for every one of the file in it."""
    variant = _infer_options(MODELS[name], source)
    *_, head = iterate_layers(variant, variant.classes)
    shape = source.find_shape(head, variant.norm.type)
    classes = shape[0] if shape else variant.classes
    match = ModelMatch(model=name, variant=variant, classes=classes, naming=source.naming)
    for layer in iterate_layers(variant, classes):
        for tensor in layer.shapes:
            _match_tensor(match, source, layer=layer, tensor=tensor)
        match.used.update(_fold_bias(layer, source, norm=variant.norm.type))
    for old in source.arrays:
        if old not in match.used and old not in match.misshapen:
            match.left_over[old] = _explain_leftover(old, source)
    return match


def _match_tensor(match: ModelMatch, source: _NamedArrays, *, layer: Layer, tensor: str) -> None:
    """Note where one tensor of the model is in the file, or why it is not."""
    shape, ours = layer.shapes[tensor], f"{layer.path}.{tensor}"
    old = source.find_name(layer, tensor, match.variant.norm.type)
    if old is None:
        if tensor != COUNTER:  # nothing depends on it
            match.missing[ours] = shape
        return
    layout = source.naming.find_layout(layer, tensor)
    found = permute_shape(source.arrays[old].shape, layout)
    if _is_same_shape(found, shape, is_stem=(layer.kind, layer.part) == ("conv", "stem")):
        match.used[old] = _Counterpart(ours, shape, layout)
    else:
        match.misshapen[old] = f"{found} in the file, {ours} is {shape}"


def _is_same_shape(found: Shape, wanted: Shape, *, is_stem: bool) -> bool:
    """Whether the shapes agree, but for the channel of zeros that a stem may have been given."""
    if is_stem and found[1:2] == (_PADDED_CHANNELS,) and len(found) == len(wanted) == 4:
        return (found[0], *found[2:]) == (wanted[0], *wanted[2:])
    return found == wanted


def _fold_bias(
    layer: Layer, source: _NamedArrays, *, norm: str
) -> Iterator[tuple[str, _Counterpart]]:
    """A convolution's bias where ours has none, because a batch norm behind it takes it away."""
    if norm == "batch" and layer.norm_after and "bias" not in layer.shapes:
        old, shape = source.find_name(layer, "bias", norm), (layer.channels,)
        if old and source.arrays[old].shape == shape:
            yield old, _Counterpart(f"{layer.norm_after}.running_mean", shape, "same", folded=True)


def _explain_leftover(name: str, source: _NamedArrays) -> str:
    """What a tensor without a place in the model is; empty for what should have one."""
    for pattern, reason in source.naming.ignored.items():
        if re.search(pattern, name):
            return reason
    return "" if name.startswith(source.prefix) else _OUTSIDE
