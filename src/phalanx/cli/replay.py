"""`phalanx replay`: repeats a step of a run, and names the module that went wrong."""

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
        "phalanx replay runs/demo": "the step a run diverged at; code 5 if it fails again",
        "phalanx replay runs/demo --step 10": "any step: what it gave, and with which images",
    },
)
def _run(args: ParsedArgs) -> int:
    """Repeat the step and print the result; the exit code is 5 if it is not finite."""
    args.refuse_problems()
    step = args.read_optional_int("--step", 0)

    from phalanx.assemble.blackbox import prepare_replay
    from phalanx.assemble.prepare import prepare_resume

    unused = {"engine": "native", "wandb": "false", "mlflow": "false"}  # may not be installed here
    prepared = prepare_resume(Path(args["run"]), args.flags | unused)
    prepared, step = prepare_replay(prepared, step)

    from phalanx.assemble.replay import replay

    result = replay(prepared, step)
    facts = {"run": str(prepared.run.path), **result.to_dict()}
    args.print_result(facts, lambda: _print_replay(result, prepared))
    return 0 if result.is_finite else DivergedError.exit_code


def _print_replay(result: "Replay", prepared: "PreparedRun") -> None:
    """Print the step, its numbers, and where the first non-finite number came from."""
    from phalanx.assemble.blackbox import describe_step_images

    start = prepared.start
    begin = f"from {start.checkpoint}" if start else "from the first weights"
    print(
        f"step {result.step:,} of {prepared.run.path}, repeated {begin}: "
        f"{_RECORDED[result.as_recorded]}"
    )
    print(
        f"loss {result.loss:g}, gradient norm {result.grad_norm:g}, learning rate {result.lr:g}, "
        f"loss scale {result.loss_scale:g}"
    )
    if result.finding is not None:
        print(result.finding.describe())
    elif result.is_finite:
        print("every output and every gradient is finite")
    if result.affected_images:
        print(f"seen with {len(result.affected_images):,} of {len(result.images):,} images:")
        print(describe_step_images(result.affected_images))
    else:
        print(f"images: {describe_step_images(result.images)}")
