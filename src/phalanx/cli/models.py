"""`phalanx models ls | show`: which models there are, and what each unit of one holds and costs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from phalanx.catalog.models import MODELS, describe_variant, find_old_names, load_sizes
from phalanx.catalog.splits import Split, find_split
from phalanx.catalog.variant import OwnVariant, Variant
from phalanx.cli.command import MODEL_OPTIONS, Argument, Command, ParsedArgs
from phalanx.config.fields import find_model_name
from phalanx.config.read import Settings, merge_layers, read_flags
from phalanx.errors import ConfigError, join_problems, suggest
from phalanx.plan.model import build_variant, check_variant
from phalanx.units import format_bytes, format_si

if TYPE_CHECKING:
    from phalanx.models.count import UnitCount

_OF_WEIGHTS = ("init-weights", "reset-head")  # no figure depends on them
_MOST_CLASSES = 1_000_000
_LIST_HEAD = ("params", "MACs", "px", "classes", "what it is")
_UNIT_HEAD = ("unit", "output", "parameters", "MACs", "activations", "params", "MACs", "activ.")
_FIGURES = {"parameters": "parameters", "macs": "MACs", "activation_bytes": "activations"}


def _ls(request: ParsedArgs) -> int:
    """List the models, or those whose names hold every word."""
    request.refuse_problems()
    request.load_plugins()
    words = request["word"]
    rows = [_facts_of(name) for name in MODELS if _holds(name, words)]
    if not rows:
        told = " and ".join(map(repr, words))
        raise ConfigError(f"no model's name holds {told}; `phalanx models ls` lists all")
    if request["json"]:
        print(json.dumps(rows, indent=2))
        return 0
    _show_list(rows)
    return 0


def _show_list(rows: list[dict[str, Any]]) -> None:
    """The models as a table, family by family."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    heads = [(family, *_LIST_HEAD) for family in families]
    lines = _lined_up([*heads, *map(_list_cells, rows)], left=(0, 5))
    for place, (family, head) in enumerate(zip(families, lines, strict=False)):
        print(f"\n{head}" if place else head)
        for row, line in zip(rows, lines[len(heads) :], strict=True):
            if row["family"] == family:
                print(line)


def _holds(name: str, words: Sequence[str]) -> bool:
    """Whether every word is part of the model's name, or of one that it had before."""
    names = " ".join([name, *find_old_names(name)]).lower()
    return all(word.lower() in names for word in words)


def _facts_of(name: str) -> dict[str, Any]:
    """What is told of a model; a plugin's is counted now."""
    variant = MODELS[name]
    size, units = load_sizes().get(name), len(variant.units)
    if size is None:
        from phalanx.models.count import count_size

        size, units = count_size(variant)
    return {
        "name": name,
        "family": variant.family,
        **asdict(size),
        "image_size": variant.image_size,
        "classes": variant.classes,
        "smallest_image": variant.smallest_image,
        "units": units,
        "old_names": find_old_names(name),
    }


def _list_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A model as a row of the list."""
    return (
        row["name"],
        format_si(row["parameters"]),
        format_si(row["macs"]),
        f"{row['image_size']}",
        f"{row['classes']:,}",
        describe_variant(MODELS[row["name"]]),
    )


def _lined_up(rows: Sequence[tuple[str, ...]], *, left: tuple[int, ...]) -> list[str]:
    """The rows as lines whose columns agree; those in `left` begin alike, the others end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place in left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class _Sheet:
    """A model taken apart, with what it was counted for."""

    name: str
    variant: Variant
    image_size: int
    batch_size: int
    classes: int
    precision: str
    units: "list[UnitCount]"
    splits: list[Split]

    def total(self, figure: str, *, first: int = 0, end: int | None = None) -> int:
        """The sum of a figure over all units, or those from the first until before the end."""
        return sum(getattr(unit, figure) for unit in self.units[first:end])

    def share(self, figure: str, *, first: int = 0, end: int | None = None) -> float:
        """What these units have of the whole figure, from 0 to 1."""
        return self.total(figure, first=first, end=end) / max(self.total(figure), 1)

    def starts(self) -> list[int]:
        """The places of the units at which stages start."""
        names = [unit.name for unit in self.units]
        return [0, *(names.index(split.unit) for split in self.splits)]


