"""Write what is generated: three pages of docs/ and the sizes of the models."""

import json
from pathlib import Path

from phalanx.catalog.models import (
    MODELS,
    SIZES_FILE,
    describe_variant,
    find_old_names,
    load_sizes,
)
from phalanx.catalog.other_trainers import TRAINERS
from phalanx.config.schema import OPTIONS, Option
from phalanx.models.cost import count_size
from phalanx.units import format_si

DOCS = Path(__file__).parents[1] / "docs"

OPTIONS_HEAD = """# Options

Every option is a flag (`--batch-size 64`), a YAML key (`batch-size: 64`) and a keyword in Python
(`phalanx.train(batch_size=64)`). Order: default < preset (and what it `extends`) < file < flag;
`phalanx plan --origin` says where each value came from.

Note that **`--batch-size` is the micro-batch**, the images in one forward
pass of one replica; the global batch of a step is micro-batch x `--gradient-accumulation` x
`--replicas`. Or give `--global-batch-size`, and the accumulation follows.

"Resume" says whether `train --resume` may change the option. What may not be changed alters the
maths: `train --fork RUN` starts a new run with it.

This page is written from the schema: `make docs`.
"""
MODELS_HEAD = """# Models

`phalanx models ls` prints this table, `phalanx models show NAME` the units of one model.

Parameters and MACs are those of the image size and classes in the row. A MAC is one multiplication
with its addition; those of convolutions and linear layers are counted, for one image. A name that
was used before is still accepted wherever a model is named.

3-4-6-3 are the blocks of each stage, 32x4 means 32 groups of 4 channels, and small is a network for
small images, which it does not halve at the start.

This page is written from the tables: `make docs`.
"""
OTHER_TRAINERS_HEAD = """# Coming from another trainer

What other programs call our options. The same table answers an option that does not exist: as a
flag (`--opt`), a YAML key (`opt:`) and a keyword in Python (`opt=`), with hyphens or underscores.
Many names are the same and are not listed: `--epochs`, `--lr`, `--momentum`, `--seed`, ...

This page is written from the tables: `make docs`.
"""


def options_page() -> str:
    """docs/options.md: every option, by section."""
    tables: dict[str, list[str]] = {}
    for option in OPTIONS.values():
        tables.setdefault(option.heading, []).append(option_row(option))
    head = "| option | type | default | resume | meaning |\n|---|---|---|---|---|"
    parts = [f"\n## {heading}\n\n{head}\n{''.join(rows)}" for heading, rows in tables.items()]
    return OPTIONS_HEAD + "".join(parts)


def option_row(option: Option) -> str:
    """One row of a table of options."""
    limits = f", at least {option.low:g}" if option.low is not None else ""
    if option.low is not None and option.high is not None:
        limits = f", {option.low:g} to {option.high:g}"
    aliases = f" Also `--{'`, `--'.join(option.aliases)}`." if option.aliases else ""
    cells = (
        f"`--{option.name}`",
        f"{option.wants}{limits}",
        option.auto or ("none" if option.default is None else f"`{option.default}`"),
        "yes" if option.resumable else "no",
        option.help + aliases,
    )
    return f"| {' | '.join(cells)} |\n"


def models_page() -> str:
    """docs/models.md: all models that come with Phalanx, by family."""
    tables: dict[str, list[str]] = {}
    for name in load_sizes():
        tables.setdefault(MODELS[name].family, []).append(model_row(name))
    head = "| model | parameters | MACs | image | classes | what it is | also called |"
    head += "\n|---|---:|---:|---:|---:|---|---|"
    parts = [f"\n## {family}\n\n{head}\n{''.join(rows)}" for family, rows in tables.items()]
    return MODELS_HEAD + "".join(parts)


def model_row(name: str) -> str:
    """One row of a table of models."""
    variant, size = MODELS[name], load_sizes()[name]
    cells = (
        f"`{name}`",
        f"{size.parameters:,}",
        format_si(size.macs),
        f"{variant.image_size}",
        f"{variant.classes:,}",
        describe_variant(variant),
        ", ".join(f"`{old}`" for old in find_old_names(name)),
    )
    return f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def other_trainers_page() -> str:
    """docs/other-trainers.md: what other programs call our options, by program."""
    parts = [OTHER_TRAINERS_HEAD]
    for trainer, names in TRAINERS.items():
        rows = "".join(f"| `{name}` | {answer} |\n" for name, answer in names.items())
        parts.append(
            f"\n## {trainer[0].upper()}{trainer[1:]}\n\n| theirs | here |\n|---|---|\n{rows}"
        )
    return "".join(parts)


def sizes_text() -> str:
    """catalog/sizes.json, a line a model."""
    rows = (
        f"  {json.dumps(name)}: {json.dumps(vars(count_size(variant)[0]))}"
        for name, variant in MODELS.items()
    )
    return "{\n" + ",\n".join(rows) + "\n}\n"


def write(path: Path, text: str) -> None:
    """Replace a file and say which."""
    path.write_text(text, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    write(Path(str(SIZES_FILE)), sizes_text())
    load_sizes.cache_clear()
    write(DOCS / "options.md", options_page())
    write(DOCS / "models.md", models_page())
    write(DOCS / "other-trainers.md", other_trainers_page())
