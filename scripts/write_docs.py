"""Write the generated files: six pages of docs/ and the sizes of the models."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.catalog.models import (
    MODELS,
    SIZES_FILE,
    describe_variant,
    find_old_names,
    read_model_sizes,
)
from phalanx.catalog.other_trainers import TRAINERS
from phalanx.config.presets import (
    APPLICATIONS,
    Preset,
    iterate_old_presets,
    read_preset_summary,
    shorten_name,
)
from phalanx.config.read import read_settings
from phalanx.config.schema import OPTIONS, Option
from phalanx.dialects.runner import RUNNER
from phalanx.dialects.table import KIND_WORDS, Dialect, OldOption
from phalanx.models.cost import count_size
from phalanx.plan.pipeline import count_stages
from phalanx.port.dialect_choice import DIALECTS
from phalanx.port.launchers import LAUNCHERS
from phalanx.units import format_si

DOCS = Path(__file__).parents[1] / "docs"
BENCH = DOCS / "bench"
NOT_RECORDED = "not recorded"
NAMES = {"python": "Python", "phalanx": "Phalanx"}

OPTIONS_HEAD = """# Options

Every option is a flag (`--batch-size 64`), a YAML key (`batch-size: 64`) and a keyword in Python
(`phalanx.train(batch_size=64)`). The later source wins: default < preset (and what it `extends`) <
file < flag; `phalanx plan --origin` shows where each value came from.

Note that **`--batch-size` is the micro-batch**, the images in one forward
pass of one replica; the global batch of a step is micro-batch x `--gradient-accumulation` x
`--replicas`. If you give `--global-batch-size`, the accumulation is derived from it.

"Resume" says whether `train --resume` may change the option. The others are part of the maths:
`train --fork RUN` starts a new run with other values.

This page is generated from the schema by `make docs`.
"""
SHORT = ("v", "vv", "H", "np", "n", "c", "x", "d", "N", "bind-to", "map-by")  # with one dash
PORT_HEAD = """# Bring your old command

`phalanx port` takes a command line of one of the older applications and prints the equivalent
command, what became of each option, and the plan. Nothing runs, and nothing is written.

```sh
phalanx port -- python3 train.py --config mk2_resnet50_gn_16ipus --data-dir DATA
```

The old command may be separate words after `--`, one quoted string, standard input, or a script
with several commands (`--file run.sh`). Variables, `poprun`, `mpirun` and `gc-profile` before it,
line continuations, `--option=value` and prefixes such as `--epoch` are understood. Variables and
arrays that a script sets are filled in, unless only a branch of an `if`, a `case` or an `&&` sets
them; `sudo`, `nohup`, `nice`, `time` and the like before it are left out.

| flag | what it does |
|---|---|
| `--run` | runs the new command |
| `--local` | leaves hosts out: replicas and stages fold onto the devices of this machine |
| `--save FILE` | writes the options as YAML, for `phalanx train FILE` |
| `--json` | prints the result for scripts: command, rows, warnings, plan, all resolved options |
| `--dialect NAME` | says which program a command is for, if its script and options do not |

