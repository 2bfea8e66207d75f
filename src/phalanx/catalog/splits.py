"""Every name a pipeline split may have: ours, torchvision's, timm's, and those of older programs.

A split names the first thing of the next stage, and a stage starts only where a unit does. A name
that points inside a unit therefore moves to the next unit, and the answer says so.

A new spelling is a row of SPELLINGS, with fields in place of numbers. It is written out for every
block of a model: a name is looked up among these, and mistakes are answered with them. Lists of
words are strings with spaces.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from phalanx.catalog.efficientnets import EfficientNetVariant, inverted_blocks_of
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Variant
from phalanx.errors import ConfigError

_NEAR = 3


@dataclass(frozen=True)
class Split:
    """Where a stage starts, and why not where its name points."""

    name: str  # as it was written
    unit: str  # the unit the next stage starts at
    shifted: str  # "" or one sentence


class _SplitTarget(NamedTuple):
    """What a name points to."""

    unit: str
    begins: bool  # it is the first thing of the unit, not something inside


@dataclass(frozen=True)
class _Spelling:
    """One way to name blocks and what is inside them."""

    form: str  # with the fields of FIELDS
    words: str = ""  # what may follow the block's name
    joint: str = "/"  # what stands before a word
    stage_from: int = 0  # number of the first stage
    block_from: int = 0  # number of a stage's first block

    @property
    def pattern(self) -> re.Pattern[str]:
        """What names of this form look like, in any model."""
        form = self.form
        for field, digits in _FIELDS.items():
            form = form.replace(f"{{{field}}}", f"(?P<{field}>{digits})")
        tails = "|".join(re.escape(self.joint + word) for word in self.words.split())
        return re.compile(f"{form}(?P<tail>{tails})?")


class _BlockKind(NamedTuple):
    """A kind of block, told from others of its family by its count of norms."""

    first: str = ""  # words for its first thing: a convolution, or the shortcut's projection
    missing: str = ""  # words for what only other kinds have


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
        _Spelling("layer{stage}/{block}", _TORCH_WORDS, stage_from=1),
        _Spelling("layer{stage}/block{block}", "conv bn relu", stage_from=1),
        _Spelling("layer{stage}", "conv bn relu", stage_from=1),
        _Spelling("b{stage}/{block}", "relu", stage_from=1),
        _Spelling("b{stage}", stage_from=1),
        _Spelling("stage{stage}/unit{block}", "relu", stage_from=1, block_from=1),
        _Spelling("stage{stage}", stage_from=1),
        _Spelling("conv{stage}_block{block}", _KERAS_WORDS, "_", stage_from=2, block_from=1),
    ),
    "ResNet-9": (
        _Spelling("layer{stage}/{block}", "conv1 bn1 act1 pool conv2 bn2 act2", stage_from=1),
        _Spelling("layer{stage}", stage_from=1),
    ),
    "EfficientNet": (
        _Spelling("blocks/{stage}/{block}", _TIMM_WORDS),
        _Spelling("blocks/{stage}"),
        _Spelling("_blocks/{flat}", _UNDERSCORE_WORDS),
        _Spelling("block{stage}{letter}", "b SE c", stage_from=1),
        _Spelling("block{stage}", stage_from=1),
    ),
}

_RESIDUAL_FIRST = (
    "conv conv1 0_conv 1_conv layer1_conv layer1_conv_ds shortcut "
    "downsample downsample/0 downsample_0"
)
_KINDS: dict[tuple[str, int], _BlockKind] = {  # by family and count of norms
    ("ResNet", 2): _BlockKind(_RESIDUAL_FIRST, missing="conv3 bn3 act3 3_conv 3_bn 3_gn 3_relu"),
    ("ResNet", 3): _BlockKind(_RESIDUAL_FIRST),
    ("ResNet-9", 1): _BlockKind("conv1", missing="conv2 bn2 act2"),
    ("ResNet-9", 2): _BlockKind("conv1", missing="pool"),
    # the first stage does not widen: it begins with the filter, and conv_pw narrows
    ("EfficientNet", 2): _BlockKind(
        "conv_dw _depthwise_conv b", missing="act2 conv_pwl bn3 _expand_conv _bn0"
    ),
    ("EfficientNet", 3): _BlockKind("conv_pw _expand_conv"),
}

_ENDS: dict[str, dict[str, tuple[str, str]]] = {  # words for the first thing, words for the rest
    "ResNet": {
        "stem": (
            "layer0 b0 stage0 conv1 conv1_pad conv1_conv",
            "bn1 act1 relu maxpool conv1_bn conv1_gn conv1_relu pool1_pad pool1_pool",
        ),
        "head": ("global_pool avgpool avg_pool reduce_mean", "drop fc fc1 fc_layer predictions"),
    },
    "ResNet-9": {"stem": ("layer0 conv1", "bn1 act1"), "head": ("global_pool", "drop fc scale")},
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
    'b3/0/relu lies inside layer3/0; the stage starts at layer3/1'
    """
    known = names_of(variant)
    path = name if name in known else name.replace(".", "/")
    if path not in known:
        reason = _outside(variant, path, model=model) or _unheard(path, known, model=model)
        reason = reason.replace("/", ".") if "." in name and "/" not in name else reason
        raise ConfigError(f"--pipeline-splits: {reason}")
    place = known[path]
    if place.begins:
        return Split(name, place.unit, "")
    return _moved(variant, name, inside=place.unit)


