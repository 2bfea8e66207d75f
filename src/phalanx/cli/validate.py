"""`phalanx validate`: score a run, a checkpoint, a folder of them, a preset or a model."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from phalanx.cli.command import (
    LAYOUT_OPTIONS,
    LIMIT_OPTIONS,
    MODEL_OPTIONS,
    Argument,
    ParsedArgs,
    command,
)
from phalanx.cli.measurement_flags import RANDOM_DATA_FLAGS, read_batch_sizes, read_random_data_kind
from phalanx.cli.ranks import run_on_ranks
from phalanx.errors import CheckpointError, ConfigError
from phalanx.units import format_count, format_plural

if TYPE_CHECKING:
    from phalanx.assemble.score import ScoredModel
    from phalanx.assemble.scoring_target import ScorableCheckpoint, Target
    from phalanx.config.read import Settings
    from phalanx.config.schema import Config
    from phalanx.parallel.ranks import Ranks
    from phalanx.plan.plan import Plan

SCORING_OPTIONS = (
    "data", "data-dir", "val-split", *LAYOUT_OPTIONS, "valid-batch-size", "workers", "device",
    "devices", "pipeline-splits", "pipeline-validation-model", "shards", "rank-timeout",
    "precision", "half-partials", "eight-bit-io", "threads", "seed",
    "flip-averaging", "eval-crop", "normalization", "exif-orientation", *LIMIT_OPTIONS,
)  # fmt: skip
FRESH_MODEL_OPTIONS = ("model", "image-size", *MODEL_OPTIONS)  # a checkpoint brings its own
CHECKPOINT_FLAG = Argument(
    "--checkpoint",
    "Which checkpoint of a run: last, best or the number of a step.  [the best if one is known, "
    "else the last]",
)


@command(
    "validate",
    "Score a run, a checkpoint, a folder of checkpoints, a preset or a model; every image counts "
    "once.",
    Argument(
        "target",
        "A run (its best checkpoint), a checkpoint, a folder of them, or a preset or model by "
        "name, which starts with random weights or those of --init-weights.",
        metavar="RUN|...",
    ),
    Argument("--config", "The same, as a flag."),
    CHECKPOINT_FLAG,
    Argument(
        "--all", "Score every checkpoint in it, and the averages of their weights.", switch=True
    ),
    Argument(
        "--batch-size",
        "Same as --valid-batch-size; several sizes, such as 1,4,16, are scored in turn.",
        items=True,
    ),
    Argument(
        "--repeat",
        "Score this many times, to measure images/s: the median, without the first pass.  [1]",
        default="1",
    ),
    *RANDOM_DATA_FLAGS,
    Argument("--json", "Print one JSON object per score.", switch=True),
    usage="RUN|CHECKPOINT|FOLDER|PRESET|MODEL [--checkpoint last|best|STEP] [--all] "
    "[--option value]...",
    options=(*SCORING_OPTIONS, "plugin", *FRESH_MODEL_OPTIONS),
    examples={
        "phalanx validate runs/demo": "the best checkpoint of a run; the last if none was scored",
        "phalanx validate runs/demo --checkpoint last": "its newest one",
        "phalanx validate runs/demo/checkpoints/best --json": "one checkpoint, for a script",
        "phalanx validate runs/demo --all": "all checkpoints of a run, averages too",
        "phalanx validate runs/demo --devices 2": "with two processes, each on half of the images",
        "phalanx validate runs/cats --data-dir more-cats": "other images of its classes",
        "phalanx validate resnet8": "what an untrained model scores",
        "phalanx validate imagenet-resnet50 --init-weights resnet50.safetensors "
        "--data-dir ~/imagenet": "what weights from elsewhere score, with a preset's data",
        "phalanx validate resnet50 --generated-data --batch-size 1,8,64 --precision 16.16 "
        "--repeat 10": "how many images per second the device scores, in batches of three sizes",
    },
)
def _run(args: ParsedArgs) -> int:
    """Score the targets, and print a line for each."""
    return run_on_ranks(args, lambda: _prepare(args))


def _prepare(args: ParsedArgs) -> "_Scoring":
    """The models to score; errors in the options are reported before any is scored."""
    args.refuse_problems()
    args.load_plugins()
    sizes = read_batch_sizes(args)
    parts = [_prepare_size(args, size, swept=len(sizes) > 1) for size in sizes]
    return replace(parts[0], models=[model for part in parts for model in part.models])


def _prepare_size(args: ParsedArgs, size: str | None, *, swept: bool) -> "_Scoring":
    """The models to score in batches of one size; None: the run's own."""
    passes, kind = args.read_int("--repeat", 1, 10_000), read_random_data_kind(args)
    target, flags = read_target_name(args), dict(args.flags)
    if size is not None:
        flags["batch-size"] = size

    from phalanx.assemble.find_data import use_random_data
    from phalanx.assemble.scoring_target import read_untrained_settings

    asked = replace(args, flags=flags)
    batch = int(size) if swept and size else None
    settings = read_untrained_settings(target, flags)
    if settings is None:
        refuse_model_options(target, args)
        return prepare_checkpoints(
            target, asked, every=args["--all"], passes=passes, kind=kind, batch=batch
        )
    if args["--all"] or args["--checkpoint"]:
        given = "--all" if args["--all"] else f"--checkpoint {args['--checkpoint']}"
        raise ConfigError(f"{given}: {target} is not a run, so it has no checkpoints; leave it out")
    if kind is not None:
        settings = use_random_data(settings, kind)
    return prepare_untrained(target, settings, asked, passes=passes, batch=batch)


