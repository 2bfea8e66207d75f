"""`phalanx data list | fetch | show`: what is in a folder, a download, the batch of a step."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import ALL_OPTIONS, LAYOUT_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.progress import REWRITE_S, ProgressLine
from phalanx.config.read import Settings
from phalanx.disk import expand_home
from phalanx.errors import ConfigError, DataError
from phalanx.report.terminal import drawing_stream, escape_name
from phalanx.units import format_bytes, format_plural, format_some

_NAMES_SHOWN = 40  # of classes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from phalanx.config.schema import Config
    from phalanx.data.convert.source_splits import SourceOptions
    from phalanx.data.loading.reader import Batch

_FILELESS = {  # datasets that have no files: what they are, how to get them
    "embedded": ("8,000 + 1,500 Fashion-MNIST images", "comes with Phalanx"),
    "generated": ("random images made on the host", "made when asked for"),
    "synthetic": ("random images made on the device", "made when asked for"),
}


@command(
    "data list",
    "List the data that can be read, or what is in a folder and up to three levels below it.",
    Argument("dir", "The folder to look into."),
    Argument("--json", "Print JSON.", switch=True),
    usage="[DIR] [--labels FILE] [--json]",
    options=("val-split", *LAYOUT_OPTIONS),
    examples={
        "phalanx data list": "every format that can be read, and how to get it",
        "phalanx data list ~/data": "what is there, with counts and classes",
        "phalanx data list ~/data --val-split 10%": "the same, with a tenth for validation",
    },
)
def _list_data(args: ParsedArgs) -> None:
    """Print the formats that can be read, or what was found in a folder."""
    args.refuse_problems()
    if args["dir"] or args.flags:
        source_options = args.read_source_options()
        found = _describe_datasets(_find_listed_folder(args, source_options), source_options)
        args.print_result(found, lambda: _print_datasets(found))
    else:
        formats = _describe_formats()
        args.print_result(formats, lambda: _print_formats(formats))


def _find_listed_folder(args: ParsedArgs, source_options: "SourceOptions") -> Path:
    """The folder to search: the named one, else that of the file of labels."""
    if args["dir"]:
        return expand_home(args["dir"])
    if source_options.layout.labels is not None:  # whose paths are relative to its folder
        return expand_home(source_options.layout.labels).absolute().parent
    flag = next(iter(args.flags))
    raise ConfigError(f"--{flag}: say which folder: phalanx data list DIR --{flag} ...")


def _describe_formats() -> list[dict[str, Any]]:
    """Every format with its files and how to get it."""
    from phalanx.data.formats.sources import DATA_FORMATS

    rows = [
        {"data": name, "what": form.files, "get": form.how_to_get}
        for name, form in DATA_FORMATS.items()
    ]
    fileless = [{"data": name, "what": what, "get": get} for name, (what, get) in _FILELESS.items()]
    return [*fileless, *rows]


def _describe_datasets(root: Path, source_options: "SourceOptions") -> list[dict[str, Any]]:
    """The datasets in a folder, with counts and classes; DataError if there are none."""
    from phalanx.data.formats.detect import describe_no_dataset, detect_datasets

    found = detect_datasets(root, source_options.layout)
    if not found:
        raise DataError(describe_no_dataset(root))
    return [
        {
            "data": f.data,
            "folder": str(f.folder),
            **_describe_dataset(f.data, f.folder, source_options),
        }
        for f in found
    ]


def _describe_dataset(data: str, folder: Path, source_options: "SourceOptions") -> dict[str, Any]:
    """The images and classes of a dataset; for a split with an error, the error."""
    from phalanx.data.formats.detect import (
        count_ignored,
        describe_data_layout,
        describe_files,
        describe_similar_classes,
    )
    from phalanx.data.formats.sources import DATA_FORMATS, open_format

    facts: dict[str, Any] = {"why": "", "train": None, "valid": None, "classes": None}
    sources, problems = [], []
    if DATA_FORMATS[data].open is None:
        return {
            **facts,
            "why": DATA_FORMATS[data].files,
            "problems": [DATA_FORMATS[data].how_to_get],
        }
    layout, val_split = source_options.layout, source_options.val_split
    for split in ("train", "valid"):
        try:
            source = open_format(data, folder, split, layout=layout, val_split=val_split)
            facts[split], facts["classes"] = len(source), len(source.classes)
            sources.append(source)
        except DataError as error:
            problems += [str(error)] if str(error) not in problems else []
    layout_text = describe_data_layout(data, folder, layout)
    similar = describe_similar_classes(sources[0].classes) if sources and layout_text else ""
    how_read = "; ".join(filter(None, (layout_text, similar)))
    facts["why"] = how_read or describe_files(sources) or DATA_FORMATS[data].files
    return {**facts, "ignored": count_ignored(sources), "problems": problems}


def _print_datasets(rows: list[dict[str, Any]]) -> None:
    """Print the datasets in a folder, each with its problems."""
    from phalanx.data.layouts.image_files import describe_ignored

    for row in rows:
        print(f"{row['data']} in {row['folder']}{_describe_counts(row)}")
        print(f"  {row['why']}")
        if row.get("ignored"):
            print(f"  {describe_ignored(row['ignored'])}")
        for problem in row["problems"]:
            print("  " + problem.replace("\n", "\n  "))


def _describe_counts(row: dict[str, Any]) -> str:
    """The images of a dataset's splits and its classes; empty if it could not be opened."""
    train, valid = row["train"], row["valid"]
    if train is None and valid is None:
        return ""
    if valid is None:
        images = format_plural(train, "training image")
    elif train is None:
        images = format_plural(valid, "validation image")
    else:
        images = f"{train:,} + {valid:,} images"
    return f": {images}, {row['classes']:,} classes"


