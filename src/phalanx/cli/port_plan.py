"""The plan of a ported command, without torch, and what it lacks here."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from phalanx.catalog.models import MODELS
from phalanx.cli.command import ALL_OPTIONS, ParsedArgs, parse_args
from phalanx.dialects.table import TARGET
from phalanx.disk import expand_home
from phalanx.errors import DataError, UserError
from phalanx.plan.pipeline import count_stages
from phalanx.port.new_command import expand_variables, find_variables
from phalanx.port.ported_command import PortedCommand
from phalanx.port.preset_values import name_preset

if TYPE_CHECKING:
    from phalanx.assemble.dataset_summary import PlannedRun

_ABOUT_A_RUN = ("resume", "fork")
_PUBLISHED = "; the plan goes by published counts"


@dataclass(frozen=True)
class PortedPlan:
    """A new command with its plan, or why it has none."""

    answer: PortedCommand
    planned: "PlannedRun | None" = None
    problem: str = ""


def list_flags(name: str) -> Collection[str]:
    """The flags of a command of ours, without dashes."""
    from phalanx.cli.main import COMMANDS, load_command

    return load_command(name).all_names if name in COMMANDS else ALL_OPTIONS


def _add_absences(answer: PortedCommand) -> PortedCommand:
    """The answer with warnings about data and runs that are not here."""
    flags, environment = answer.command.flags, {**answer.command.variables, **os.environ}
    target = flags.get(TARGET, "")
    about_run = answer.command.name in ("validate", "average") and target not in MODELS
    about_run = about_run and not name_preset(target)
    names = [*_ABOUT_A_RUN, *([TARGET] if about_run else [])]
    found = []
    for name in ("data-dir", *names):
        path = expand_variables([flags.get(name, "")], environment)[0]
        if path and not expand_home(path).exists():
            what = "folder" if name == "data-dir" else "run"
            planned = _PUBLISHED * (what == "folder" and answer.command.name == "train")
            found.append(f"{path}: there is no such {what} here{planned}")
    for spec in filter(None, flags.get("spec", "").split(",")):
        path = expand_variables([spec], environment)[0]
        if not expand_home(path).exists():
            found.append(f"{path}: there is no such file here")
    unset = [name for name in find_variables(answer.command.words) if name not in environment]
    found += [f"${name}: is not set here; set it before you run the command" for name in unset]
    return replace(answer, warnings=(*answer.warnings, *found))


def port_by_data(port: Callable[[int | None], PortedCommand]) -> PortedCommand:
    """The answer, with steps counted from the images in --data-dir if that folder exists.

    It warns of what is not here. port: makes an answer from a number of training images; from
    published counts if it is None.
    """
    answer = port(None)
    images = _count_images(answer)
    return _add_absences(answer if images is None else port(images))


def _count_images(answer: PortedCommand) -> int | None:
    """The number of training images in the folder of a training command; None if there is none."""
    args = _parse_training(answer)
    folder = args.flags.get("data-dir") if args else None
    if args is None or not folder or not expand_home(folder).is_dir():
        return None
    from phalanx.assemble.dataset_summary import inspect_dataset

    try:
        return inspect_dataset(args.read_settings().config).counts.train_images
    except UserError:  # which the plan reports
        return None


def _parse_training(answer: PortedCommand) -> ParsedArgs | None:
    """The options of a command that starts a new run; None for other commands."""
    flags = answer.command.flags
    if answer.command.name != "train" or not flags.keys().isdisjoint({*_ABOUT_A_RUN, "help"}):
        return None
    if answer.config and not name_preset(flags[TARGET]):  # which a warning says
        return None
    from phalanx.cli.main import load_command

    environment = {**answer.command.variables, **os.environ}
    inner = answer.command.words
    inner = inner[inner.index("--") + 1 :] if inner[0] == "launch" else inner
    return parse_args(load_command("train"), expand_variables(inner[1:], environment))


def plan_ported(answer: PortedCommand) -> PortedPlan:
    """The plan of a training command, without torch, and without data that is not here."""
    args = _parse_training(answer)
    if args is None:
        return PortedPlan(answer)
    folder = args.flags.get("data-dir")
    if folder and not expand_home(folder).is_dir():
        del args.flags["data-dir"]

    from phalanx.assemble.dataset_summary import plan_new_run

    try:
        try:
            settings = args.read_settings()
            planned = plan_new_run(settings, without_data=True, without_torch=True)
        except DataError as error:  # the folder is there, and the data is not in it
            if args.flags.pop("data-dir", None) is None:
                raise
            settings = args.read_settings()
            planned = plan_new_run(settings, without_data=True, without_torch=True)
            answer = replace(answer, warnings=(*answer.warnings, f"{error}{_PUBLISHED}"))
    except UserError as error:
        return PortedPlan(answer, problem=str(error))
    return PortedPlan(answer, planned)


def list_ported_plan(plan: PortedPlan) -> list[tuple[str, str]]:
    """The plan as `phalanx plan` prints it."""
    if plan.planned is None:
        return []
    from phalanx.cli.plan import list_plan_rows

    settings, numbers, dataset = plan.planned
    rows = list_plan_rows(settings, numbers, None, dataset)
    stages = count_stages(settings.config)
    if stages > 1 and not any(name == "stages" for name, _ in rows):
        rows.append(("stages", f"{stages} of about the same cost; `phalanx plan` finds where"))
    return rows


def to_facts(plan: PortedPlan) -> dict[str, Any]:
    """The answer as plain values."""
    planned = plan.planned
    return {
        **plan.answer.to_dict(),
        "plan": planned.plan.to_dict() if planned else None,
        "problem": plan.problem or None,
        "resolved": planned.settings.config.flat() if planned else None,
        "notes": list(planned.plan.warnings) if planned else [],
    }
