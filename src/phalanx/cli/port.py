"""`phalanx port`: a command of an older program becomes one of ours."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from phalanx.cli.command import (
    ALL_OPTIONS,
    JSON_FLAG,
    REGISTERED_COMMANDS,
    Argument,
    ParsedArgs,
    command,
    parse_args,
)
from phalanx.cli.port_plan import (
    list_flags,
    list_ported_plan,
    plan_ported,
    port_by_data,
    to_facts,
)
from phalanx.cli.port_text import print_answer
from phalanx.config.schema import OPTIONS, SPELLINGS
from phalanx.config.text import parse_option_text
from phalanx.dialects.table import TARGET
from phalanx.disk import write_atomically
from phalanx.errors import ConfigError
from phalanx.port.new_command import expand_variables
from phalanx.port.old_command import is_old_command
from phalanx.port.ported_command import PortedCommand, port_line
from phalanx.port.shell_text import OldLine, read_text_lines, read_words

_MAX_BYTES = 2**20  # of a script


@command(
    "port",
    "Translate a command line of an older program: prints the new command, what became of each "
    "option, and the plan. Options before -- override the result.",
    Argument(
        "old command",
        "As it is typed, after --; or in one pair of quotes; or on standard input.",
        metavar="-- COMMAND",
    ),
    Argument("--file", "A script to read the old commands from."),
    Argument(
        "--configs",
        "An old configs.yml, whose entries become presets: all, or those named after it.",
    ),
    Argument(
        "--dialect",
        "Which program it is for: lightning, pytorch, tf1, tf2 or popart.  [recognised by its "
        "script and options]",
    ),
    Argument("--run", "Run the new command.", switch=True),
    Argument("--local", "Leave hosts out: everything runs on this machine.", switch=True),
    Argument(
        "--save",
        "Write the options of a training command to this YAML file; with --configs, a preset for "
        "each entry into this folder.",
    ),
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
        "phalanx port --configs configs.yml --save presets": (
            "each entry as a preset; then: phalanx train --config NAME"
        ),
        "pbpaste | phalanx port": "what was copied from a README",
    },
    takes_command=True,
)
def _run(args: ParsedArgs) -> int:
    """Port every command that was given; run or save the result where that is asked for."""
    own_words, old_words = _split_own_words(args.words)
    if any(word.partition("=")[0] == "--configs" for word in own_words):
        from phalanx.cli.port_configs import port_configs

        own_words, names = _split_around_names(args.words)
        own = parse_args(REGISTERED_COMMANDS["port"], own_words)
        own.refuse_problems()
        return port_configs(own, names)
    own = parse_args(REGISTERED_COMMANDS["port"], own_words)
    own.refuse_problems()
    if own["--run"] and own["--json"]:
        raise ConfigError("--json: prints the translation, and --run runs it; give one of them")
    lines, skipped = _read_lines(own, old_words)
    answers = []
    for line in lines:
        with _name_line_in_errors(line, count=len(lines)):
            answers.append(_port(line, own))
    if own["--save"]:
        _save(own["--save"], answers)
    if own["--run"]:
        _print_skipped(skipped)
        return _run_all(answers)
    plans = [plan_ported(answer) for answer in answers]
    if own["--json"]:
        facts = [to_facts(plan) for plan in plans]
        print(json.dumps(facts[0] if len(facts) == 1 else facts, indent=2))
    else:
        for place, plan in enumerate(plans):
            print("\n" * bool(place), end="")
            print_answer(plan.answer, list_ported_plan(plan), plan.problem)
    _print_skipped(skipped)
    return 0


def _print_skipped(skipped: Sequence[str]) -> None:
    """Name the commands of a script that no older program runs."""
    for text in skipped:
        print(f"left out: {text}", file=sys.stderr)


def _port(line: OldLine, own: ParsedArgs) -> PortedCommand:
    """The answer for one command."""
    overrides = {SPELLINGS[name]: text for name, text in own.flags.items()}
    return port_by_data(
        lambda images: port_line(
            line,
            list_flags,
            dialect=own["--dialect"],
            overrides=overrides,
            local=own["--local"],
            images=images,
        )
    )


@contextmanager
def _name_line_in_errors(line: OldLine, *, count: int) -> Iterator[None]:
    """A block whose mistakes are told with the line of the command, where there are several."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"line {line.line}: {error}" if count > 1 else str(error)) from None


def _split_own_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own flags, which come first, and the old command."""
    switches = {a.name for a in REGISTERED_COMMANDS["port"].arguments if a.switch}
    rest, own = list(words), []
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        own.append(word)
        name = SPELLINGS.get(word.removeprefix("--"), "")
        has_value = "=" in word or word in switches
        follows = bool(rest) and rest[0] != "--"
        if not has_value and follows and (not name or _can_be_value(name, rest[0])):
            own.append(rest.pop(0))
    return own, rest


def _can_be_value(name: str, word: str) -> bool:
    """Whether a word behind an option is its value; one that can do without looks at the word."""
    if OPTIONS[name].type is not bool:
        return True
    try:
        parse_option_text(name, word)
    except ValueError:
        return False
    return True


def _split_around_names(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own flags, and the names among them."""
    own, names, rest = list[str](), list[str](), list(words)
    while rest:
        flags, rest = _split_own_words(rest)
        own += flags
        names += rest[:1]
        del rest[:1]
    return own, names


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
    return lines, list(dict.fromkeys(skipped))


def _read_script(path: Path) -> str:
    """The text of a script."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(
                f"--file {path}: is too large for a script; name the file with the old commands"
            )
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--file {path}: not UTF-8 text; save it as UTF-8") from None


def _save(name: str, answers: Sequence[PortedCommand]) -> None:
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
    line = replace(answer.command, flags={TARGET: str(path)}).line
    print(f"wrote {path}; train it with: {line}", file=sys.stderr)


def _run_all(answers: Sequence[PortedCommand]) -> int:
    """Run the new commands one after the other, up to the first that fails."""
    from phalanx.cli.main import find_command, run_command

    for answer in answers:
        for warning in answer.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        problem = plan_ported(answer).problem  # told before any data is looked for, or fetched
        if problem:
            raise ConfigError(problem)
        print(f"running: {answer.command.line}", file=sys.stderr)
        environment = {**answer.command.variables, **os.environ}
        os.environ.update(answer.command.variables)
        code = run_command(*find_command(expand_variables(answer.command.words, environment)))
        if code:
            return code
    return 0