def read_target_name(args: ParsedArgs) -> str:
    """The target to score: the first word, --config, or the model that --model names."""
    names = [name for name in (args["target"], args["--config"]) if name]
    if len(names) > 1:
        raise ConfigError(f"--config {names[1]}: {names[0]} is already named; give only one")
    if not names and "model" in args.flags:
        names = [args.flags["model"]]
    if not names:
        raise ConfigError(
            "name what to score: a run, a checkpoint, a preset or a model; see phalanx "
            f"{args.command} --help"
        )
    return str(names[0])


def refuse_model_options(target: str, args: ParsedArgs) -> None:
    """Raise ConfigError for an option of the model: a checkpoint has its own model."""
    for name in FRESH_MODEL_OPTIONS:
        if name in args.flags:
            raise ConfigError(
                f"--{name}: {target} already says what its model is; only a preset or a model by "
                f"name takes such options, as in: phalanx {args.command} resnet50"
            )


class _Model(NamedTuple):
    """A model to score."""

    name: str
    batch: int | None  # images in a batch, if several sizes are compared
    note: str  # printed before the score
    target: "Target"


@dataclass(frozen=True, kw_only=True)
class _Scoring:
    """Models to score, checked without torch."""

    models: Sequence[_Model]
    passes: int
    plan: "Plan"  # of the first of the models, as is the config
    config: "Config"
    args: ParsedArgs

    def run(self, ranks: "Ranks | None" = None) -> int:
        """Score and print; each rank scores its share, and the first prints."""
        prints = ranks is None or ranks.rank == 0
        if prints:
            print_unused_options(self.args, self.plan)
        printed_note = ""
        for name, batch, note, target in self.models:
            if prints and note and note != printed_note:
                print(note, file=sys.stderr)
            from phalanx.assemble.score import score_target  # imports torch: not before the note

            printed_note, scored = note, score_target(target, passes=self.passes, ranks=ranks)
            if prints:
                print_score(name, scored, as_json=self.args["--json"], batch=batch)
        return 0


def print_unused_options(args: ParsedArgs, plan: "Plan") -> None:
    """Print which of the given options have no effect; notes about training are left out."""
    given = tuple(f"--{name} " for name in args.flags if name != "valid-batch-size")
    for note in plan.warnings:
        if note.startswith(given) and "has no effect" in note:
            print(f"note: {note}", file=sys.stderr)


