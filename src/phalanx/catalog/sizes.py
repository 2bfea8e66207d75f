"""How large each model is and what it is in a few words: the rows of `models ls` and its page.

The figures lie in sizes.json, so that they are told without torch. `make docs` counts them anew.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.catalog.resnets import FastResNetVariant, ResNetVariant
from phalanx.catalog.variant import OwnVariant, Variant

SIZES = resources.files("phalanx") / "catalog" / "sizes.json"


@dataclass(frozen=True)
class Size:
    """What a model holds and costs, for its own image size and classes."""

    parameters: int
    macs: int  # multiply-adds of one image


@cache
def load_sizes() -> dict[str, Size]:
    """The sizes of all models that come with Phalanx."""
    text = SIZES.read_text(encoding="utf-8")
    return {name: Size(**row) for name, row in json.loads(text).items()}


def old_names_of(name: str) -> list[str]:
    """What a model was called before."""
    return [old for old, today in OLD_NAMES.items() if today == name]


def about(variant: Variant) -> str:
    """What a model is, in a few words."""
    known = (words for kind, words in _WORDS.items() if isinstance(variant, kind))
    return next(known, lambda _: variant.family)(variant)


def _about_resnet(variant: ResNetVariant) -> str:
    """Its blocks in each stage, and their groups of channels.

    >>> about_resnet(MODELS["resnext29_32x4d"])
    'small bottleneck 3-3-3 32x4'
    """
    parts = [variant.block, "-".join(map(str, variant.depths))]
    parts += [f"{variant.groups}x{variant.group_width}"] * (variant.groups > 1)
    return " ".join(["small"] * (variant.stem == "small") + parts)


def _about_fast_resnet(variant: FastResNetVariant) -> str:
    """Its shape."""
    return f"small, {len(variant.residual)} wide stages"


def _about_efficientnet(variant: EfficientNetVariant) -> str:
    """Its factors.

    >>> about_efficientnet(MODELS["efficientnet_b4"])
    'width 1.4, depth 1.8'
    """
    parts = [f"width {variant.width}, depth {variant.depth}"]
    return ", ".join(parts + ["lite"] * variant.lite + ["small"] * variant.small)


def _about_own(variant: OwnVariant) -> str:
    """Where it comes from."""
    return f"made by {variant.build}"


_WORDS: dict[type[Variant], Callable[[Any], str]] = {
    ResNetVariant: _about_resnet,
    FastResNetVariant: _about_fast_resnet,
    EfficientNetVariant: _about_efficientnet,
    OwnVariant: _about_own,
}


def short(number: int) -> str:
    """A large number in three digits.

    >>> short(25_557_032), short(4_089_184_256), short(75_290), short(640)
    ('25.6 M', '4.09 G', '75.3 k', '640')
    """
    amount, units = float(number), ["", "k", "M", "G", "T", "P"]
    while amount >= 999.5:  # from there on three digits show 1000
        amount, units = amount / 1000, units[1:]
    return f"{amount:#.3g}".rstrip(".") + f" {units[0]}" if units[0] else f"{number}"


_HEAD = """# Models

`phalanx models ls` prints this table, `phalanx models show NAME` the units of one model.

Parameters and MACs are those of the image size and classes in the row. A MAC is one multiplication
with its addition; those of convolutions and linear layers are counted, for one image. A name that
was used before is still accepted wherever a model is named.

3-4-6-3 are the blocks of each stage, 32x4 means 32 groups of 4 channels, and small is a network for
small images, which it does not halve at the start.

This page is written from the tables: `make docs`.
"""
_TABLE_HEAD = """
| model | parameters | MACs | image | classes | what it is | also called |
|---|---:|---:|---:|---:|---|---|
"""


def models_page() -> str:
    """docs/models.md: all models that come with Phalanx, by family."""
    families: dict[str, list[str]] = {}
    for name in load_sizes():
        families.setdefault(MODELS[name].family, []).append(_model_line(name))
    parts = [f"\n## {family}\n{_TABLE_HEAD}{''.join(lines)}" for family, lines in families.items()]
    return _HEAD + "".join(parts)


def _model_line(name: str) -> str:
    """One row of a table."""
    variant, size = MODELS[name], load_sizes()[name]
    cells = (
        f"`{name}`",
        f"{size.parameters:,}",
        short(size.macs),
        f"{variant.image_size}",
        f"{variant.classes:,}",
        about(variant),
        ", ".join(f"`{old}`" for old in old_names_of(name)),
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")
