"""`phalanx check`: the promises, tried with a config on this machine."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.command import ALL_OPTIONS, JSON_FLAG, PRESET_ARGS, Argument, ParsedArgs, command
from phalanx.cli.progress import ProgressLine
from phalanx.config.schema import Config
from phalanx.disk import convert_disk_errors
from phalanx.errors import Bug, ConfigError, UserError
from phalanx.units import format_plural

if TYPE_CHECKING:
    from phalanx.check.promises import Finding
    from phalanx.plan.plan import Plan

_FIXED = {  # options that the check sets itself, so that its runs are short, equal and local
    "determinism": "strict",
    "first-ckpt-epoch": "0",
    "training": "true",
    "profile": "off",
    **dict.fromkeys(("tensorboard", "wandb", "mlflow"), "false"),
}
_OWN = (*_FIXED, "steps", "epochs", "run-dir", "ckpts-per-epoch")
_MARKS = {"same": "ok", "different": "FAIL", "not tried": "-"}


@command(
    "check",
    "Train the same few steps several times: undisturbed, killed and resumed, with another number "
    "of workers, on another number of devices. All must end with the same bits. They train "
    "with --determinism strict, as a GPU otherwise adds in varying order.",
    *PRESET_ARGS,
    Argument("--steps", "How many steps to train.  [40]", default="40"),
    Argument("--dir", "Keep the runs in this new folder.  [a temporary one]"),
    JSON_FLAG,
    usage="[PRESET|FILE] [--option value]... [--steps N] [--dir DIR] [--json]",
    options=tuple(name for name in ALL_OPTIONS if name not in _OWN),
    examples={
        "phalanx check": "with the demo; about half a minute",
        "phalanx check folder-resnet18 --data-dir ~/photos": "with your data and machine",
        "phalanx check demo --replicas 2": "two replicas on one device, then on two",
    },
)
def _check(args: ParsedArgs) -> None:
    """Train, compare, and print a line for each way to train."""
    steps = args.read_int("--steps", 8)
    args.flags.update({"steps": str(steps), **_FIXED})
    settings = args.read_settings()
    if settings.missing:
        raise ConfigError(settings.missing)
    from phalanx.assemble.dataset_summary import plan_run

    plan, _ = plan_run(settings)
    # four checkpoints; and the same threads everywhere, as a CPU adds in their order
    args.flags["ckpts-per-epoch"] = str(plan.steps_per_epoch / (steps // 4))
    args.flags["threads"] = str(plan.threads)
    settings = args.read_settings()
    plan, _ = plan_run(settings)
    folder, keeps = _create_folder(args["--dir"]), args["--dir"] is not None
    findings: list[Finding] = []
    try:
        if not args["--json"]:
            images = format_plural(plan.global_batch, "image")
            print(f"{settings.config.model.model} on {plan.device}: {steps} steps of {images}")
        for finding in _try_variations(args, settings.config, plan, folder):
            findings.append(finding)
            if not args["--json"]:
                mark = _MARKS[finding.result]
                print(f"{mark:<5} {finding.what:<34} {finding.detail}", flush=True)
    except UserError:
        keeps = True  # the message names a log
        raise
    finally:
        differ = [finding for finding in findings if finding.result == "different"]
        if not (keeps or differ):
            shutil.rmtree(folder)
    if args["--json"]:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    if differ:
        whose = "a bug in Phalanx" + " or in the plugin" * ("plugin" in args.flags)
        raise Bug(f"{differ[0].what}: not the same bits, which is {whose}: {differ[0].detail}")


def _try_variations(
    args: ParsedArgs, config: Config, plan: "Plan", folder: Path
) -> Iterator["Finding"]:
    """The findings one by one; a line on a terminal says what is being trained."""
    from phalanx.check.promises import list_variations, try_variations

    preset = [args.preset_name] if args.preset_name else []
    words = [*preset, *(f"--{name}={text}" for name, text in args.flags.items())]
    progress = ProgressLine()
    variations = list_variations(config, plan)
    for finding in try_variations(
        words, variations, folder, begin=lambda what: progress.show(f"training {what} ...")
    ):
        if progress.is_terminal:
            progress.show("")
        yield finding


def _create_folder(wanted: str | None) -> Path:
    """The folder for the runs."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="phalanx-check-"))
    folder = Path(wanted)
    if folder.exists():
        raise ConfigError(f"--dir {wanted}: exists already; name a new folder")
    with convert_disk_errors(folder):
        folder.mkdir(parents=True)
    return folder
