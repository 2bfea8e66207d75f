"""`phalanx replay`: repeat a step of a run, and name what went wrong in it."""

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import JSON_FLAG, Argument, ParsedArgs, command
from phalanx.errors import DivergedError

if TYPE_CHECKING:
    from phalanx.assemble.prepare import PreparedRun
    from phalanx.assemble.replay import Replay

_REPLAY_OPTIONS = ("data-dir", "workers", "device", "plugin")
_RECORDED = {
    True: "bit for bit as it was recorded",
    False: "not bit for bit as it was recorded; --determinism strict gives the same every time",
    None: "it was not recorded",
}


@command(
    "replay",
    "Repeat a step of a run from the checkpoint before it, and name the first module "
    "and the images for which a number was not finite. Nothing is written into the run.",
    Argument("run", "A run folder.", required=True),
    Argument("--step", "The step to repeat, counted from 1.  [the one the run failed at]"),
    JSON_FLAG,
    usage="RUN [--step N] [--json]",
    options=_REPLAY_OPTIONS,
    examples={
        "phalanx replay runs/demo": "the step a run diverged at; ends with code 5 if it does",
        "phalanx replay runs/demo --step 10": "any step: what it gave, and with which images",
    },
)
def _run(args: ParsedArgs) -> int:
    """Repeat the step and say what it gave; 5 where it is not sound."""
    args.refuse_problems()
    step = None if args["--step"] is None else args.read_int("--step", 0)

    from phalanx.assemble.blackbox import prepare_replay
    from phalanx.assemble.prepare import prepare_resume

    unused = {"engine": "native", "wandb": "false", "mlflow": "false"}  # what they need may be gone
    prepared = prepare_resume(Path(args["run"]), args.flags | unused)
    prepared, step = prepare_replay(prepared, step)

    from phalanx.assemble.replay import replay

    seen = replay(prepared, step)
    facts = {"run": str(prepared.run.path), **seen.as_json()}
    args.print_result(facts, lambda: _print_replay(seen, prepared))
    return 0 if seen.is_finite else DivergedError.exit_code


def _print_replay(seen: "Replay", prepared: "PreparedRun") -> None:
    """What was repeated, its numbers, and where the first that is not finite came from."""
    from phalanx.assemble.blackbox import describe_step_images

    start = prepared.start
    begin = f"from {start.checkpoint}" if start else "from the first weights"
    print(
        f"step {seen.step:,} of {prepared.run.path}, repeated {begin}: "
        f"{_RECORDED[seen.as_recorded]}"
    )
    print(
        f"loss {seen.loss:g}, gradient norm {seen.grad_norm:g}, learning rate {seen.lr:g}, "
        f"loss scale {seen.loss_scale:g}"
    )
    if seen.finding is not None:
        print(seen.finding.describe())
    elif seen.is_finite:
        print("every output and every gradient is finite")
    if seen.affected_images:
        print(f"seen with {len(seen.affected_images):,} of {len(seen.images):,} images:")
        print(describe_step_images(seen.affected_images))
    else:
        print(f"images: {describe_step_images(seen.images)}")