def prepare_untrained(
    target: str,
    settings: "Settings",
    args: ParsedArgs,
    *,
    passes: int = 1,
    batch: int | None = None,
) -> _Scoring:
    """A model to score with the weights that training would start from."""
    from phalanx.assemble.prepare import refuse_missing_weights

    config = settings.config
    refuse_missing_weights(config)
    model, weights = config.model.model, config.model.init_weights
    what = model if target == model else f"{target}: {model}"
    begin = f"the weights of {weights}" if weights else "random weights, so the score is chance"
    one = _Model(target, batch, f"{what} on {config.data.data}, with {begin}", settings)
    return _plan_scoring([one], args, passes=passes)


def prepare_checkpoints(
    target: str,
    args: ParsedArgs,
    *,
    every: bool,
    passes: int = 1,
    kind: str | None = None,
    batch: int | None = None,
) -> _Scoring:
    """The checkpoints to score that a path stands for; kind: of noise instead of the data."""
    from phalanx.assemble.scoring_target import describe_val_split, use_random_target_data

    models = []
    for one in _read_checkpoints(target, args, every=every):
        scored = one if kind is None else use_random_target_data(one, kind)
        choice = f"{target}: {one.choice}" if one.choice else ""
        split = describe_val_split(one) if kind is None else ""
        note = "\n".join(filter(None, [choice, f"note: {split}" if split else ""]))
        models.append(_Model(str(one.start.path), batch, note, scored))
    return _plan_scoring(models, args, passes=passes)


def _plan_scoring(models: Sequence[_Model], args: ParsedArgs, *, passes: int) -> _Scoring:
    """The models with the plan of the first, made now to report errors before importing torch."""
    from phalanx.assemble.scoring_target import get_settings, plan_target

    first = models[0].target
    config, plan = get_settings(first).config, plan_target(first)
    return _Scoring(models=models, passes=passes, plan=plan, config=config, args=args)


def _read_checkpoints(target: str, args: ParsedArgs, *, every: bool) -> "list[ScorableCheckpoint]":
    """The checkpoints that a path stands for; with `every`, all of them and their averages."""
    from phalanx.assemble.scoring_target import read_checkpoint, refuse_missing_path
    from phalanx.engine.checkpoint_store import list_checkpoints, list_weights

    path, flags = Path(target), args.flags
    selection = args.values.get("--checkpoint")
    if every and selection:
        raise ConfigError(
            f"--checkpoint {selection}: --all scores every checkpoint; give one of the two options"
        )
    refuse_missing_path(target)
    checkpoints = list_checkpoints(path)
    found = list_weights(path if checkpoints else path / "checkpoints")
    if every and found:
        return [read_checkpoint(one, flags) for one in found]
    if checkpoints:
        raise CheckpointError(
            f"{path}: holds {len(checkpoints)} checkpoints; name one, or score each with --all"
        )
    # which says what to do if there is none
    return [read_checkpoint(path, flags, selection=selection)]


def print_score(
    name: str, scored: "ScoredModel", *, as_json: bool, batch: int | None = None
) -> None:
    """Print a score on one line; batch: the size of its batches, if it is to be printed."""
    from phalanx.report.records import to_json_number

    row, bad, rates, notes = scored
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    counted = rates[1:] or rates
    if as_json:
        facts = {"target": name, **asdict(row), "loss": to_json_number(row.loss)}
        facts |= {"images_per_second": scored.images_per_second, "bad_images": bad}
        facts |= {"batch_size": batch} if batch else {}
        facts |= {"rates": counted} if len(rates) > 1 else {}
        print(json.dumps(facts))
        return
    low, high = row.interval95
    fifth = f", top-5 {row.top5:.2%}" if row.top5 is not None else ""
    size = f" in batches of {batch:,}" if batch else ""
    spread = " (of the second pass)" if len(rates) == 2 else ""
    if len(counted) > 1:
        spread = f" ({min(counted):,.0f} to {max(counted):,.0f}, mean {fmean(counted):,.0f}, of "
        spread += f"{len(counted):,} passes after the first)"
    print(
        f"{name}{size}: top-1 {row.top1:.2%} ({low:.2%} to {high:.2%}){fifth} "
        f"of {format_plural(row.scored, 'image')}, loss {row.loss:.4f}, "
        f"{format_count(scored.images_per_second)} images/s{spread}"
    )
    for reason in bad.values():
        print(f"not counted: {reason}", file=sys.stderr)
