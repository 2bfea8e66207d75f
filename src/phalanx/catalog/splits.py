"""Every name a pipeline split may have: ours, torchvision's, timm's, and those of older programs.

A split names the first layer of the next stage, and a stage can start only where a unit does. A
name that points inside a unit therefore means the next unit, and a note says so.

A new spelling is a row of SPELLINGS, with fields in place of numbers. It is expanded for every
block of a model: names are looked up among the results, which are also the suggestions for unknown
names. Lists of words are strings with spaces.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError

_SUGGESTIONS = 3


@dataclass(frozen=True)
class Split:
    """Where a stage starts, and why not where its name points, if so."""

    name: str  # as it was written
    unit: str  # the unit at which the next stage starts
    shifted: str  # "" or one sentence


class _SplitTarget(NamedTuple):
    """What a name points to."""

    unit: str
    is_first: bool  # the first layer of the unit, not one inside


@dataclass(frozen=True)
class _Spelling:
    """One way to name blocks and what is inside them."""

    template: str  # with the fields of _FIELDS
    words: str = ""  # that may follow the block's name
    separator: str = "/"  # before a word
    first_stage: int = 0  # number of the first stage
    first_block: int = 0  # number of a stage's first block

    @property
    def pattern(self) -> re.Pattern[str]:
        """A pattern for names of this form, in any model."""
        pattern = self.template
        for field, digits in _FIELDS.items():
            pattern = pattern.replace(f"{{{field}}}", f"(?P<{field}>{digits})")
        tails = "|".join(re.escape(self.separator + word) for word in self.words.split())
        return re.compile(f"{pattern}(?P<tail>{tails})?")


class _BlockKind(NamedTuple):
    """A kind of block, identified within its family by its number of norms."""

    first: str = ""  # words for its first layer: a convolution, or the shortcut's projection
    missing: str = ""  # words for layers that only other kinds have


_FIELDS = {"stage": r"\d+", "block": r"\d+", "flat": r"\d+", "letter": "[a-z]"}

_TORCH_WORDS = (
    "conv1 bn1 act1 conv2 bn2 act2 conv3 bn3 act3 relu "
    "downsample downsample/0 downsample/1 downsample_0 downsample_1"
)
_KERAS_WORDS = (
    "0_conv 0_bn 0_gn 0_relu 1_conv 1_bn 1_gn 1_relu 2_conv 2_bn 2_gn 2_relu "
    "3_conv 3_bn 3_gn 3_relu add out "
    "layer1_conv layer1_conv_ds layer1_bn layer1_gn layer1_relu "
    "layer2_conv layer2_conv_ds layer2_bn layer2_gn layer2_relu shortcut post_addition_relu"
)
_TIMM_WORDS = (
    "conv_pw bn1 act1 conv_dw bn2 act2 se se/conv_reduce se/act1 se/conv_expand conv_pwl bn3"
)
_UNDERSCORE_WORDS = (  # of the package efficientnet_pytorch
    "_expand_conv _bn0 _depthwise_conv _bn1 _se_reduce _se_expand _project_conv _bn2"
)

SPELLINGS: dict[str, tuple[_Spelling, ...]] = {
    "ResNet": (
        _Spelling("layer{stage}/{block}", _TORCH_WORDS, first_stage=1),
        _Spelling("layer{stage}/block{block}", "conv bn relu", first_stage=1),
        _Spelling("layer{stage}", "conv bn relu", first_stage=1),
        _Spelling("b{stage}/{block}", "relu", first_stage=1),
        _Spelling("b{stage}", first_stage=1),
        _Spelling("stage{stage}/unit{block}", "relu", first_stage=1, first_block=1),
        _Spelling("stage{stage}", first_stage=1),
        _Spelling("conv{stage}_block{block}", _KERAS_WORDS, "_", first_stage=2, first_block=1),
    ),
    "ResNet-9": (
        _Spelling("layer{stage}/{block}", "conv1 bn1 act1 pool conv2 bn2 act2", first_stage=1),
        _Spelling("layer{stage}", first_stage=1),
    ),
    "airbench": (
        _Spelling("layer{stage}/{block}", "conv1 pool bn1 act1 conv2 bn2 act2", first_stage=1),
        _Spelling("layer{stage}", first_stage=1),
    ),
    "EfficientNet": (
        _Spelling("blocks/{stage}/{block}", _TIMM_WORDS),
        _Spelling("blocks/{stage}"),
        _Spelling("_blocks/{flat}", _UNDERSCORE_WORDS),
        _Spelling("block{stage}{letter}", "b SE c", first_stage=1),
        _Spelling("block{stage}", first_stage=1),
    ),
}

_RESIDUAL_FIRST = (
    "conv conv1 0_conv 1_conv layer1_conv layer1_conv_ds shortcut "
    "downsample downsample/0 downsample_0"
)
_BLOCK_KINDS: dict[tuple[str, int], _BlockKind] = {  # by family and number of norms
    ("ResNet", 2): _BlockKind(_RESIDUAL_FIRST, missing="conv3 bn3 act3 3_conv 3_bn 3_gn 3_relu"),
    ("ResNet", 3): _BlockKind(_RESIDUAL_FIRST),
    ("ResNet-9", 1): _BlockKind("conv1", missing="conv2 bn2 act2"),
    ("ResNet-9", 2): _BlockKind("conv1", missing="pool"),
    ("airbench", 2): _BlockKind("conv1"),
    # the first stage has no expansion: it begins with the depthwise convolution; conv_pw projects
    ("EfficientNet", 2): _BlockKind(
        "conv_dw _depthwise_conv b", missing="act2 conv_pwl bn3 _expand_conv _bn0"
    ),
    ("EfficientNet", 3): _BlockKind("conv_pw _expand_conv"),
}

# words for the first layer of a unit, and for the others
_STEM_AND_HEAD: dict[str, dict[str, tuple[str, str]]] = {
    "ResNet": {
        "stem": (
            "layer0 b0 stage0 conv1 conv1_pad conv1_conv",
            "bn1 act1 relu maxpool conv1_bn conv1_gn conv1_relu pool1_pad pool1_pool",
        ),
        "head": ("global_pool avgpool avg_pool reduce_mean", "drop fc fc1 fc_layer predictions"),
    },
    "ResNet-9": {"stem": ("layer0 conv1", "bn1 act1"), "head": ("global_pool", "drop fc scale")},
    "airbench": {"stem": ("layer0 whitening", "act1"), "head": ("global_pool", "drop fc scale")},
    "EfficientNet": {
        "stem": ("block0 conv_stem _conv_stem", "bn1 act1 _bn0"),
        "head": (
            "conv_head _conv_head Top",
            "bn2 act2 _bn1 global_pool avgpool avg_pool reduce_mean drop classifier fc fc1 _fc",
        ),
    },
}


def find_split(variant: Variant, name: str, *, model: str) -> Split:
    """The unit a split stands for; `model` is what messages call the variant.

    >>> from phalanx.catalog.models import MODELS
    >>> find_split(MODELS["resnet50"], "b3/0/relu", model="resnet50").shifted
    'b3/0/relu is inside layer3/0; the stage starts at layer3/1'
    """
    known = list_split_names(variant)
    path = name if name in known else name.replace(".", "/")
    if path not in known:
        reason = _describe_unknown_number(variant, path, model=model)
        reason = reason or _describe_unknown_name(path, known, model=model)
        reason = reason.replace("/", ".") if "." in name and "/" not in name else reason
        raise ConfigError(f"--pipeline-splits: {reason}")
    inside, is_first = known[path]
    if is_first:
        return Split(name, inside, "")
    following = variant.units[variant.units.index(inside) + 1 :]
    if not following:
        last = f"{name} is inside {inside}, after which there is no boundary"
        return Split(name, inside, f"{last}; the stage starts at {inside}")
    unit = following[0]
    return Split(name, unit, f"{name} is inside {inside}; the stage starts at {unit}")


def list_split_names(variant: Variant) -> dict[str, _SplitTarget]:
    """All names of splits of this model; for other families, units and stages only."""
    names = {unit: _SplitTarget(unit, True) for unit in variant.units}
    for stage, units in _group_by_stage(variant).items():
        names.setdefault(stage, _SplitTarget(units[0], True))
    for unit, (first, inside) in _STEM_AND_HEAD.get(variant.family, {}).items():
        names |= {word: _SplitTarget(unit, True) for word in first.split()}
        names |= {word: _SplitTarget(unit, False) for word in inside.split()}
    for spelling in SPELLINGS.get(variant.family, ()):
        for name, target in expand_spelling(variant, spelling):
            names.setdefault(name, target)  # a name without a block means its stage's first block
    for name, unit in list_traced_additions(variant).items():
        names[name] = _SplitTarget(unit, False)
    return names


def _stage_of(unit: str) -> str:
    """A unit's name without its last number; a unit without a number is its own stage."""
    return unit.rpartition("/")[0] or unit


