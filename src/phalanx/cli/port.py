"""`phalanx port`: a command of an older program becomes one of ours."""

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.catalog.models import MODELS
from phalanx.cli.command import (
    ALL_OPTIONS,
    JSON_FLAG,
    REGISTERED,
    Argument,
    ParsedArgs,
    command,
    parse_args,
)
from phalanx.cli.port_text import print_answer
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.disk import write_atomically
from phalanx.errors import ConfigError, DataError, UserError
from phalanx.port.new_command import expand_variables, find_variables
from phalanx.port.old_command import is_old_command
from phalanx.port.ported import Ported, port_line
from phalanx.port.preset_values import has_preset
from phalanx.port.table import TARGET
from phalanx.port.words import OldLine, read_text_lines, read_words

if TYPE_CHECKING:
    from phalanx.assemble.dataset_summary import PlannedRun

_MAX_BYTES = 2**20  # of a script
_ABOUT_A_RUN = ("resume", "fork")
_ABSENT = {"data-dir": "there is no such folder here; the plan goes by published counts"}
_BOOLS = ("true", "false")


@dataclass(frozen=True)
class _PortedPlan:
    """The plan of a new command, or why there is none."""

    planned: "PlannedRun | None" = None
    problem: str = ""
    absent: tuple[str, ...] = ()  # data that should be in its folder, and is not


@command(
    "port",
    "Turn a command line of an older program into one of ours: prints the new command, what became "
    "of each option, and the plan. Options of ours before -- are laid over the result.",
    Argument(
        "old command",
        "As it is typed, after --; or in one pair of quotes; or on standard input.",
        metavar="-- COMMAND",
    ),
    Argument("--file", "A script to read the old commands from."),
    Argument(
        "--dialect",
        "Which program it is for: lightning, pytorch, tf1, tf2 or popart.  [told by its script and "
        "options]",
    ),
    Argument("--run", "Run the new command.", switch=True),
    Argument("--local", "Leave hosts out: everything runs on this machine.", switch=True),
    Argument("--save", "Write the options of a training command to this YAML file."),
    JSON_FLAG,
    usage="[--option value]... [--run] [--local] [--save FILE] [--json] -- OLD COMMAND",
    options=ALL_OPTIONS,
    examples={
        "phalanx port -- python3 train.py --config mk2_resnet50_gn_16ipus --data-dir DATA": (
            "TensorFlow 1's group norm recipe"
        ),
        "phalanx port --file run.sh": "every command in a script",
        "phalanx port --run --local --steps 10 --data generated -- poprun --num-replicas 4 python3 "
        "train.py --model resnet --dataset imagenet": "ten steps of it, here",
        "phalanx port --save mine.yaml -- python train.py --model resnet --model-size 50": (
            "then: phalanx train mine.yaml"
        ),
        "pbpaste | phalanx port": "what was copied from a README",
    },
    takes_command=True,
)
def _run(args: ParsedArgs) -> int:
    """Port every command that was given; run or save the result where that is asked for."""
    own_words, old_words = _split_own_words(args.words)
    own = parse_args(REGISTERED["port"], own_words)
    own.refuse_problems()
    if own["--run"] and own["--json"]:
        raise ConfigError("--json: is for the answer, --run for the run; give one of them")
    lines, skipped = _read_lines(own, old_words)
    overrides = {SPELLINGS[name]: text for name, text in own.flags.items()}
    answers = []
    for line in lines:
        with _placed(line, one_of=len(lines)):
            answer = port_line(
                line,
                _list_flags,
                dialect=own["--dialect"],
                overrides=overrides,
                local=own["--local"],
            )
        answers.append(_add_absences(answer))
    if own["--save"]:
        _save(own["--save"], answers)
    if own["--run"]:
        return _run_all(answers)
    plans = [_plan(answer) for answer in answers]
    answers = [
        replace(answer, warnings=(*answer.warnings, *plan.absent))
        for answer, plan in zip(answers, plans, strict=True)
    ]
    if own["--json"]:
        facts = [_to_facts(answer, plan) for answer, plan in zip(answers, plans, strict=True)]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=2))
        return 0
    for place, (answer, plan) in enumerate(zip(answers, plans, strict=True)):
        print("\n" * bool(place), end="")
        print_answer(answer, _list_plan_rows(plan), plan.problem)
    for text in skipped:
        print(f"left out: {text}", file=sys.stderr)
    return 0


@contextmanager
def _placed(line: OldLine, *, one_of: int) -> Iterator[None]:
    """A block whose mistakes are told with the line of the command, where there are several."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"line {line.line}: {error}" if one_of > 1 else str(error)) from None


def _split_own_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own flags, which come first, and the old command."""
    switches = {a.name for a in REGISTERED["port"].arguments if a.switch}
    rest, own = list(words), []
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        own.append(word)
        name = SPELLINGS.get(word.removeprefix("--"), "")
        is_bool = bool(name) and OPTIONS[name].type is bool
        has_value = "=" in word or word in switches
        if not has_value and rest and (not is_bool or rest[0].lower() in _BOOLS):
            own.append(rest.pop(0))
    return own, rest


