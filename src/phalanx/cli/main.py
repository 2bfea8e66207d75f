"""The console script: finds the command, runs it, and turns errors into a line and an exit code."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from phalanx.cli.crash import describe_less_memory, report_bugs
from phalanx.errors import (
    EXIT_LEFT_AT_ONCE,
    EXIT_STOPPED,
    Bug,
    ConfigError,
    OutOfMemory,
    Stopped,
    UserError,
    suggest,
)
from phalanx.plan.world import is_first_rank
from phalanx.report.terminal import OutputClosed, escape_output
from phalanx.signals import Interrupted, interrupt_on_signals

if TYPE_CHECKING:
    from phalanx.cli.command import Command

COMMANDS = {  # name: (module, what it does)
    "train": ("train", "train a model, resume a run, or fork one"),
    "validate": ("validate", "score a run, a checkpoint, a folder of them, a preset or a model"),
    "average": ("average", "average the last checkpoints of a run, and score the result"),
    "replay": ("replay", "repeat a step and name the module and image that went wrong"),
    "predict": ("predict", "classify your own images"),
    "export": ("export", "write a model for other programs: ONNX, pt2, safetensors, timm, Triton"),
    "serve": ("serve", "serve a model over HTTP"),
    "request": ("request", "send images to a server, and measure it"),
    "check": ("check", "prove on this machine that runs resume and repeat bit for bit"),
    "plan": ("plan", "show every derived number before anything runs"),
    "report": ("runs", "rebuild a run's report.html"),
    "compare": ("runs", "show where two runs differ"),
    "track": ("track", "send a run's records to TensorBoard, wandb or MLflow"),
    "data list": ("data", "list the data that can be read, or what is in a folder"),
    "data fetch": ("data", "download a published dataset"),
    "data build": ("data_build", "convert data to another format"),
    "data verify": ("data_verify", "check every image and report what is wrong"),
    "data show": ("data", "draw the augmented batch of a step"),
    "data bench": ("bench", "time the input pipeline and find what limits training"),
    "models ls": ("models", "list the models"),
    "models show": ("models", "show what each unit of a model holds and costs"),
    "presets ls": ("presets", "list the presets"),
    "presets cat": ("presets", "print a preset"),
    "presets cp": ("presets", "copy a preset to edit it"),
    "find lr": ("find", "suggest a learning rate by increasing it over real steps"),
    "find batch-size": ("find", "find the micro-batch that fits, and the fastest one"),
    "sweep": ("sweep", "search training options: grid, random or TPE, with pruning"),
    "bench": ("bench_spec", "run the benchmarks in a file: bench --spec FILE"),
    "bench train": ("bench_train", "measure images/s of training, and whether data limits it"),
    "bench infer": ("bench_train", "measure images/s and latency of inference"),
    "bench serve": ("bench_serve", "find the batching settings of a server for a latency goal"),
    "bench overhead": ("bench", "compare training with a bare PyTorch loop"),
    "bench determinism": ("bench", "measure what --determinism costs"),
    "bench engines": ("bench_engines", "compare --engine lightning with the native loop"),
    "launch": ("launch", "start a command on several hosts, or write a job for a scheduler"),
    "port": ("port", "translate a command of an older program"),
    "port weights": ("port_weights", "convert weights of an older program"),
    "doctor": ("doctor", "check what this machine has and what is missing"),
}
_TAKES_ANY_WORD = ("port",)  # commands whose first word may be anything
_AGAIN = "run the same command again to continue"
# commands that keep what they have when a signal stops them; all others have changed nothing
_KEPT_WHEN_STOPPED: dict[str | None, str] = {
    "train": f"nothing is lost: {_AGAIN}",
    "average": f"the run's checkpoints are intact: {_AGAIN}",
    "data build": f"what has been built is kept: {_AGAIN}",
    "data fetch": f"what has been downloaded is kept: {_AGAIN}",
    "sweep": f"finished trials are kept: {_AGAIN}",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code says how it ended (see phalanx.errors)."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, rest = find_command(words)
    with interrupt_on_signals(whole_process=argv is None):
        try:
            return _run_to_exit_code(name, rest)
        except KeyboardInterrupt as stop:
            how = f"stopped by {stop}" if isinstance(stop, Interrupted) else "stopped"
            if is_first_rank():
                kept = _KEPT_WHEN_STOPPED.get(name, "nothing was changed")
                _print_error(name, f"{how}; {kept}")
            return EXIT_STOPPED if name in _KEPT_WHEN_STOPPED else EXIT_LEFT_AT_ONCE


def _run_to_exit_code(name: str | None, words: list[str]) -> int:
    """Run one command, and turn what it raises into a message and an exit code."""
    try:
        with escape_output(), report_bugs():
            return run_command(name, words)
    except OutOfMemory as error:
        _print_error(name, f"{error}; {describe_less_memory(_find_flags(name))}")
        return error.exit_code
    except (UserError, Stopped, Bug) as error:
        _print_error(name, str(error))
        return error.exit_code
    except OutputClosed:
        return 0


def _print_error(name: str | None, message: str) -> None:
    """Print how a command ended; if standard error is closed, only the exit code shows it."""
    with suppress(UserError), escape_output():
        print(f"phalanx {name or ''}".rstrip() + f": {message}", file=sys.stderr)


def find_command(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The command's name, one word or two, and the words after it."""
    pair = " ".join(words[:2])
    if len(words) > 1 and pair in COMMANDS:
        return pair, [*words[2:]]
    if words and words[0] in COMMANDS and not _names_group(words):
        return words[0], [*words[1:]]
    return None, [*words]