def _group_by_stage(variant: Variant) -> dict[str, list[str]]:
    """The units of every stage that has numbered units."""
    stages: dict[str, list[str]] = {}
    for unit in variant.units:
        if _stage_of(unit) != unit:
            stages.setdefault(_stage_of(unit), []).append(unit)
    return stages


def expand_spelling(variant: Variant, spelling: _Spelling) -> Iterator[tuple[str, _SplitTarget]]:
    """All names that a spelling gives to the blocks of a model and the layers inside them."""
    norms = Counter(path.rpartition(".")[0].replace(".", "/") for path in variant.norm_channels())
    flat = 0
    for stage, units in enumerate(_group_by_stage(variant).values(), start=spelling.first_stage):
        for index, unit in enumerate(units):
            block, letter = index + spelling.first_block, chr(ord("a") + index)
            name = spelling.template.format(stage=stage, block=block, flat=flat, letter=letter)
            yield name, _SplitTarget(unit, True)
            kind = _BLOCK_KINDS.get((variant.family, norms[unit]), _BlockKind())
            first, missing = kind.first.split(), kind.missing.split()
            for word in (word for word in spelling.words.split() if word not in missing):
                yield f"{name}{spelling.separator}{word}", _SplitTarget(unit, word in first)
            flat += 1


