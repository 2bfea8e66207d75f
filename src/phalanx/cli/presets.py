"""`phalanx presets ls | cat | cp`: list presets, print one, or copy one to edit it."""

from pathlib import Path

from phalanx.cli.command import Argument, ParsedArgs, command
from phalanx.config.presets import (
    LOCAL_FOLDER,
    find_preset,
    iterate_old_presets,
    iterate_presets,
    read_preset_summary,
    read_preset_text,
    shorten_name,
)
from phalanx.disk import convert_disk_errors, write_atomically
from phalanx.errors import ConfigError
from phalanx.units import align_columns

_NAME = Argument("name", "A preset, or a YAML file.", required=True)


@command(
    "presets ls",
    "List the presets: yours in ./presets and ./configs.yml first, then ours.",
    Argument(
        "--old",
        "List the configurations of the older applications, by their original names.",
        switch=True,
    ),
    Argument("--json", "Print a JSON list.", switch=True),
    usage="[--old] [--json]",
    examples={
        "phalanx presets ls": "what can be trained by name",
        "phalanx presets ls --old": "mk2_resnet50_bn_16ipus, resnet50_mk2_pipelined, ...",
    },
)
def _list_presets(args: ParsedArgs) -> None:
    """List the presets by name; or those of older applications, by the name that finds each."""
    args.refuse_problems()
    if args["--old"]:
        presets = {shorten_name(preset): preset for preset in iterate_old_presets()}
    else:
        presets = {preset.name: preset for preset in reversed(list(iterate_presets()))}
    rows = [{"name": name, "about": read_preset_summary(presets[name])} for name in sorted(presets)]
    lines = align_columns([tuple(row.values()) for row in rows], left=range(2))
    args.print_result(rows, lambda: print("\n".join(lines)))


@command(
    "presets cat",
    "Print a preset as it is written.",
    _NAME,
    usage="NAME",
    examples={"phalanx presets cat demo": "what `phalanx train` does without arguments"},
)
def _print_preset(args: ParsedArgs) -> None:
    """Print a preset."""
    args.refuse_problems()
    print(read_preset_text(find_preset(args["name"])), end="")


@command(
    "presets cp",
    "Copy a preset to edit it.",
    _NAME,
    Argument("to", "File or folder to copy to [presets/]."),
    usage="NAME [TO]",
    examples={"phalanx presets cp demo mine.yaml": "then: phalanx train mine.yaml --epochs 2"},
)
def _copy_preset(args: ParsedArgs) -> None:
    """Copy a preset into ./presets, where it takes precedence over ours of the same name."""
    args.refuse_problems()
    source = find_preset(args["name"])
    name = f"{source.entry_name}.yaml" if source.entry_name else source.path.name
    target = Path(args["to"]) if args["to"] else LOCAL_FOLDER / name
    if target.is_dir():
        target = target / name
    if target.exists():
        raise ConfigError(f"{target}: already exists; name another target")
    with convert_disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, read_preset_text(source))  # a partial one would be in the way
    print(f"{target}: edit it, then run `phalanx train {target}`")
