"""`phalanx validate`: score a run, a checkpoint, a folder of checkpoints or a fresh model."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.cli.command import LIMIT_OPTIONS, MODEL_OPTIONS, Argument, ParsedArgs, command
from phalanx.errors import CheckpointError, ConfigError, suggest

if TYPE_CHECKING:
    from phalanx.report.records import ScoreRow

_SCORING_OPTIONS = (
    "data", "data-dir", "valid-batch-size", "workers", "device", "precision", "threads", "seed",
    "flip-averaging", "eval-crop", "normalization", "exif-orientation", *LIMIT_OPTIONS,
)  # fmt: skip


@command(
    "validate",
    "Score a run, a checkpoint, a folder of checkpoints or a fresh model; every image counts once.",
    Argument(
        "target",
        "A run (its newest checkpoint), a checkpoint, a folder of them, or a model's name.",
        metavar="RUN|...",
        required=True,
    ),
    Argument(
        "--all", "Score every checkpoint in there, and the averages of their weights.", switch=True
    ),
    Argument("--json", "Print one JSON object per score.", switch=True),
    usage="RUN|CHECKPOINT|FOLDER|MODEL [--all] [--option value]...",
    options=(*_SCORING_OPTIONS, "image-size", "plugin", *MODEL_OPTIONS),
    examples={
        "phalanx validate runs/demo": "the newest checkpoint of a run",
        "phalanx validate runs/demo/checkpoints/best --json": "one checkpoint, for a script",
        "phalanx validate runs/demo --all": "all checkpoints of a run, averages too",
        "phalanx validate runs/cats --data-dir more-cats": "other images of its classes",
        "phalanx validate resnet8": "what an untrained model scores",
        "phalanx validate resnet50 --init-weights resnet50.safetensors "
        "--data folder --data-dir ~/imagenet": "what weights from elsewhere score",
    },
)
def _run(args: ParsedArgs) -> None:
    """Score what was named, one line each."""
    args.refuse_problems()
    args.load_plugins()
    target = args["target"]
    if (target in MODELS or target in OLD_NAMES) and not Path(target).exists():
        from phalanx.assemble.score import open_fresh, score

        file = args.flags.get("init-weights")
        start = f"weights from {file}" if file else "random weights"
        print(f"{target}: a fresh model, {start}", file=sys.stderr)
        print_score(target, *score(open_fresh(target, args.flags)), as_json=args["--json"])
        return
    _refuse_model_options(args)
    score_all(target, args.flags, every=args["--all"], as_json=args["--json"])


def _refuse_model_options(args: ParsedArgs) -> None:
    """A checkpoint brings its own model."""
    for name in ("image-size", *MODEL_OPTIONS):
        if name in args.flags:
            raise ConfigError(
                f"--{name}: {args['target']} says itself what its model is like; "
                "only a fresh model takes such options, as in: phalanx validate resnet50"
            )


def score_all(target: str, flags: Mapping[str, str], *, every: bool, as_json: bool) -> None:
    """Score the checkpoints that a path stands for; mistakes are reported before any of them."""
    from phalanx.assemble.scorable import read_checkpoint

    checkpoints = [read_checkpoint(path, flags) for path in _find_checkpoints(target, every=every)]

    from phalanx.assemble.score import score_checkpoint

    for checkpoint in checkpoints:
        scored = score_checkpoint(checkpoint)
        print_score(str(checkpoint.start.path), *scored, as_json=as_json)


def _find_checkpoints(target: str, *, every: bool) -> list[Path]:
    """The checkpoints that a path stands for; with `every`, also the averages beside them."""
    from phalanx.assemble.scorable import find_checkpoint
    from phalanx.engine.checkpoint_store import AVERAGE_WEIGHTS, list_checkpoints, list_weights

    path = Path(target)
    if not path.exists() and "/" not in target:
        raise CheckpointError(
            f"{target}: no such run, checkpoint or model; {suggest(target, MODELS)}"
        )
    checkpoints = list_checkpoints(path)
    found = list_weights(path if checkpoints else path / "checkpoints")
    if every and found:
        return found
    if checkpoints:
        raise CheckpointError(
            f"{path}: holds {len(checkpoints)} checkpoints; name one, or score each with --all"
        )
    if path.name == AVERAGE_WEIGHTS and path.is_file():
        return [path]
    return [find_checkpoint(path)]  # knows what to say where there is none


def print_score(name: str, row: "ScoreRow", bad: dict[str, str], *, as_json: bool) -> None:
    """One score as a line."""
    if as_json:
        print(json.dumps({"target": name, **asdict(row), "bad_images": bad}))
        return
    low, high = row.interval95
    fifth = f", top-5 {row.top5:.2%}" if row.top5 is not None else ""
    print(
        f"{name}: top-1 {row.top1:.2%} ({low:.2%} to {high:.2%}){fifth} "
        f"of {row.scored:,} images, loss {row.loss:.4f}"
    )
    for reason in bad.values():
        print(f"not counted: {reason}", file=sys.stderr)
