"""`phalanx models ls | show`: the models, and the parameters and cost of each unit of a model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from phalanx.catalog.models import MODELS, describe_variant, find_old_names, read_model_sizes
from phalanx.catalog.splits import Split, find_split
from phalanx.catalog.variant import OwnVariant, Variant
from phalanx.cli.command import MODEL_OPTIONS, Argument, ParsedArgs, command
from phalanx.config.fields import find_model_name
from phalanx.config.read import merge_layers, read_flags
from phalanx.config.schema import Config
from phalanx.errors import ConfigError, join_problems, suggest
from phalanx.plan.model import build_variant, check_variant
from phalanx.plan.pipeline import check_order
from phalanx.units import align_columns, format_bytes, format_plural, format_si

if TYPE_CHECKING:
    from phalanx.models.cost import UnitCost

_JSON = Argument("--json", "Print JSON.", switch=True)
_WEIGHT_OPTIONS = ("init-weights", "reset-head")  # no figure depends on them
_MOST_CLASSES = 1_000_000
_LIST_HEAD = ("params", "MACs", "px", "classes", "what it is")
_UNIT_HEAD = ("unit", "output", "parameters", "MACs", "activations", "params", "MACs", "activ.")
_FIGURES = {"parameters": "parameters", "macs": "MACs", "activation_bytes": "activations"}


# --- models ls ---


@command(
    "models ls",
    "List the models by family, with their size at their default image size and classes.",
    Argument("word", "Only models whose names, or former names, contain every word.", many=True),
    _JSON,
    usage="[WORD...] [--plugin MODULE] [--json]",
    options=("plugin",),
    examples={
        "phalanx models ls": "all of them",
        "phalanx models ls resnext 32x4d": "those with both words in their name",
        "phalanx models ls --plugin mine --json": "yours too, for a script",
    },
)
def _list_models(args: ParsedArgs) -> None:
    """List the models, or those whose names contain every word."""
    args.refuse_problems()
    args.load_plugins()
    words = args["word"]
    rows = [_describe_model(name) for name in MODELS if _name_contains(name, words)]
    if not rows:
        quoted = " and ".join(map(repr, words))
        raise ConfigError(f"no model's name contains {quoted}; `phalanx models ls` lists all")
    args.print_result(rows, lambda: _print_list(rows))


def _name_contains(name: str, words: Sequence[str]) -> bool:
    """Whether every word is part of the model's name, or of a former name."""
    names = " ".join([name, *find_old_names(name)]).lower()
    return all(word.lower() in names for word in words)


def _describe_model(name: str) -> dict[str, Any]:
    """The facts about a model; those of a plugin's model are counted now."""
    variant = MODELS[name]
    size, units = read_model_sizes().get(name), len(variant.units)
    if size is None:
        from phalanx.models.cost import count_size

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


def _print_list(rows: list[dict[str, Any]]) -> None:
    """Print the models as a table, family by family."""
    families: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        cells = (
            row["name"],
            format_si(row["parameters"]),
            format_si(row["macs"]),
            f"{row['image_size']}",
            f"{row['classes']:,}",
            describe_variant(MODELS[row["name"]]),
        )
        empty = ("",) * len(cells)
        head = (row["family"], *_LIST_HEAD)
        families.setdefault(row["family"], [empty, head]).append(cells)
    lines = align_columns([cells for table in families.values() for cells in table], left=(0, 5))
    print("\n".join(lines[1:]))


# --- models show ---


@dataclass(frozen=True, kw_only=True)
class _ModelCounts:
    """The figures of a model's units, with what they were counted for."""

    name: str
    variant: Variant
    image_size: int
    batch_size: int
    classes: int
    precision: str
    units: "list[UnitCost]"
    splits: list[Split]

    def total(self, figure: str, *, first: int = 0, end: int | None = None) -> int:
        """The sum of a figure over all units, or those from the first until before the end."""
        return sum(getattr(unit, figure) for unit in self.units[first:end])

    def share(self, figure: str, *, first: int = 0, end: int | None = None) -> float:
        """What these units have of the whole figure, from 0 to 1."""
        return self.total(figure, first=first, end=end) / max(self.total(figure), 1)

    def to_dict(self) -> dict[str, Any]:
        """All figures; cumulative ones are shares from 0 to 1."""
        return {
            "name": self.name,
            "family": self.variant.family,
            "image_size": self.image_size,
            "batch_size": self.batch_size,
            "classes": self.classes,
            "precision": self.precision,
            **{figure: self.total(figure) for figure in _FIGURES},
            "units": [
                asdict(unit)
                | {
                    f"cumulative_{word.lower()}": self.share(figure, end=place)
                    for figure, word in _FIGURES.items()
                }
                for place, unit in enumerate(self.units, start=1)
            ],
            "splits": [asdict(split) for split in self.splits],
        }