`phalanx port --configs configs.yml` turns the entries of your own file into presets: see
[your own entries](#your-own-entries).

Our own options before `--` override the result: `phalanx port --run --steps 10 --data generated --
python3 train.py ...` tries ten steps of it.

The new command starts from the closest preset and contains only what differs from it, including
defaults of the older program that differ from the preset's. Data, runs and presets that are not on
this machine give a warning; if the command could not start, the reason takes the place of the plan.

This page is generated from the tables that `phalanx port` uses, by `make docs`."""
PORT_CONFIGS = """## Your own entries

```text
phalanx port --configs configs.yml
phalanx port --configs configs.yml --save presets
phalanx port --configs configs.yml NAME --save presets
```

The first command prints a preset for each entry, the second writes them to `presets/NAME.yaml`, the
third writes only one; all print what became of each key, and the plan. After that,
`phalanx train --config NAME` finds the preset in the folder `presets`, before any other of that
name; `--config FILE` takes a preset from anywhere.

Anchors, aliases and merges (`<<`) are resolved. Keys may have underscores or hyphens, and may be
abbreviated as long as they are unambiguous. The program is recognised from the keys of the whole
file, or given by `--dialect`. Keys that an entry does not set have the defaults of that program.

Entries that are only parts of others are left out unless you name them: those whose names begin
with a dot or an underscore, and those that others merge and that name no model. Settings that are
environment variables here, such as the available memory proportion, cannot be part of a preset: the
printed command and the first lines of the file contain them."""
MODELS_HEAD = """# Models

`phalanx models ls` prints this table, `phalanx models show NAME` the units of one model.

Parameters and MACs are for the image size and the classes in the row. A MAC is one multiply-add;
those of the convolutions and linear layers are counted, for one image. Former names ("also called")
are still accepted everywhere.

3-4-6-3 is the number of blocks in each stage, 32x4 means 32 groups of 4 channels, and small is a
network for small images, whose stem keeps the resolution.

This page is generated from the tables by `make docs`.
"""
OTHER_TRAINERS_HEAD = """# Coming from another trainer

What other programs call our options. If you use one of these names in Phalanx, as a flag (`--opt`),
a YAML key (`opt:`) or a Python keyword (`opt=`), with hyphens or underscores, the error gives the
same answer. Names that are the same here are not listed: `--epochs`, `--lr`, `--momentum`, ...

How to get weights for `--init-weights`: [weights.md](weights.md). Whole command lines of the older
applications: [port.md](port.md).

This page is generated from the tables by `make docs`.
"""
OLD_PRESETS_HEAD = """# Configurations by their old names

The entries of the older applications' configs.yml, in the version that their READMEs describe, are
presets under their old names: `phalanx train`, `plan`, `validate` and `bench` take `--config NAME`,
and flags override it. `phalanx presets ls --old` lists them, `phalanx presets cat NAME` prints one.

Every key has its old value. Where a key is missing, the application's default applies if it changes
a result. A learning rate given per image scales with the batch, as it did. Replicas and stages for
which there are no devices are folded ([training](training.md#many-devices)), with the same steps.
Hints to the IPU's compiler and paths are left out.

The [recipes](recipes.md) are the same runs with a layout for GPUs, and
[what differs in all of them](recipes.md#what-differs-in-all-of-them) applies here, too. Unlike the
recipes, these presets keep the original replicas with group norm as well, recompute activations
wherever the original did, score checkpoints after training, and average those of EfficientNet at
the end, which is why all of them are kept.

If two applications have the same name, add the application: `tf1/resnet8_test`. The same goes for
the name of a model: `pl/resnet50`. Your own file in ./presets or ./configs.yml takes precedence;
`phalanx port --configs` turns entries that you added there into presets
([port](port.md#your-own-entries)).

`mk2_efficientnet_b4_16ipus_base` is only a base for other entries. By itself it can neither be
trained nor planned, as in the original: its four stages need `--gradient-accumulation 4` or more.

`resnet50_infer_bs16` and its siblings are for scoring and serving: commands that take a model, such
as `phalanx bench infer` and `validate`, use their batch size, 8-bit images and 16-bit floats.

This page is generated from the presets by `make docs`.
"""
BENCH_HEAD = """# Measurements

Wherever possible, speed is a ratio measured in one run on one machine, because machines are noisy.
Facts that a file lacks are shown as "not recorded".

Every figure below is from a file in [results](results): the command, the commit, the hardware, the
versions, the number of repeats and their range. `phalanx bench train --json` prints such a file,
`phalanx bench --spec` writes one; put it there under its date, and run `make docs` for this page.

These pages describe the measurements and have more figures:

| page | what was measured |
|---|---|
"""
FIGURE_FIELDS = ("what", "value", "unit", "low", "high", "range", "n")
RESULT_FIELDS = ("title", "page", "date", "command", "commit", "hardware", "versions", "figures")


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
    default = str(option.default).lower() if isinstance(option.default, bool) else option.default
    cells = (
        f"`--{option.name}`",
        f"{option.expected_values}{limits}",
        option.auto or ("none" if default is None else f"`{default}`"),
        "yes" if option.resumable else "no",
        option.help + aliases,
    )
    return f"| {' | '.join(cells)} |\n"


def models_page() -> str:
    """docs/models.md: all models that come with Phalanx, by family."""
    tables: dict[str, list[str]] = {}
    for name in read_model_sizes():
        tables.setdefault(MODELS[name].family, []).append(model_row(name))
    head = "| model | parameters | MACs | image | classes | what it is | also called |"
    head += "\n|---|---:|---:|---:|---:|---|---|"
    parts = [f"\n## {family}\n\n{head}\n{''.join(rows)}" for family, rows in tables.items()]
    return MODELS_HEAD + "".join(parts)


def model_row(name: str) -> str:
    """One row of a table of models."""
    variant, size = MODELS[name], read_model_sizes()[name]
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
        parts.append(f"\n## {trainer}\n\n| theirs | here |\n|---|---|\n{rows}")
    return "".join(parts)


def old_presets_page() -> str:
    """docs/old-configs.md: the configurations of older applications, by application."""
    head = (
        "| preset | micro-batch x accumulation x replicas | stages | global batch | epochs | what |"
    )
    head += "\n|---|---|---:|---:|---:|---|\n"
    parts = [OLD_PRESETS_HEAD]
    for name, title in APPLICATIONS.items():
        rows = "".join(map(old_preset_row, iterate_old_presets(name)))
        parts.append(f"\n## {title}\n\n{head}{rows}")
    return "".join(parts)


def old_preset_row(preset: Preset) -> str:
    """One row of a table of configurations."""
    config = read_settings(preset.full_name).config
    batch, replicas = config.data.batch_size, int(config.machine.replicas)
    accumulation = config.train.gradient_accumulation or 1
    splits = config.pipeline.pipeline_splits
    stages = f"{count_stages(config)}"
    if config.pipeline.pipeline_schedule == "Sequential" and splits:
        stages = f"{splits.count(',') + 2}, on one device"
    application = APPLICATIONS[preset.application]
    what = read_preset_summary(preset).removesuffix(f" ({application})")
    cells = (
        f"`{shorten_name(preset)}`",
        f"{batch} x {accumulation} x {replicas}",
        stages,
        f"{batch * accumulation * replicas:,}",
        f"{config.train.epochs:g}",
        what.replace(f"({application}, ", "("),
    )
    return f"| {' | '.join(cells)} |\n"


def port_page() -> str:
    """docs/port.md: what becomes of every option of the older programs."""
    launchers = {name: rows for name, rows in LAUNCHERS.items() if name != "mpiexec"}
    parts = [
        PORT_HEAD,
        PORT_CONFIGS,
        "## Launchers\n\nOne host needs none: `phalanx train` starts a process for "
        "each device. Lines that name hosts\nbecome `phalanx launch`.",
    ]
    parts += [f"### {name}\n\n{old_table(rows)}" for name, rows in launchers.items()]
    above: list[Dialect] = []
    for dialect in (*DIALECTS.values(), RUNNER):
        parts.append(dialect_section(dialect, above))
        above.append(dialect)
    return "\n\n".join(parts) + "\n"


def dialect_section(dialect: Dialect, above: Sequence[Dialect]) -> str:
    """A program: where its README and code differ, and the options of its scripts.

    above: the programs already on the page; options that they share are not listed again.
    """
    known = f" (`--dialect {dialect.name}`)" if dialect.name in DIALECTS else ""
    parts = [f"## {dialect.title[0].upper()}{dialect.title[1:]}{known}"]
    if dialect.conflicts:
        decided = "\n".join(f"- {text}" for text in dialect.conflicts)
        parts.append(f"Where its README and its code differ, the README counts:\n\n{decided}")
    same = [other.title for other in above if other.configs and other.configs is dialect.configs]
    if same:
        parts.append(f"Configurations known by name are those of {same[0]}.")
    elif dialect.configs:
        parts.append(
            "Configurations known by name: " + ", ".join(f"`{c}`" for c in dialect.configs) + "."
        )
    tables = {f"`{n}` of {d.title}": s.options for d in above for n, s in d.scripts.items()}
    for name, script in dialect.scripts.items():
        also, listed = find_largest_overlap(script.options, tables)
        rows = [row for row in script.options if row not in listed]
        parts.append(f"### `{name}`{also}\n\n{old_table(rows)}")
        tables[f"`{name}`"] = script.options
    return "\n\n".join(parts)


def find_largest_overlap(
    rows: Sequence[OldOption], tables: Mapping[str, Sequence[OldOption]]
) -> tuple[str, Sequence[OldOption]]:
    """The heading of the earlier table that has most of the rows, and that table; or none."""
    for name, table in tables.items():
        if sum(row in table for row in rows) > len(rows) / 2:
            return f" (and the options of {name})", table
    return "", ()


def old_table(rows: Iterable[OldOption]) -> str:
    """Options, the default of each, and what it becomes."""
    lines = ["| option | default there | here | how or why |", "|---|---|---|---|"]
    alike: dict[tuple[str, str, str], list[str]] = {}  # options with the same outcome share a line
    for row in rows:
        names = [f"`{'-' if n in SHORT else '--'}{n}`" for n in row.names]
        default = row.default or ""
        default = "depends" if callable(default) else default.replace("false", "off")
        what = (default, KIND_WORDS[row.outcome.kind], row.outcome.summary)
        alike.setdefault(what if row.outcome.summary else (*what[:2], row.name), []).extend(names)
    for (default, kind, summary), names in alike.items():
        why = "" if f"`--{summary}`" in names else summary
        lines.append(f"| {', '.join(names)} | {default} | {kind} | {why} |")
    return "\n".join(lines)


def bench_page(folder: Path = BENCH) -> str:
    """docs/bench/README.md: the pages of prose, then every file of results, newest first."""
    described = json.loads((folder / "pages.json").read_text(encoding="utf-8"))
    pages = {path.name for path in folder.glob("*.md")} - {"README.md"}
    if pages != set(described):
        raise SystemExit(f"pages.json and the pages differ: {sorted(pages ^ set(described))}")
    rows = [f"| [{name}]({name}) | {what} |\n" for name, what in described.items()]
    results = [read_result(path) for path in sorted((folder / "results").glob("*.json"))]
    results.sort(key=lambda result: result["date"], reverse=True)
    return BENCH_HEAD + "".join(rows) + "".join(map(result_section, results))


def read_result(path: Path) -> dict[str, Any]:
    """A results file: handwritten, from `bench train --json`, or from `bench --spec`."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if text.count("\n{") else [text]  # an object per line, or one in all
    result = json.loads(lines[0])
    if "kind" in result:
        measured = [json.loads(line) for line in lines]
        result = describe_measurements([("", one) for one in measured], command=result["command"])
    elif "results" in result:
        found = [(one["variant"], one["facts"]) for one in result["results"] if one["facts"]]
        if not found:
            raise SystemExit(f"{path}: none of its benchmarks has a result")
        result = describe_measurements(found, command=result["command"])
    missing = [name for name in RESULT_FIELDS if name not in result]
    missing += [
        name for one in result.get("figures", ()) for name in FIGURE_FIELDS if name not in one
    ]
    if missing:
        raise SystemExit(f"{path}: has no {missing[0]!r}; null says that it was not recorded")
    if not path.name.startswith(result["date"]):
        raise SystemExit(f"{path}: its name should begin with its date, {result['date']}")
    return {**result, "file": f"results/{path.name}"}


def describe_measurements(
    found: list[tuple[str, dict[str, Any]]], *, command: str
) -> dict[str, Any]:
    """Results of benchmarks with their variants' names, in the form of handwritten ones."""
    one = found[0][1]
    where = one["environment"]
    verb = "Training" if one["kind"] == "train" else "Inference"
    title = f"{verb}: {one['name']}" if len(found) == 1 else f"{len(found)} benchmarks"
    return {
        "title": title,
        "page": None,
        "date": where["date"][:10],
        "command": command,
        "commit": where["commit"],
        "hardware": f"{where['device']}, {where['cores']} cores",
        "versions": {name: where[name] for name in ("torch", "python", "phalanx")},
        "figures": [row for name, facts in found for row in list_figures(name, facts)],
    }


def list_figures(name: str, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The rate of a benchmark, its latency and its memory."""
    batch, latency = facts["batch"], facts["latency_ms"] or {}
    what = f"{name or facts['name']}: {facts['data']} data, batch {batch['global']:,}"
    what += f" on {facts['devices']} devices" if facts["devices"] > 1 else ""
    if not facts["trusted"]:
        what += f" (unreliable: {'; '.join(facts['problems'])})"
    rate = figure(f"{what}, median", facts["median"], "images/s", facts["n"])
    rows = [rate | {"low": facts["low"], "high": facts["high"], "range": "all blocks"}]
    for share in ("p50", "p99"):
        if latency.get(share) is not None:
            rows.append(figure(f"latency, {share}", latency[share], "ms", latency.get("n")))
    if facts["peak_memory_bytes"] is not None:
        rows.append(figure("peak memory", facts["peak_memory_bytes"] / 1e9, "GB", 1))
    return rows


def figure(what: str, value: Any, unit: str, n: int | None = None) -> dict[str, Any]:
    """One figure without a range."""
    return {
        "what": what, "value": value, "unit": unit, "low": None, "high": None, "range": None, "n": n
    }  # fmt: skip


def result_section(result: dict[str, Any]) -> str:
    """One measurement: what is needed to repeat it, and its figures."""
    versions = ", ".join(
        f"{NAMES.get(name, name)} {version or NOT_RECORDED}"
        for name, version in result["versions"].items()
    )
    commit = f"`{result['commit']}`" if result["commit"] else NOT_RECORDED
    links = [f"[{result['file'].partition('/')[2]}]({result['file']})"]
    links += [f"[{result['page']}]({result['page']})"] if result["page"] else []
    rows = "".join(figure_row(one) for one in result["figures"])
    return (
        f"\n## {result['title']}\n\n"
        f"`{result['command'] or NOT_RECORDED}`\n\n"
        f"{result['date']}; commit {commit}; {result['hardware'] or NOT_RECORDED}; {versions}. "
        f"{', '.join(links)}\n\n"
        f"| measured | result | range | n |\n|---|---:|---|---:|\n{rows}"
    )


def figure_row(one: dict[str, Any]) -> str:
    """One figure: a value with its range, or the range alone."""
    unit = "" if one["unit"] == "ratio" else f" {one['unit']}".rstrip()
    value = "" if one["value"] is None else f"{number(one['value'])}{unit}"
    spread = "one run" if one["n"] == 1 else NOT_RECORDED
    if one["low"] is not None:
        spread = f"{number(one['low'])} to {number(one['high'])}{unit * (not value)}"
        spread += f" ({one['range']})" if one["range"] else ""
    count = NOT_RECORDED if one["n"] is None else f"{one['n']:,}"
    return f"| {one['what']} | {value} | {spread} | {count} |\n"


def number(value: Any) -> str:
    """A number, formatted for reading; text as it is."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sizes_text() -> str:
    """catalog/sizes.json, a line per model."""
    rows = (
        f"  {json.dumps(name)}: {json.dumps(vars(count_size(variant)[0]))}"
        for name, variant in MODELS.items()
    )
    return "{\n" + ",\n".join(rows) + "\n}\n"


def write(path: Path, text: str) -> None:
    """Replace a file and print its name."""
    path.write_text(text, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    write(Path(str(SIZES_FILE)), sizes_text())
    read_model_sizes.cache_clear()
    write(DOCS / "options.md", options_page())
    write(DOCS / "models.md", models_page())
    write(DOCS / "other-trainers.md", other_trainers_page())
    write(DOCS / "old-configs.md", old_presets_page())
    write(DOCS / "port.md", port_page())
    write(BENCH / "README.md", bench_page())