def _show(request: ParsedArgs) -> int:
    """Print the units of a model, and its stages where it is split."""
    sheet = _take_apart(request)
    if request["json"]:
        print(json.dumps(_as_json(sheet), indent=2))
        return 0
    _show_sheet(sheet)
    return 0


def _take_apart(request: ParsedArgs) -> _Sheet:
    """Count what was asked for; mistakes are told before torch is imported."""
    config = _find_settings(request).config
    name, variant = config.model.model, build_variant(config)
    image_size = config.data.image_size or variant.image_size
    check_variant(name, variant, image_size)
    classes = _read_classes(request["classes"]) or variant.classes
    asked = request["pipeline_splits"] or []
    own = isinstance(variant, OwnVariant)
    splits = [] if own else [find_split(variant, split, model=name) for split in asked]
    _check_order(splits, variant.units)

    from phalanx.models.count import count_units

    units = count_units(
        variant,
        num_classes=classes,
        batch=config.data.batch_size,
        image_size=image_size,
        half=config.machine.precision == "16.32",
    )
    if own:  # only the network itself knows its units
        splits = [_find_own_split(split, [unit.name for unit in units]) for split in asked]
        _check_order(splits, [unit.name for unit in units])
    return _Sheet(
        name=name,
        variant=variant,
        image_size=image_size,
        batch_size=config.data.batch_size,
        classes=classes,
        precision="16.32" if config.machine.precision == "16.32" else "32.32",
        units=units,
        splits=splits,
    )


def _find_settings(request: ParsedArgs) -> Settings:
    """The options that were given, over the defaults; no preset has a say in what a model is."""
    request.load_plugins()
    try:
        flags = {"model": find_model_name(request["name"]), **request.flags}
    except ValueError as error:
        raise join_problems([str(error), *request.problems]) from None
    own = ("image-size", "precision")
    flags |= {name: text for name in own if (text := request[name.replace("-", "_")])}
    problems = list(request.problems)
    return merge_layers([read_flags(flags, problems)], problems, name=flags["model"])


def _read_classes(text: str | None) -> int | None:
    """The number of classes, if one is given."""
    if text is None:
        return None
    classes = int(text) if text.isdecimal() else 0
    if not 1 <= classes <= _MOST_CLASSES:
        raise ConfigError(f"--classes: wants a number from 1 to {_MOST_CLASSES:,}, got {text!r}")
    return classes


def _find_own_split(name: str, units: Sequence[str]) -> Split:
    """A split of a plugin's model, which has no names but its units'."""
    if name not in units:
        raise ConfigError(f"--pipeline-splits: no unit is called {name!r}; {suggest(name, units)}")
    return Split(name, name, "")


def _check_order(splits: Sequence[Split], units: Sequence[str]) -> None:
    """Refuse splits between which nothing is left: every stage has a unit or more."""
    for before, split in pairwise([Split("the model", units[0], ""), *splits]):
        if units.index(split.unit) <= units.index(before.unit):
            raise ConfigError(
                f"--pipeline-splits {split.name}: starts at {split.unit}, and {before.name} at "
                f"{before.unit}; name splits in the order of the data, with a unit or more between"
            )


def _as_json(sheet: _Sheet) -> dict[str, Any]:
    """The sheet for a script; cumulative figures are shares from 0 to 1."""
    return {
        "name": sheet.name,
        "family": sheet.variant.family,
        "image_size": sheet.image_size,
        "batch_size": sheet.batch_size,
        "classes": sheet.classes,
        "precision": sheet.precision,
        **{figure: sheet.total(figure) for figure in _FIGURES},
        "units": [
            asdict(unit)
            | {
                f"cumulative_{word.lower()}": sheet.share(figure, end=place)
                for figure, word in _FIGURES.items()
            }
            for place, unit in enumerate(sheet.units, start=1)
        ],
        "splits": [asdict(split) for split in sheet.splits],
    }