@command(
    "models show",
    "Show a model's units: output, parameters, MACs, activations, cumulative shares.",
    Argument("name", "A model.", required=True),
    Argument("--image-size", "Height and width of images.  [the model's own]"),
    Argument("--classes", "Number of classes.  [the model's own]"),
    Argument("--precision", "Bits of activations: 32.32, or 16.32 as on a GPU.  [32.32]"),
    Argument(
        "--pipeline-splits",
        "Where stages start: units, or what older programs call them.",
        many=True,
    ),
    _JSON,
    usage="NAME [--pipeline-splits NAME...] [--option value]...",
    options=(
        "batch-size",
        "plugin",
        *(name for name in MODEL_OPTIONS if name not in _WEIGHT_OPTIONS),
    ),
    examples={
        "phalanx models show resnet50": "its units at 224 x 224",
        "phalanx models show efficientnet_b0 --batch-size 8 --json": "for a script",
        "phalanx models show resnet50 --pipeline-splits b1/2/relu b2/3/relu b3/5/relu": (
            "what each of four stages would have"
        ),
        "phalanx models show resnet20 --norm-type group --norm-num-groups 8": "a variation",
    },
)
def _show_model(args: ParsedArgs) -> None:
    """Print the units of a model, and its stages where it is split."""
    counts = _count_model(args)
    args.print_result(counts.to_dict(), lambda: _print_units(counts))


def _count_model(args: ParsedArgs) -> _ModelCounts:
    """Count what was asked for; mistakes are reported before torch is imported."""
    config = _read_config(args)
    name, variant = config.model.model, build_variant(config)
    image_size = config.data.image_size or variant.image_size
    check_variant(name, variant, image_size)
    classes = variant.classes
    if args["--classes"] is not None:
        classes = args.read_int("--classes", 1, _MOST_CLASSES, noun="a number")
    split_names = [
        name for text in args["--pipeline-splits"] or [] for name in text.split(",") if name
    ]
    own = isinstance(variant, OwnVariant)
    splits = [] if own else [find_split(variant, split, model=name) for split in split_names]
    check_order(splits, variant.units)

    from phalanx.models.cost import count_units

    half = config.machine.precision == "16.32"
    units = count_units(
        variant,
        num_classes=classes,
        batch=config.data.batch_size,
        image_size=image_size,
        half=half,
    )
    if own:  # only the network itself knows its units
        names = [unit.name for unit in units]
        splits = [_find_own_split(split, names) for split in split_names]
        check_order(splits, names)
    return _ModelCounts(
        name=name,
        variant=variant,
        image_size=image_size,
        batch_size=config.data.batch_size,
        classes=classes,
        precision="16.32" if half else "32.32",
        units=units,
        splits=splits,
    )


def _read_config(args: ParsedArgs) -> Config:
    """The options that were given, over the defaults; no preset has a say in what a model is."""
    args.load_plugins()
    try:
        flags = {"model": find_model_name(args["name"]), **args.flags}
    except ValueError as error:
        raise join_problems([str(error), *args.problems]) from None
    own = ("image-size", "precision")
    flags |= {name: text for name in own if (text := args[f"--{name}"])}
    problems = list(args.problems)
    return merge_layers([read_flags(flags, problems)], problems, name=flags["model"]).config


def _find_own_split(name: str, units: Sequence[str]) -> Split:
    """A split of a plugin's model, which has no names but its units'."""
    if name not in units:
        raise ConfigError(f"--pipeline-splits: no unit is called {name!r}; {suggest(name, units)}")
    return Split(name, name, "")


def _print_units(counts: _ModelCounts) -> None:
    """The units as a table, with a line where a stage starts."""
    size = f"{counts.image_size} x {counts.image_size}"
    print(f"{counts.name}: {counts.variant.family}, {describe_variant(counts.variant)}")
    print(f"images of {size}, {counts.classes:,} classes; MACs are those of one image")
    kept = f"what {format_plural(counts.batch_size, 'image')} keep{'s' * (counts.batch_size == 1)}"
    print(f"activations are {kept} for the backward pass, precision {counts.precision}\n")
    rows = [
        (
            unit.name,
            "x".join(map(str, unit.shape)),
            f"{unit.parameters:,}",
            format_si(unit.macs),
            format_bytes(unit.activation_bytes),
            *(f"{counts.share(figure, end=place):.1%}" for figure in _FIGURES),
        )
        for place, unit in enumerate(counts.units, start=1)
    ]
    parameters, macs, activations = (counts.total(figure) for figure in _FIGURES)
    total = ("total", "", f"{parameters:,}", format_si(macs), format_bytes(activations))
    head, *lines, last = align_columns([_UNIT_HEAD, *rows, (*total, "", "", "")], left=(0, 1))
    width, separators = len(head), _describe_stages(counts)
    print(f"{'cumulative shares':>{width}}\n{head}")
    for unit, line in zip(counts.units, lines, strict=True):
        if unit.name in separators:
            print(separators[unit.name].ljust(width, "─"))
        print(line)
    print(f"{'─' * width}\n{last}")
    for split in counts.splits:
        if split.shifted:
            print(split.shifted)


def _describe_stages(counts: _ModelCounts) -> dict[str, str]:
    """The line above each stage, by its first unit: what the stage has of the whole."""
    names = [unit.name for unit in counts.units]
    if not counts.splits:
        return {names[0]: ""}
    starts = [0, *(names.index(split.unit) for split in counts.splits), len(names)]
    lines = {}
    for stage, (first, end) in enumerate(pairwise(starts), start=1):
        shares = ", ".join(
            f"{word} {counts.share(figure, first=first, end=end):.1%}"
            for figure, word in _FIGURES.items()
        )
        lines[names[first]] = f"── stage {stage}: {shares} "
    return lines
