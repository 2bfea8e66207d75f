"""The help page of a command: usage, arguments, options by section, examples."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from phalanx.catalog.models import MODELS
from phalanx.catalog.plugins import load_plugins
from phalanx.catalog.resnets import ResNetVariant
from phalanx.cli.command import Command
from phalanx.config.fields import find_model_name
from phalanx.config.schema import OPTIONS, Option
from phalanx.errors import ConfigError
from phalanx.report.terminal import drawing_stream

_NARROWEST_TABLE = 60  # columns of a terminal; names take more than half of them


def show_command_help(command: Command, words: Sequence[str]) -> None:
    """Print one command's page; with --model among the words, it ends with that model's options."""
    model = _find_model(words) if "model" in command.options else None
    console = Console(highlight=False, file=drawing_stream(sys.stdout))
    console.print(
        Text.assemble(("usage: ", "bold"), f"phalanx {command.name} {command.usage}".rstrip())
    )
    console.print(f"\n{command.summary}\n")
    if command.arguments:
        rows = [(a.shown, a.help, "") for a in command.arguments]
        _print_rows(console, "Arguments", rows)
    options = [OPTIONS[name] for name in command.options]
    _print_options(console, [o for o in options if model is None or not o.family])
    console.print(Text("Examples", style="bold"))
    for line, meaning in command.examples.items():
        console.print(Text(f"  {line}", style="cyan"), soft_wrap=True)
        console.print(Padding(Text(meaning, style="dim"), (0, 0, 0, 6), expand=False))
    if model is not None:
        console.print()
        _print_options(console, [o for o in options if o.family == MODELS[model].family])
        _print_rows(console, f"Defaults of {model}", _list_model_defaults(model))


def _find_model(words: Sequence[str]) -> str | None:
    """The model that --model names among a command's words, by its current name."""
    plugins, model = _find_flag(words, "plugin"), _find_flag(words, "model")
    if plugins:
        load_plugins(plugins)
    try:
        return find_model_name(model) if model else None
    except ValueError as error:
        raise ConfigError(f"--model: {error}") from None


def _find_flag(words: Sequence[str], name: str) -> str:
    """The value of a flag, after a space or an equals sign; empty if the flag is not given."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == f"--{name}":
            return following
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return ""


def _list_model_defaults(model: str) -> list[tuple[str, str, str]]:
    """The values of the options whose default depends on the model."""
    variant = MODELS[model]
    values: dict[str, object] = {
        "image-size": f"{variant.image_size} for photographs; small images keep their own",
        "drop-path": variant.drop_path,
        "dropout-rate": variant.dropout,
    }
    if isinstance(variant, ResNetVariant):
        values["shortcut-type"] = variant.shortcut
    return [(f"--{name}", f"{value}", "") for name, value in values.items()]


def _print_options(console: Console, options: list[Option]) -> None:
    """Options under the headings of their sections: flag, meaning, default."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for option in options:
        row = (f"--{option.name}", option.help, _describe_default(option))
        sections.setdefault(option.heading, []).append(row)
    for heading, rows in sections.items():
        _print_rows(console, heading, rows)


def _describe_default(option: Option) -> str:
    """What is used if the option is not given."""
    if option.auto:
        return option.auto
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return "none" if option.default is None else f"{option.default}"


def _print_rows(console: Console, heading: str, rows: list[tuple[str, str, str]]) -> None:
    """Print rows with a heading; their columns align with other sections', defaults are dimmed.

    On a terminal too narrow for columns, the meaning is printed below the name.
    """
    stacked = console.width < _NARROWEST_TABLE
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, expand=True)
    table.add_column(width=2)
    if not stacked:
        table.add_column(style="cyan", no_wrap=True, width=30)
    table.add_column(ratio=1, overflow="fold")
    for name, text, default in rows:
        shown = Text.assemble(text, (f"  [{default}]", "dim")) if default else Text(text)
        if stacked:
            table.add_row("", Text(name, style="cyan"))
            table.add_row("", Padding(shown, (0, 0, 0, 2)))
        else:
            table.add_row("", name, shown)
    console.print(Text(heading, style="bold"))
    console.print(table)
    console.print()