def _read_lines(own: ParsedArgs, old_words: list[str]) -> tuple[list[OldLine], list[str]]:
    """The old commands, and what else stood among them."""
    if own["--file"]:
        if old_words:
            raise ConfigError(f"--file {own['--file']}: a command is given, too; leave one out")
        found = read_text_lines(_read_script(Path(own["--file"])))
    elif old_words:
        found = read_words(old_words)
    elif sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(
            "give an old command after --, as in: phalanx port -- python3 train.py --model resnet; "
            "or a script: phalanx port --file run.sh"
        )
    else:
        found = read_text_lines(sys.stdin.read(_MAX_BYTES))
    lines = [line for line in found if is_old_command(line.words)] if len(found) > 1 else found
    if not lines:
        raise ConfigError("there is no command in it; paste one that starts python or poprun")
    skipped = [f"line {line.line}: {' '.join(line.words)}" for line in found if line not in lines]
    return lines, skipped


def _read_script(path: Path) -> str:
    """The text of a script."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"--file {path}: is larger than any script of commands")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--file {path}: not UTF-8 text") from None


def _list_flags(name: str) -> Collection[str]:
    """The flags of a command of ours, without dashes."""
    from phalanx.cli.main import COMMANDS

    if name not in COMMANDS:
        return ALL_OPTIONS
    import_module(f"phalanx.cli.{COMMANDS[name][0]}")
    found = REGISTERED[name]
    return {*found.options, *(a.name.removeprefix("--") for a in found.arguments)}


def _add_absences(answer: Ported) -> Ported:
    """The answer with warnings about data and runs that are not here."""
    flags, environment = answer.command.flags, {**answer.command.variables, **os.environ}
    target = flags.get(TARGET, "")
    about_run = answer.command.name in ("validate", "average") and target not in MODELS
    about_run = about_run and not has_preset(target)
    names = [*_ABOUT_A_RUN, *([TARGET] if about_run else [])]
    found = []
    for name in ("data-dir", *names):
        path = expand_variables([flags.get(name, "")], environment)[0]
        if path and not Path(path).expanduser().exists():
            found.append(f"{path}: {_ABSENT.get(name, 'there is no such run here')}")
    unset = [name for name in find_variables(answer.command.words) if name not in environment]
    found += [f"${name}: is not set here; set it before you run the command" for name in unset]
    return replace(answer, warnings=(*answer.warnings, *found))


def _plan(answer: Ported) -> _PortedPlan:
    """The plan of a training command, without torch, and without data that is not here."""
    flags = answer.command.flags
    if answer.command.name != "train" or not flags.keys().isdisjoint({*_ABOUT_A_RUN, "help"}):
        return _PortedPlan()
    if answer.config and not has_preset(flags[TARGET]):  # which a warning says
        return _PortedPlan()
    _list_flags("train")
    environment = {**answer.command.variables, **os.environ}
    inner = answer.command.words
    inner = inner[inner.index("--") + 1 :] if inner[0] == "launch" else inner
    args = parse_args(REGISTERED["train"], expand_variables(inner[1:], environment))
    folder = args.flags.get("data-dir")
    if folder and not Path(folder).expanduser().is_dir():
        del args.flags["data-dir"]

    from phalanx.assemble.dataset_summary import plan_new_run

    absent: tuple[str, ...] = ()
    try:
        try:
            settings = args.read_settings()
            planned = plan_new_run(settings, without_data=True, without_torch=True)
        except DataError as error:  # the folder is there, and the data is not in it
            if args.flags.pop("data-dir", None) is None:
                raise
            absent = (f"{error}; the plan goes by published counts",)
            settings = args.read_settings()
            planned = plan_new_run(settings, without_data=True, without_torch=True)
    except UserError as error:
        return _PortedPlan(problem=str(error))
    return _PortedPlan(planned, absent=absent)


def _list_plan_rows(plan: _PortedPlan) -> list[tuple[str, str]]:
    """The plan as `phalanx plan` prints it."""
    if plan.planned is None:
        return []
    from phalanx.cli.plan import list_plan_rows

    settings, numbers, dataset = plan.planned
    return list_plan_rows(settings, numbers, None, dataset)


def _to_facts(answer: Ported, plan: _PortedPlan) -> dict[str, Any]:
    """The answer as plain values."""
    planned = plan.planned
    more: dict[str, Any] = {
        "plan": planned.plan.facts() if planned else None,
        "problem": plan.problem or None,
    }
    more["resolved"] = planned.settings.config.flat() if planned else None
    more["notes"] = list(planned.plan.warnings) if planned else []
    return {**answer.facts(), **more}


def _save(name: str, answers: Sequence[Ported]) -> None:
    """Write the options of one training command."""
    path, answer = Path(name), answers[0]
    if len(answers) > 1 or answer.command.name != "train" or TARGET not in answer.command.flags:
        raise ConfigError(
            f"--save {name}: holds the options of one training command, and this is "
            f"{'several' if len(answers) > 1 else 'none'}; leave it out"
        )
    if path.exists():
        raise ConfigError(f"--save {name}: exists already; remove it, or name another file")
    write_atomically(path, answer.command.dump_yaml(f"from {answer.title}: {answer.old}"))
    print(f"wrote {path}; train it with: phalanx train {path}", file=sys.stderr)


def _run_all(answers: Sequence[Ported]) -> int:
    """Run the new commands one after the other, up to the first that fails."""
    from phalanx.cli.main import find_command, run_command

    for answer in answers:
        for warning in answer.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        problem = _plan(answer).problem  # told before any data is looked for, or fetched
        if problem:
            raise ConfigError(problem)
        print(f"running: {answer.command.line}", file=sys.stderr)
        environment = {**answer.command.variables, **os.environ}
        os.environ.update(answer.command.variables)
        code = run_command(*find_command(expand_variables(answer.command.words, environment)))
        if code:
            return code
    return 0
