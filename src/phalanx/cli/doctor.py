"""`phalanx doctor`: what this machine has, and what is missing, with the line that installs it."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path

from phalanx.cli.command import Argument, Command, ParsedArgs
from phalanx.units import format_bytes

_PACKAGES = {  # import name: (package, what for, can Phalanx train without it)
    "torch": ("torch", "everything", False),
    "numpy": ("numpy", "arrays", False),
    "safetensors": ("safetensors", "checkpoints", False),
    "pydantic": ("pydantic", "options", False),
    "yaml": ("PyYAML", "presets", False),
    "rich": ("rich", "progress and help", False),
    "matplotlib": ("matplotlib", "reports", False),
    "simplejpeg": ("simplejpeg", "fast JPEG decoding; Pillow stands in", True),
    "cv2": ("opencv-python-headless", "resizing", False),
    "PIL": ("Pillow", "PNG and odd JPEGs", False),
}
_ENOUGH_DISK = 2 * 2**30


@dataclass(frozen=True)
class _Check:
    """One thing looked at."""

    what: str
    found: str
    state: str  # "ok", "note" or "missing"
    remedy: str = ""


def _run(request: ParsedArgs) -> int:
    """Look at the machine; the code is 1 when something Phalanx needs is missing."""
    request.refuse_problems()
    findings = [*_look_at_python(), *_look_at_packages(), *_look_at_devices(), *_look_at_room()]
    if request["json"]:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    return 1 if any(finding.state == "missing" for finding in findings) else 0


def _show(findings: list[_Check]) -> None:
    """A line a finding, and the remedies under them."""
    marks = {"ok": "ok  ", "note": "note", "missing": "MISS"}
    for finding in findings:
        print(f"{marks[finding.state]}  {finding.what:<24}{finding.found}")
        if finding.remedy:
            print(f"      {'':<24}-> {finding.remedy}")
    missing = sum(finding.state == "missing" for finding in findings)
    print(f"\n{missing} missing" if missing else "\nready to train: phalanx train")


def _look_at_python() -> Iterator[_Check]:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    enough = sys.version_info >= (3, 11)
    remedy = "" if enough else "install Python 3.11 or later"
    yield _Check("python", version, "ok" if enough else "missing", remedy)


def _look_at_packages() -> Iterator[_Check]:
    """Every package Phalanx imports: whether it is there and can be imported."""
    for name, (package, purpose, optional) in _PACKAGES.items():
        try:
            import_module(name)
        except (ImportError, OSError) as error:  # OSError: a library behind it does not load
            state = "note" if optional else "missing"
            yield _Check(package, f"{error} ({purpose})", state, f"pip install {package}")
        else:
            yield _Check(package, f"{_version_of(package)} ({purpose})", "ok")


def _version_of(package: str) -> str:
    """The installed version; another package may provide the same module."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "from another package"


def _look_at_devices() -> Iterator[_Check]:
    """Cores and accelerators, as torch sees them."""
    from phalanx.plan.machine import count_cores, count_threads

    cores, threads = count_cores(), count_threads()
    yield _Check("cpu", f"{cores} core{'s' * (cores != 1)}", "ok")
    yield _check_threads(threads, cores)
    try:
        import torch
    except (ImportError, OSError):
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        yield _Check(f"cuda:{number}", f"{facts.name}, {format_bytes(facts.total_memory)}", "ok")
    if torch.backends.mps.is_available():
        yield _Check("mps", "Apple GPU", "ok")
    if not torch.cuda.device_count() and not torch.backends.mps.is_available():
        seen = any(Path("/dev").glob("nvidia[0-9]*"))
        remedy = "a GPU is there: install a torch build with CUDA" if seen else ""
        yield _Check("gpu", "none that torch can use; training runs on the CPU", "note", remedy)


def _check_threads(threads: int, cores: int) -> _Check:
    """How many threads torch will use, and what happens where two processes share the cores."""
    named = os.environ.get("OMP_NUM_THREADS", "").strip() == str(threads)
    source = "from OMP_NUM_THREADS" if named else "one per core"
    found = f"{threads} per process ({source}; --threads N sets another number)"
    each = max(1, cores // 2)
    if threads <= each:
        return _Check("threads", found, "ok")
    return _Check(
        "threads",
        found,
        "note",
        "several processes at once must not have more threads together than there are cores: two "
        "processes of two threads each on two cores are ten times slower than with one each; "
        f"to run two here, use --threads {each}",
    )


def _look_at_room() -> Iterator[_Check]:
    """Memory and disk."""
    size, whole = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    told = "SC_AVPHYS_PAGES" in os.sysconf_names  # macOS does not tell
    text = f"{format_bytes(os.sysconf('SC_AVPHYS_PAGES') * size)} free of " if told else ""
    yield _Check("memory", f"{text}{format_bytes(whole * size)}", "ok")
    for what, folder in (("disk here", os.getcwd()), ("temporary", tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        scarce = free < _ENOUGH_DISK
        remedy = "checkpoints may not fit; make room or use another --run-dir" if scarce else ""
        yield _Check(
            what, f"{format_bytes(free)} free in {folder}", "note" if scarce else "ok", remedy
        )


COMMANDS = {
    "doctor": Command(
        name="doctor",
        summary="Say what this machine has and what is missing, with the line that installs it.",
        usage="phalanx doctor [--json]",
        run=_run,
        arguments=(Argument(name="--json", help="Print a JSON list.", switch=True),),
        examples=(("phalanx doctor", "before the first run on a new machine"),),
    ),
}
