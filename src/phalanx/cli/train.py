"""`phalanx train`: train a preset, resume a run, or fork one."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.crash import bug_reports
from phalanx.cli.validate import score_all, score_untrained
from phalanx.config.text import FALSE_WORDS
from phalanx.errors import ConfigError, Stopped
from phalanx.signals import Interrupted
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.report.folder import RunFolder


@command(
    "train",
    "Train a preset or a config file; resume a run bit for bit; or fork one.",
    Argument(
        "preset",
        "A preset by name, or a YAML file; without one, the dataset's own preset.",
        metavar="PRESET|FILE",
    ),
    Argument("--config", "The same, as a flag."),
    Argument("--resume", "Continue this run from its newest checkpoint; never changes the maths."),
    Argument("--fork", "Start a new run from a run's or checkpoint's state, with changed options."),
    Argument(
        "--fork-schedule",
        "With --fork: continue the learning rate's schedule, or restart it, warm-up and all.  "
        "[continue]",
    ),
    Argument(
        "--accept-changed-data",
        "With --resume: continue although images have changed since the run read them.",
        switch=True,
    ),
    Argument("--json", "Print the summary as JSON at the end.", switch=True),
    usage="[PRESET|FILE] [--option value]... | --resume RUN | --fork RUN",
    options=ALL_OPTIONS,
    examples={
        "phalanx train": "the demo: a small ResNet on built-in data, about a minute",
        "phalanx train demo --epochs 2 --run-dir runs/short": "the same, shorter",
        "phalanx train --data cifar10 --data-dir ~/cifar10": "that dataset's own preset",
        "phalanx train --resume runs/short": "continue after a kill, a signal or a power cut",
        "phalanx train --fork runs/short --run-dir runs/long --epochs 4": (
            "a longer run from the same weights"
        ),
    },
)
def _run(args: ParsedArgs) -> None:
    """Prepare without torch, then train."""
    preset = args.preset_name
    if sum(map(bool, (preset, args["--resume"], args["--fork"]))) > 1:
        raise ConfigError(
            "--resume continues a run, --fork starts a new one from its checkpoint, a preset "
            "starts from scratch: give one of them"
        )
    if args["--accept-changed-data"] and not args["--resume"]:
        raise ConfigError("--accept-changed-data: goes with --resume RUN; leave it out")
    if args["--fork-schedule"] and not args["--fork"]:
        raise ConfigError("--fork-schedule: goes with --fork RUN; leave it out")
    if args["--resume"] and args.flags.get("training", "").lower() in FALSE_WORDS:
        # every checkpoint is scored, as by `validate --all`
        args.refuse_problems()
        del args.flags["training"]
        return score_all(args["--resume"], args, every=True)
    if args["--resume"]:
        args.refuse_problems()
        from phalanx.assemble.prepare import prepare_resume, remake_finished

        run = Path(args["--resume"])
        if remake_finished(run, args.flags) is not None:
            return _print_result(run, as_json=args["--json"])
        accept = args["--accept-changed-data"]
        prepared = prepare_resume(run, args.flags, accept_changed_data=accept)
    elif args["--fork"]:
        args.refuse_problems()
        from phalanx.assemble.fork import prepare_fork

        prepared = prepare_fork(
            Path(args["--fork"]), args.flags, line=args.line, schedule=args["--fork-schedule"]
        )
    else:
        from phalanx.assemble.find_data import fetch_missing

        settings = fetch_missing(args.read_settings(), lambda line: print(line, file=sys.stderr))
        if not settings.config.train.training:
            return score_untrained(settings.config.model.model, settings, args)
        from phalanx.assemble.prepare import prepare_new

        prepared = prepare_new(settings, line=args.line)

    with _resumable(prepared.run), bug_reports(prepared.run.path):
        from phalanx.assemble.train import train

        train(prepared, stream=sys.stderr if args["--json"] else None)
    return _print_result(prepared.run.path, as_json=args["--json"])


@contextmanager
def _resumable(run: "RunFolder") -> Iterator[None]:
    """A block that may be stopped by a signal at any moment; the message says how to go on."""
    try:
        yield
    except (Stopped, Interrupted) as stop:
        what = str(stop)
        if isinstance(stop, Interrupted):  # outside of the loop: while opening or closing the run
            what = f"stopped by {stop} before the first step or after the last; nothing is lost"
        raise Stopped(
            f"{what}; continue with: phalanx train --resume {run.path}{run.plugin_flag}"
        ) from None


def _print_result(folder: Path, *, as_json: bool) -> None:
    """The last lines of a run: what it reached and where to look."""
    from phalanx.engine.checkpoint_store import newest_checkpoint
    from phalanx.report.folder import open_run
    from phalanx.report.records import read_scores
    from phalanx.report.summary import read_summary

    summary, rows = read_summary(folder), read_scores(folder)
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    steps = format_plural(summary.steps, "step")
    if not rows:
        print(f"trained {steps}; nothing was scored")
    for row in rows[-1:]:
        low, high = row.interval95
        print(
            f"top-1 {row.top1:.2%} of {format_plural(row.scored, 'image')} "
            f"(95 % interval {low:.2%} to {high:.2%}) after {steps}"
        )
    if summary.best:
        print(f"best checkpoint: step {summary.best.step:,}, top-1 {summary.best.top1:.2%}")
    if summary.bad_images:
        bad, them = len(summary.bad_images), "it" if len(summary.bad_images) == 1 else "them"
        print(f"{format_plural(bad, 'image')} could not be read; the report lists {them}")
    if newest_checkpoint(open_run(folder).checkpoints) is None:
        print(
            "no weights were kept, because of --ckpts-per-epoch 0; --ckpts-per-epoch 1 keeps them"
        )
    print(f"report: {open_run(folder).report}")