def _moved(variant: Variant, name: str, *, inside: str) -> Split:
    """A split at the next boundary after the unit its name lies in, if there is one."""
    following = variant.units[variant.units.index(inside) + 1 :]
    if not following:
        last = f"{name} lies inside {inside}, after which there is no boundary"
        return Split(name, inside, f"{last}; the stage starts at {inside}")
    unit = following[0]
    return Split(name, unit, f"{name} lies inside {inside}; the stage starts at {unit}")


def names_of(variant: Variant) -> dict[str, _SplitTarget]:
    """Everything a split of this model may be called; of other families, units and stages."""
    found = {unit: _SplitTarget(unit, True) for unit in variant.units}
    for stage, units in _stages_of(variant).items():
        found.setdefault(stage, _SplitTarget(units[0], True))
    for unit, (first, inside) in _ENDS.get(variant.family, {}).items():
        found |= {word: _SplitTarget(unit, True) for word in first.split()}
        found |= {word: _SplitTarget(unit, False) for word in inside.split()}
    for spelling in SPELLINGS.get(variant.family, ()):
        for name, place in spelled(variant, spelling):
            found.setdefault(name, place)  # a name without a block is its stage's first
    for number, unit in enumerate(adding_units(variant)):
        traced = (f"add_{number}", f"add/{number}") if number else ("add",)
        found |= dict.fromkeys(traced, _SplitTarget(unit, False))
    return found


def _stage_of(unit: str) -> str:
    """What comes before a unit's last number; a unit without one is its own stage."""
    return unit.rpartition("/")[0] or unit


def _stages_of(variant: Variant) -> dict[str, list[str]]:
    """The units of every stage that has numbered ones."""
    found: dict[str, list[str]] = {}
    for unit in variant.units:
        if _stage_of(unit) != unit:
            found.setdefault(_stage_of(unit), []).append(unit)
    return found


def spelled(variant: Variant, spelling: _Spelling) -> Iterator[tuple[str, _SplitTarget]]:
    """All names that a spelling has for the blocks of a model and what is inside them."""
    norms = Counter(path.rpartition(".")[0].replace(".", "/") for path in variant.norm_channels())
    flat = 0
    for stage, units in enumerate(_stages_of(variant).values(), start=spelling.stage_from):
        for index, unit in enumerate(units):
            block, letter = index + spelling.block_from, chr(ord("a") + index)
            name = spelling.form.format(stage=stage, block=block, flat=flat, letter=letter)
            yield name, _SplitTarget(unit, True)
            kind = _KINDS.get((variant.family, norms[unit]), _BlockKind())
            first, missing = kind.first.split(), kind.missing.split()
            for word in (word for word in spelling.words.split() if word not in missing):
                yield f"{name}{spelling.joint}{word}", _SplitTarget(unit, word in first)
            flat += 1


def adding_units(variant: Variant) -> list[str]:
    """The blocks that add their input: a traced graph numbers these additions."""
    if isinstance(variant, EfficientNetVariant):
        return [block.unit for block in inverted_blocks_of(variant) if block.skips]
    if isinstance(variant, ResNetVariant):
        return [unit for units in _stages_of(variant).values() for unit in units]
    return []


def _outside(variant: Variant, path: str, *, model: str) -> str | None:
    """What to say of a name of a known form whose numbers the model does not have."""
    for spelling in SPELLINGS.get(variant.family, ()):
        pattern = spelling.pattern
        asked = pattern.fullmatch(path)
        if asked is None:
            continue
        alike = [
            (name.groupdict().get("stage"), name[0], place.unit)
            for text, place in spelled(variant, spelling)
            if (name := pattern.fullmatch(text)) and name["tail"] == asked["tail"]
        ]
        stage = asked.groupdict().get("stage")
        siblings = [(name, unit) for number, name, unit in alike if stage and number == stage]
        if siblings:
            (first, unit), (last, _) = siblings[0], siblings[-1]
            return f"{model} has no {path!r}; {_stage_of(unit)} has {_reach(first, last)}"
        if alike:
            return f"{model} has no {path!r}; it has {_reach(alike[0][1], alike[-1][1])}"
    return None


def _reach(first: str, last: str) -> str:
    """A row of names by its two ends."""
    return first if first == last else f"{first} to {last}"


def _unheard(path: str, known: dict[str, _SplitTarget], *, model: str) -> str:
    """What to say of a name of no known form."""
    near = get_close_matches(path, known, n=_NEAR)
    parts = dict.fromkeys(_stage_of(place.unit) for place in known.values())
    way_out = f"near it: {', '.join(near)}" if near else f"it has {', '.join(parts)}"
    return f"no part of {model} is called {path!r}; {way_out}"
