"""Help to look at: usage, arguments, options by section, real examples."""

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.cli.command import Command
from phalanx.config.schema import OPTIONS, Option


def show_command_help(command: Command) -> None:
    """Print one command's page."""
    console = Console(highlight=False)
    console.print(Text.assemble(("usage: ", "bold"), command.usage))
    console.print(f"\n{command.summary}\n")
    if command.arguments:
        rows = [(a.metavar or a.name, a.help, "") for a in command.arguments]
        print_rows(console, "Arguments", rows)
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for name in command.options:
        option = OPTIONS[name]
        sections.setdefault(option.heading, []).append(option_row(option))
    for heading, rows in sections.items():
        print_rows(console, heading, rows)
    console.print(Text("Examples", style="bold"))
    for line, meaning in command.examples:
        console.print(Text(f"  {line}", style="cyan"), soft_wrap=True)
        console.print(Text(f"      {meaning}", style="dim"))


def option_row(option: Option) -> tuple[str, str, str]:
    """An option as a line of help: flag, meaning, default."""
    return f"--{option.name}", option.help, shown_default(option)


def shown_default(option: Option) -> str:
    """What stands in when the option is not given."""
    if option.auto:
        return option.auto
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return "none" if option.default is None else f"{option.default}"


def print_rows(console: Console, heading: str, rows: list[tuple[str, str, str]]) -> None:
    """A titled table whose columns line up with the other sections'."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False, expand=True)
    table.add_column(width=2)
    table.add_column(style="cyan", no_wrap=True, width=24)
    table.add_column(ratio=1)
    for name, text, default in rows:
        table.add_row("", name, with_default(text, default))
    console.print(Text(heading, style="bold"))
    console.print(table)
    console.print()


def with_default(text: str, default: str) -> RenderableType:
    """Help text with its default behind it, dimmed."""
    return Text.assemble(text, (f"  [{default}]", "dim")) if default else Text(text)
