"""Named configs: in ./presets, among the entries of ./configs.yml, then those of Phalanx."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from phalanx.config.text import dump_entries, read_entries, read_text
from phalanx.errors import ConfigError, suggest

LOCAL_FOLDER = Path("presets")
_LOCAL_ENTRIES = Path("configs.yml")


@dataclass(frozen=True)
class Preset:
    """Where a preset is written down."""

    name: str
    path: Path
    entry_name: str | None  # in configs.yml
    origin: str


def builtin_preset_folder() -> Path:
    """The folder of the presets that come with Phalanx."""
    return Path(str(resources.files("phalanx") / "presets"))


def iterate_presets() -> Iterator[Preset]:
    """All presets that can be named here, the ones that win first."""
    for path in sorted(LOCAL_FOLDER.glob("*.yaml")):
        yield Preset(path.stem, path, None, f"preset {path}")
    if _LOCAL_ENTRIES.is_file():
        for entry in read_entries(_LOCAL_ENTRIES):
            yield Preset(entry.key, _LOCAL_ENTRIES, entry.key, f"preset {entry.key} (configs.yml)")
    for path in sorted(builtin_preset_folder().glob("*.yaml")):
        yield Preset(path.stem, path, None, f"preset {path.stem}")


def find_preset(name: str) -> Preset:
    """The preset or file of that name; a name with a slash or .yaml is a file."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"{name}: no such file; `phalanx presets ls` lists the presets")
        return Preset(name, path, None, f"file {name}")
    presets = list(iterate_presets())
    found = next((preset for preset in presets if preset.name == name), None)
    if found is None:
        names = dict.fromkeys(preset.name for preset in presets)
        way_out = f"{suggest(name, names)}; `phalanx presets ls` lists them"
        raise ConfigError(f"{name}: no preset is called that; {way_out}")
    return found


def is_preset(name: str) -> bool:
    """Whether a preset is called that."""
    try:
        return any(preset.name == name for preset in iterate_presets())
    except ConfigError:  # of a file that cannot be read, which is told when one is looked for
        return False


def read_preset_text(preset: Preset) -> str:
    """A preset as it is written; of an entry, its own options, merges resolved."""
    if preset.entry_name is None:
        return read_text(preset.path)
    return dump_entries(read_entries(preset.path, preset.entry_name))


def read_preset_summary(preset: Preset) -> str:
    """The first comment line of a preset's file: what it trains."""
    if preset.entry_name is not None:
        return f"an entry of {preset.path}"
    try:
        text = read_text(preset.path)
    except ConfigError as error:
        return str(error).partition(": ")[2]  # the others are listed all the same
    first = text.partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