def _print_formats(rows: list[dict[str, Any]]) -> None:
    """Print the formats as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for head in ("data", "what is there", "how to get it"):
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(row["data"], row["what"], row["get"])
    Console(highlight=False, file=drawing_stream(sys.stdout)).print(table)


@command(
    "data fetch",
    "Download a published dataset, check it, and continue a download that broke off.",
    Argument("data", "Which dataset.", metavar="SET"),
    Argument(
        "--data-dir",
        "Where to put it; DATA_DIR when that is set, else data/SET. Without either, "
        "a system package that holds the set is used where it is.",
    ),
    usage="cifar10|cifar100|mnist|fashion-mnist [--data-dir DIR]",
    examples={
        "phalanx data fetch cifar10": "into data/cifar10",
        "phalanx data fetch fashion-mnist --data-dir ~/data": "into a folder of your own",
    },
)
def _fetch_data(args: ParsedArgs) -> None:
    """Find or download a dataset, and print where it is."""
    args.refuse_problems()
    from phalanx.data.fetch import PUBLISHED_FILES, fetch_dataset

    data = args["data"]
    if data is None:
        raise ConfigError(f"say which set to fetch: {', '.join(PUBLISHED_FILES)}")
    data_dir = args["--data-dir"] or os.environ.get("DATA_DIR")
    line = ProgressLine(REWRITE_S, math.inf)  # a log gets a line for each whole file

    def progress(file: str, have: int, whole: int | None) -> None:
        total = f" of {format_bytes(whole)}" if whole else ""
        line.show(f"{file}: {format_bytes(have)}{total}", is_last=have == whole)

    fetched = fetch_dataset(data, Path(data_dir) if data_dir else None, on_progress=progress)
    files = format_plural(len(fetched.downloaded), "file")
    how = f"{files} downloaded" if fetched.downloaded else "already here"
    print(f"{data}: {how}, all checksums match")
    print(f"phalanx train --data {data} --data-dir {fetched.folder}")


@command(
    "data show",
    "Draw the augmented batch of a step, exactly as training saw or will see it.",
    Argument("preset", "A preset, a YAML file, or a run folder.", metavar="PRESET|FILE|RUN"),
    Argument("--step", "Which step, counted from 1.", default="1"),
    Argument("--out", "Image file to write.", default="batch.png"),
    usage="[PRESET|FILE|RUN] --step K --out FILE",
    options=ALL_OPTIONS,
    examples={
        "phalanx data show --step 1 --out batch.png": "the first batch of the demo",
        "phalanx data show runs/demo --step 731": "what a past step of a run saw",
    },
)
def _show_batch(args: ParsedArgs) -> None:
    """Draw what the model sees in one step, before normalisation."""
    settings = _find_settings(args)
    from phalanx.assemble.dataset_summary import build_input_spec, plan_run
    from phalanx.data.loading.loader import Loader
    from phalanx.report.contact_sheet import find_font, write_contact_sheet

    plan, dataset = plan_run(settings)
    step = args.read_int("--step", 1, plan.total_steps, noun="a step")
    if settings.config.data.data == "synthetic":
        raise ConfigError(
            "--data synthetic: its noise is made on the device, so there is nothing to draw; use "
            "--data generated"
        )
    with Loader(build_input_spec(settings.config, plan), workers=0, max_bad=plan.max_bad) as loader:
        batches = next(loader.steps_from(step - 1, step, micro_batch=plan.micro_batch))
    labels = [label for batch in batches for label in batch.labels.tolist()]
    indices = [index for batch in batches for index in batch.indices.tolist()]
    names = {label: dataset.classes[label] for label in sorted({*labels})}
    is_drawable = find_font("".join(names.values())) is not None
    captions = [
        f"#{index} {names[label] if is_drawable else f'class {label}'}"
        for label, index in zip(labels, indices, strict=True)
    ]
    images = format_plural(len(captions), "image")
    title = f"{settings.name}: step {step:,} of {plan.total_steps:,}, {images}"
    out = Path(args["--out"])
    write_contact_sheet(out, _mix_images(batches, settings.config), captions, title=title)
    print(f"{out}: step {step:,}, {images}")
    if not is_drawable:
        legend = format_some(
            [f"class {label}: {name}" for label, name in names.items()], _NAMES_SHOWN
        )
        print(f"no installed font has all letters of the class names; {escape_name(legend)}")


def _mix_images(batches: "Sequence[Batch]", config: "Config") -> "NDArray[np.uint8]":
    """The pixels of a step's micro-batches after mixup and cutmix, if options ask for them."""
    import numpy as np

    augment, pixels = config.augment, [batch.pixels for batch in batches]
    if augment.mixup_alpha or augment.cutmix_lambda_high or augment.cutmix_lambda < 1:
        from phalanx.assemble.build import build_mixing
        from phalanx.engine.mixing import mix_pixels

        seed, mixing = config.train.seed, build_mixing(config)
        pixels = [
            mix_pixels(batch.pixels, first=int(batch.positions[0]), seed=seed, mixing=mixing)
            for batch in batches
        ]
    return np.concatenate(pixels)


def _find_settings(args: ParsedArgs) -> Settings:
    """The config of a run folder, or of a preset with flags."""
    name = args["preset"]
    if name and (Path(name) / "run.json").is_file():
        from phalanx.assemble.prepare import read_stored_options
        from phalanx.config.read import read_stored_settings
        from phalanx.report.folder import open_run

        args.refuse_problems()
        run = open_run(Path(name))
        return read_stored_settings(
            read_stored_options(run),
            flags=args.flags,
            where=str(run.config),
            name=run.facts["name"],
        )
    from phalanx.assemble.find_data import read_settings_with_data

    return read_settings_with_data(name, args.flags, problems=args.problems)