def _show_sheet(sheet: _Sheet) -> None:
    """The sheet as a table, with a rule where a stage starts."""
    edge = f"{sheet.image_size} x {sheet.image_size}"
    print(f"{sheet.name}: {sheet.variant.family}, {describe_variant(sheet.variant)}")
    print(f"images of {edge}, {sheet.classes:,} classes; MACs are those of one image")
    kept = f"what {sheet.batch_size:,} images keep for the backward pass"
    print(f"activations are {kept}, precision {sheet.precision}\n")
    rows = [_unit_cells(sheet, place) for place in range(len(sheet.units))]
    head, *lines, total = _lined_up([_UNIT_HEAD, *rows, _total_cells(sheet)], left=(0, 1))
    width, starts = len(head), sheet.starts()
    print(f"{'cumulative shares':>{width}}\n{head}")
    for place, line in enumerate(lines):
        if place in starts:
            print(_rule(sheet, starts.index(place)).ljust(width, "─"))
        print(line)
    print(f"{'─' * width}\n{total}")
    for split in sheet.splits:
        if split.shifted:
            print(split.shifted)


def _unit_cells(sheet: _Sheet, place: int) -> tuple[str, ...]:
    """A unit as a row of the table."""
    unit = sheet.units[place]
    return (
        unit.name,
        "x".join(map(str, unit.shape)),
        f"{unit.parameters:,}",
        format_si(unit.macs),
        format_bytes(unit.activation_bytes),
        *(f"{sheet.share(figure, end=place + 1):.1%}" for figure in _FIGURES),
    )


def _total_cells(sheet: _Sheet) -> tuple[str, ...]:
    """The last row of the table."""
    parameters, macs, kept = (sheet.total(figure) for figure in _FIGURES)
    return ("total", "", f"{parameters:,}", format_si(macs), format_bytes(kept), "", "", "")


def _rule(sheet: _Sheet, stage: int) -> str:
    """The line above a stage: what it has of the whole. Without splits there is one stage."""
    if not sheet.splits:
        return ""
    starts = [*sheet.starts(), len(sheet.units)]
    first, end = starts[stage : stage + 2]
    shares = ", ".join(
        f"{word} {sheet.share(figure, first=first, end=end):.1%}"
        for figure, word in _FIGURES.items()
    )
    return f"── stage {stage + 1}: {shares} "


_JSON = Argument(name="--json", help="Print JSON.", switch=True)

COMMANDS = {
    "models ls": Command(
        name="models ls",
        summary="List the models by family, with their size at their own images and classes.",
        usage="phalanx models ls [WORD...] [--plugin MODULE] [--json]",
        run=_ls,
        arguments=(
            Argument(
                name="word",
                metavar="WORD",
                help="Only models whose names, or former names, hold every word.",
                many=True,
            ),
            _JSON,
        ),
        options=("plugin",),
        examples=(
            ("phalanx models ls", "all of them"),
            ("phalanx models ls resnext 32x4d", "those with both words in their name"),
            ("phalanx models ls --plugin mine --json", "yours too, for a script"),
        ),
    ),
    "models show": Command(
        name="models show",
        summary="Show a model's units: output, parameters, MACs, activations, cumulative shares.",
        usage="phalanx models show NAME [--pipeline-splits NAME...] [--option value]...",
        run=_show,
        arguments=(
            Argument(name="name", metavar="NAME", help="A model.", required=True),
            Argument(name="--image-size", help="Height and width of images  [the model's own]"),
            Argument(name="--classes", help="Classes to tell apart  [the model's own]"),
            Argument(
                name="--precision",
                help="Bits of activations: 32.32, or 16.32 as on a GPU  [32.32]",
            ),
            Argument(
                name="--pipeline-splits",
                help="Where stages start: units, or names of theirs in older programs.",
                many=True,
            ),
            _JSON,
        ),
        options=(
            "batch-size",
            "plugin",
            *(name for name in MODEL_OPTIONS if name not in _OF_WEIGHTS),
        ),
        examples=(
            ("phalanx models show resnet50", "its units at 224 x 224"),
            ("phalanx models show efficientnet_b0 --batch-size 8 --json", "for a script"),
            (
                "phalanx models show resnet50 --pipeline-splits b1/2/relu b2/3/relu b3/5/relu",
                "what each of four stages would have",
            ),
            ("phalanx models show resnet20 --norm-type group --norm-num-groups 8", "a variation"),
        ),
    ),
}