def _names_group(words: Sequence[str]) -> bool:
    """Whether the words name a group of commands, or none of its commands: `bench`, `bench trian`.

    `bench` is also a command itself, which takes flags alone.
    """
    is_group = any(name.startswith(f"{words[0]} ") for name in COMMANDS)
    is_group = is_group and words[0] not in _TAKES_ANY_WORD
    return is_group and not any(word.startswith("-") for word in words[1:2])


def load_command(name: str) -> "Command":
    """The command of that name; imports the file that registers it."""
    import_module(f"phalanx.cli.{COMMANDS[name][0]}")
    from phalanx.cli.command import REGISTERED_COMMANDS

    return REGISTERED_COMMANDS[name]


def run_command(name: str | None, words: list[str]) -> int:
    """Run one command, or list the commands; errors are raised."""
    if name is None:
        return _show_overview(words)
    command = load_command(name)
    from phalanx.cli.command import ParsedArgs, parse_args

    own = words[: words.index("--")] if "--" in words else words
    if any(word in ("--help", "-h") for word in own):
        from phalanx.cli.help import show_command_help

        show_command_help(command, words)
        return 0
    if command.takes_command:
        return command.run(ParsedArgs({}, {}, (), name, tuple(words))) or 0
    return command.run(parse_args(command, words)) or 0


def _find_flags(name: str | None) -> set[str]:
    """The flags that a command takes, without their dashes."""
    from phalanx.cli.command import REGISTERED_COMMANDS

    command = REGISTERED_COMMANDS.get(name or "")
    return command.all_names if command else set()  # empty if its own file could not be imported


def _show_overview(words: list[str]) -> int:
    """Print the commands; ConfigError for a word that is not a command."""
    if words == ["--version"]:
        from phalanx import __version__

        print(f"phalanx {__version__}")
        return 0
    names = [word for word in words if word not in ("--help", "-h")]
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    if names and names[0] not in groups:
        raise ConfigError(f"no command is called {names[0]!r}; {suggest(names[0], COMMANDS)}")
    if len(names) > 1:
        pair = " ".join(names[:2])
        raise ConfigError(f"no command is called {pair!r}; {suggest(pair, COMMANDS)}")
    chosen = {n: c for n, c in COMMANDS.items() if not names or n.split()[0] == names[0]}
    print("usage: phalanx COMMAND [ARGUMENTS]    (phalanx COMMAND --help for details)\n")
    for name, (_, summary) in chosen.items():
        print(f"  {name:<19}{summary}")
    if not names:
        print("\nTo start: phalanx train        trains a small model on built-in data")
    return 0