def list_traced_additions(variant: Variant) -> dict[str, str]:
    """The names that a traced graph gives to residual additions, with the unit of each.

    >>> from phalanx.catalog.models import MODELS
    >>> list_traced_additions(MODELS["resnet8"])["add_1"]
    'layer2/0'
    """
    units: list[str] = []
    if isinstance(variant, EfficientNetVariant):
        units = [block.unit for block in variant.blocks if block.skips]
    if isinstance(variant, ResNetVariant):
        units = [block.unit for block in variant.blocks]
    names: dict[str, str] = {}
    for number, unit in enumerate(units):
        names |= dict.fromkeys([f"add_{number}", f"add/{number}"] if number else ["add"], unit)
    return names


def _describe_unknown_number(variant: Variant, path: str, *, model: str) -> str:
    """The error for a name of a known form with numbers that the model does not have; else ""."""
    for spelling in SPELLINGS.get(variant.family, ()):
        pattern = spelling.pattern
        wanted = pattern.fullmatch(path)
        if wanted is None:
            continue
        alike = [
            (name.groupdict().get("stage"), name[0], target.unit)
            for text, target in expand_spelling(variant, spelling)
            if (name := pattern.fullmatch(text)) and name["tail"] == wanted["tail"]
        ]
        stage = wanted.groupdict().get("stage")
        siblings = [(name, unit) for number, name, unit in alike if stage and number == stage]
        if siblings:
            (first, unit), (last, _) = siblings[0], siblings[-1]
            return f"{model} has no {path!r}; {_stage_of(unit)} has {_describe_range(first, last)}"
        if alike:
            return f"{model} has no {path!r}; it has {_describe_range(alike[0][1], alike[-1][1])}"
    return ""


def _describe_range(first: str, last: str) -> str:
    """A range of names, by its two ends."""
    return first if first == last else f"{first} to {last}"


def _describe_unknown_name(path: str, known: dict[str, _SplitTarget], *, model: str) -> str:
    """The error for a name of unknown form."""
    near = get_close_matches(path, known, n=_SUGGESTIONS)
    parts = dict.fromkeys(_stage_of(target.unit) for target in known.values())
    way_out = f"near it: {', '.join(near)}" if near else f"it has {', '.join(parts)}"
    return f"no part of {model} is called {path!r}; {way_out}"
