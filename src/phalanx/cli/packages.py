"""The packages that Phalanx needs: whether they are there, and new enough."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata

_PACKAGES = {  # import name: (package, what for, can Phalanx train without it)
    "torch": ("torch", "everything", False),
    "numpy": ("numpy", "arrays", False),
    "safetensors": ("safetensors", "checkpoints", False),
    "pydantic": ("pydantic", "options", False),
    "yaml": ("PyYAML", "presets", False),
    "rich": ("rich", "progress and help", False),
    "matplotlib": ("matplotlib", "reports", False),
    "jinja2": ("jinja2", "reports", False),
    "simplejpeg": ("simplejpeg", "fast JPEG decoding; Pillow is the fallback", True),
    "cv2": ("opencv-python-headless", "resizing", False),
    "PIL": ("Pillow", "PNG and odd JPEGs", False),
    "google_crc32c": ("google-crc32c", "checksums of data", False),
}
_REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)")  # as a line of our own metadata begins


@dataclass(frozen=True)
class MachineCheck:
    """The result of one check."""

    what: str
    found: str
    state: str  # "ok", "note" or "missing"
    remedy: str = ""


def check_packages() -> Iterator[MachineCheck]:
    """Every package that Phalanx imports: whether it can be imported and is new enough."""
    oldest = read_oldest_versions()
    for name, (package, purpose, optional) in _PACKAGES.items():
        state = "note" if optional else "missing"
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - packages that do not fit raise anything
            yield MachineCheck(package, f"{error} ({purpose})", state, f"pip install {package}")
            continue
        found = find_version(package)
        if is_older(found, oldest.get(package)):
            remedy = f"pip install '{package}>={oldest[package]}'"
            yield MachineCheck(package, f"{found} is too old ({purpose})", state, remedy)
        else:
            yield MachineCheck(package, f"{found} ({purpose})", "ok")


def read_oldest_versions() -> dict[str, str]:
    """The oldest version that works of each package, from our own metadata."""
    try:
        lines = metadata.requires("phalanx") or []
    except metadata.PackageNotFoundError:  # run from a checkout, without having been installed
        return {}
    return {match[1]: match[2] for line in lines if (match := _REQUIREMENT.match(line))}


def is_older(version: str, oldest: str | None) -> bool:
    """Whether a version is known to be older than another, by its leading numbers.

    >>> is_older("2.9.1+cpu", "2.11"), is_older("2.11.0a0", "2.11"), is_older("3.0", None)
    (True, False, False)
    """
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None or oldest is None:
        return False
    return [int(n) for n in numbers[0].split(".")] < [int(n) for n in oldest.split(".")]


def find_version(package: str) -> str:
    """The installed version; another package may provide the same module."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from another package"
