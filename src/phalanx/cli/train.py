"""`phalanx train`: train a preset, resume a run, or fork one."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, Argument, ParsedArgs, command
from phalanx.cli.crash import report_bugs, report_rank_errors
from phalanx.cli.validate import prepare_checkpoints, prepare_untrained
from phalanx.config.text import FALSE_WORDS
from phalanx.errors import ConfigError, FailedElsewhere, OutOfMemory, PluginBug, Stopped
from phalanx.plan.world import World, read_world
from phalanx.signals import Interrupted
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.assemble.prepare import PreparedRun
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
        "phalanx train demo --tensorboard --wandb": "show it there, too; see docs/trackers.md",
        "phalanx train --resume runs/short": "continue after a kill, a signal or a power cut",
        "phalanx train --fork runs/short --run-dir runs/long --epochs 4": (
            "a longer run from the same weights"
        ),
    },
)
def _run(args: ParsedArgs) -> int:
    """Prepare without torch, then train: in this process, on new ranks, or as a launcher's rank."""
    world = read_world()
    if world is not None:
        return _run_as_rank(args, world)
    prepared = _prepare(args)
    if prepared is None:
        return 0
    if prepared.plan.layout.ranks > 1:
        from phalanx.assemble.rank_launch import start_ranks

        flags = args.flags if args["--resume"] else {}
        code = start_ranks(prepared, flags, to_stderr=args["--json"])
        if code:
            return code
    else:
        with _explain_resume(prepared.run):
            from phalanx.assemble.rank_launch import discard_on

            folder = prepared.run.path
            with discard_on(OutOfMemory, PluginBug, prepared=prepared), report_bugs(folder):
                from phalanx.assemble.train import train
                from phalanx.lightning.engine_choice import choose_fit

                stream = sys.stderr if args["--json"] else None
                train(prepared, stream=stream, fit=choose_fit(prepared.config))
    _print_result(prepared.run.path, as_json=args["--json"])
    return 0


def _run_as_rank(args: ParsedArgs, world: World) -> int:
    """Train as one of several ranks, of which only the first prints."""
    from phalanx.assemble.prepare import prepare_resume
    from phalanx.assemble.rank_launch import open_run_as_rank, train_as_rank

    def reopen(run: Path) -> "PreparedRun":
        plugin = {name: value for name, value in args.flags.items() if name == "plugin"}
        flags = args.flags if args["--resume"] else plugin
        return prepare_resume(run, flags, accept_changed_data=args["--accept-changed-data"])

    try:
        with report_rank_errors(world, None) if world.rank else nullcontext():
            said = {**args.flags, "preset": args.preset_name or ""}
            opened = open_run_as_rank(world, lambda: _prepare(args), reopen, said)
        if opened is None:
            return 0
        prepared, store = opened
        stream = sys.stderr if args["--json"] else None
        with _explain_resume(prepared.run), report_rank_errors(world, prepared.run.path):
            from phalanx.lightning.engine_choice import choose_fit

            has_result = train_as_rank(world, prepared, store, stream=stream, choose_fit=choose_fit)
    except FailedElsewhere as end:
        return end.exit_code
    except Stopped as end:
        if world.rank:  # rank 0 prints it
            return end.exit_code
        raise
    if has_result and not world.supervised:
        _print_result(prepared.run.path, as_json=args["--json"])
    return 0


def _prepare(args: ParsedArgs) -> "PreparedRun | None":
    """The run to train, on disk; None if there is nothing to train, which was reported."""
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
    if args["--resume"]:
        return _prepare_resume(args)
    if args["--fork"]:
        args.refuse_problems()
        from phalanx.assemble.fork import prepare_fork

        return prepare_fork(
            Path(args["--fork"]), args.flags, line=args.line, schedule=args["--fork-schedule"]
        )
    from phalanx.assemble.find_data import fetch_missing_dataset

    settings = fetch_missing_dataset(
        args.read_settings(), lambda line: print(line, file=sys.stderr)
    )
    if not settings.config.train.training:
        prepare_untrained(settings.config.model.model, settings, args).run()
        return None
    from phalanx.assemble.prepare import prepare_new_run

    return prepare_new_run(settings, line=args.line)


def _prepare_resume(args: ParsedArgs) -> "PreparedRun | None":
    """An existing run; None if it is finished or only had to be scored, which was done."""
    args.refuse_problems()
    if args.flags.get("training", "").lower() in FALSE_WORDS:
        del args.flags["training"]
        prepare_checkpoints(args["--resume"], args, every=True).run()  # as by `validate --all`
        return None
    from phalanx.assemble.prepare import prepare_resume, rebuild_finished_report

    run = Path(args["--resume"])
    if rebuild_finished_report(run, args.flags) is not None:
        world = read_world()
        if world is None or not world.supervised:  # else our supervisor prints it
            _print_result(run, as_json=args["--json"])
        return None
    return prepare_resume(run, args.flags, accept_changed_data=args["--accept-changed-data"])


@contextmanager
def _explain_resume(run: "RunFolder") -> Iterator[None]:
    """Context that a signal may stop at any moment; the message says how to continue."""
    try:
        yield
    except (Stopped, Interrupted) as stop:
        what = str(stop)
        if isinstance(stop, Interrupted):  # outside of the loop: while opening or closing the run
            what = f"stopped by {stop}; everything up to the last checkpoint is kept"
        raise Stopped(f"{what}; continue with: {run.resume_command}") from None


def _print_result(folder: Path, *, as_json: bool) -> None:
    """Print the last lines of a run: its score, and where its report is."""
    from phalanx.engine.checkpoint_store import find_newest_checkpoint
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
            f"(95% interval {low:.2%} to {high:.2%}) after {steps}"
        )
    if summary.best:
        print(f"best checkpoint: step {summary.best.step:,}, top-1 {summary.best.top1:.2%}")
    if summary.bad_images:
        bad, them = len(summary.bad_images), "it" if len(summary.bad_images) == 1 else "them"
        print(f"{format_plural(bad, 'image')} could not be read; the report lists {them}")
    if find_newest_checkpoint(open_run(folder).checkpoints) is None:
        print(
            "no weights were kept, because of --ckpts-per-epoch 0; --ckpts-per-epoch 1 keeps them"
        )
    print(f"report: {open_run(folder).report}")
