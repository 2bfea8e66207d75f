"""Finds presets: in ./presets, among the entries of ./configs.yml, then those of Phalanx.

The configurations of the older applications, under their original names, come last.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from phalanx.catalog.models import MODELS, OLD_NAMES
from phalanx.config.text import dump_entries, read_entries, read_text
from phalanx.disk import quote_path
from phalanx.errors import ConfigError, suggest

LOCAL_FOLDER = Path("presets")
_LOCAL_ENTRIES = Path("configs.yml")
APPLICATIONS = {"pl": "PyTorch Lightning", "tf1": "TensorFlow 1", "tf2": "TensorFlow 2"}


@dataclass(frozen=True)
class Preset:
    """The name and the file of a preset."""

    name: str
    path: Path
    entry_name: str | None  # in configs.yml
    origin: str
    application: str = ""  # the older application that it comes from, if any

    @property
    def full_name(self) -> str:
        """The unique name: for an older application's preset, APPLICATION/NAME."""
        return f"{self.application}/{self.name}" if self.application else self.name


def builtin_preset_folder() -> Path:
    """The folder of the presets that come with Phalanx."""
    return Path(str(resources.files("phalanx") / "presets"))


def iterate_presets() -> Iterator[Preset]:
    """All presets that can be named here, in order of precedence."""
    for path in sorted(LOCAL_FOLDER.glob("*.yaml")):
        yield Preset(path.stem, path, None, f"preset {path}")
    if _LOCAL_ENTRIES.is_file():
        for entry in read_entries(_LOCAL_ENTRIES):
            yield Preset(entry.key, _LOCAL_ENTRIES, entry.key, f"preset {entry.key} (configs.yml)")
    for path in sorted(builtin_preset_folder().glob("*.yaml")):
        yield Preset(path.stem, path, None, f"preset {path.stem}")


def iterate_old_presets(application: str | None = None) -> Iterator[Preset]:
    """The configurations of the older applications, or of one of them."""
    for folder in APPLICATIONS if application is None else (application,):
        for path in sorted((builtin_preset_folder() / folder).glob("*.yaml")):
            yield Preset(path.stem, path, None, f"preset {path.stem}", folder)


def find_preset(name: str) -> Preset:
    """The preset or file of a name; with .yaml or a slash it is a file, except for tf1/NAME."""
    application, slash, old_name = name.rpartition("/")
    if slash or name.endswith((".yaml", ".yml")):
        path = Path(name)
        if path.exists() and not path.is_dir():
            return Preset(name, path, None, f"file {name}")
        if application in APPLICATIONS and not name.endswith((".yaml", ".yml")):
            return find_old_preset(old_name, application)
        _refuse_folder(name)
        raise ConfigError(f"{name}: no such file; `phalanx presets ls` lists the presets")
    presets = list(iterate_presets())
    found = next((preset for preset in presets if preset.name == name), None)
    return found or find_old_preset(name, others=[preset.name for preset in presets])


def _refuse_folder(name: str) -> None:
    """Raise ConfigError if the name of a preset is that of a folder: a run, or perhaps data."""
    if (Path(name) / "run.json").is_file():
        raise ConfigError(
            f"{name}: is a run, not a preset; its options are {Path(name) / 'config.yaml'}, and "
            f"`phalanx train --resume {quote_path(name)}` continues it"
        )
    if Path(name).is_dir():
        raise ConfigError(
            f"{name}: is a folder, not a preset; if the images are in it, give "
            f"--data-dir {quote_path(name)}"
        )


def find_old_preset(
    name: str, application: str | None = None, *, others: Iterable[str] = ()
) -> Preset:
    """The configuration of that name of an older application, or of the only one that has it.

    others: further names that may be suggested.
    """
    presets = list(iterate_old_presets(application))
    found = [preset for preset in presets if preset.name == name]
    if not found:
        if application:
            none = f"{APPLICATIONS[application]} has no configuration of that name"
            listed = "`phalanx presets ls --old` lists them"
        else:
            _refuse_folder(name)
            none = "no preset is called that"
            listed = "`phalanx presets ls` lists ours, and with --old those of older applications"
        known = dict.fromkeys([*others, *(preset.name for preset in presets)])
        raise ConfigError(f"{name}: {none}; {suggest(name, known)} ({listed})")
    choices = [f"{one.full_name} ({APPLICATIONS[one.application]})" for one in found]
    if len(found) > 1:
        raise ConfigError(
            f"{name}: {len(found)} applications have a configuration of that name; give "
            f"--config {' or '.join(choices)}"
        )
    if application is None and name in {*MODELS, *OLD_NAMES}:
        raise ConfigError(
            f"{name}: is a model and a configuration; give --model {name}, or --config {choices[0]}"
        )
    return found[0]


def shorten_name(preset: Preset) -> str:
    """The shortest name by which `find_preset` finds a preset of an older application."""
    try:
        return preset.name if find_old_preset(preset.name) == preset else preset.full_name
    except ConfigError:  # another one has the same name
        return preset.full_name


def is_preset(name: str) -> bool:
    """Whether there is a preset of that name."""
    try:
        if any(preset.name == name for preset in iterate_presets()):
            return True
    except ConfigError:  # an unreadable file, which is reported when a preset is read
        return False
    return any(name in (preset.name, preset.full_name) for preset in iterate_old_presets())


def read_preset_text(preset: Preset) -> str:
    """The text of a preset; for an entry, its own options with merges resolved."""
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
        return str(error).partition(": ")[2]  # the others must still be listed
    first = text.partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
