"""`phalanx doctor`: what this machine has, and what is missing, with the command to install it."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from phalanx.cli.command import Argument, ParsedArgs, command
from phalanx.cli.packages import (
    MachineCheck,
    check_packages,
    find_version,
    is_older,
    read_oldest_versions,
)
from phalanx.errors import ConfigError
from phalanx.units import format_bytes, format_plural

_EXTRAS = {  # name: (packages by import name, what for); for those who ask for it
    "parquet": ({"pyarrow": "pyarrow"}, "data in Parquet files"),
    "sweep": ({"optuna": "optuna"}, "phalanx sweep"),
    "heic": ({"pillow_heif": "pillow-heif"}, "HEIC photographs"),
    "serve": (
        {name: name for name in ("starlette", "uvicorn", "httptools", "orjson", "onnxruntime")},
        "phalanx serve",
    ),
    "lightning": ({"pytorch_lightning": "pytorch-lightning"}, "--engine lightning"),
    "tensorboard": ({"tensorboard": "tensorboard"}, "to look at what --tensorboard writes"),
    "wandb": ({"wandb": "wandb"}, "--wandb"),
    "export": (
        {name: name for name in ("onnx", "onnxscript", "onnxruntime")},
        "phalanx export to ONNX and Triton",
    ),
    "mlflow": ({"mlflow": "mlflow-skinny"}, "--mlflow"),
    "port": ({name: name for name in ("h5py", "onnx")}, "phalanx port weights of Keras files"),
}
_ENOUGH_DISK = 2 * 2**30


@command(
    "doctor",
    "Check what this machine has and what is missing, with the command that installs it.",
    Argument("--json", "Print a JSON list.", switch=True),
    usage="[--json]",
    examples={"phalanx doctor": "before the first run on a new machine"},
)
def _run(args: ParsedArgs) -> int:
    """Check the machine; the exit code is 1 if something that Phalanx needs is missing."""
    args.refuse_problems()
    checks = [
        *(_check_python(), *check_packages(), *_check_extras()),
        *(*_check_devices(), *_check_space()),
    ]
    missing = sum(check.state == "missing" for check in checks)
    if args["--json"]:
        print(json.dumps([asdict(check) for check in checks], indent=2))
        return min(missing, 1)
    marks = {"ok": "ok  ", "note": "note", "missing": "MISS"}
    for check in checks:
        print(f"{marks[check.state]}  {check.what:<24}{check.found}")
        if check.remedy:
            print(f"      {'':<24}-> {check.remedy}")
    print(f"\n{missing} missing or too old" if missing else "\nready to train: phalanx train")
    return min(missing, 1)


def _check_python() -> MachineCheck:
    """The version of Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    enough = sys.version_info >= (3, 11)
    remedy = "" if enough else "install Python 3.11 or later"
    return MachineCheck("python", version, "ok" if enough else "missing", remedy)


def _check_extras() -> Iterator[MachineCheck]:
    """The optional packages, and what each is for."""
    oldest = read_oldest_versions()
    for name, (packages, purpose) in _EXTRAS.items():
        found = {package: find_version(package) for package in packages.values()}
        missing = [package for module, package in packages.items() if find_spec(module) is None]
        old = [f"{one} {found[one]}" for one in found if is_older(found[one], oldest.get(one))]
        problem = "not installed" if missing else "too old"
        if affected := missing or old:
            verb = "is" if len(affected) == 1 else "are"
            text, state = f"{', '.join(affected)} {verb} {problem}", "note"
        else:
            text, state = ", ".join(f"{one} {version}" for one, version in found.items()), "ok"
        remedy = f"pip install 'phalanx[{name}]'" if affected else ""
        yield MachineCheck(f"extra {name}", f"{text} ({purpose})", state, remedy)


def _check_devices() -> Iterator[MachineCheck]:
    """Cores and accelerators, as torch sees them."""
    from phalanx.plan.machine import count_cores, count_threads

    cores = count_cores()
    yield MachineCheck("cpu", format_plural(cores, "core"), "ok")
    try:
        yield _check_threads(count_threads(), cores)
    except ConfigError as error:
        problem, _, remedy = str(error).partition("; ")
        yield MachineCheck("threads", problem, "missing", remedy)
    try:
        import torch
    except (ImportError, OSError):
        return
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield MachineCheck(f"cuda:{number}", f"{gpu.name}, {format_bytes(gpu.total_memory)}", "ok")
    if torch.backends.mps.is_available():
        yield MachineCheck("mps", "Apple GPU", "ok")
    elif not torch.cuda.device_count():
        seen = any(Path("/dev").glob("nvidia[0-9]*"))
        remedy = "there is a GPU: install a torch build with CUDA" if seen else ""
        yield MachineCheck(
            "gpu", "none that torch can use, so training runs on the CPU", "note", remedy
        )


def _check_threads(threads: int, cores: int) -> MachineCheck:
    """How many threads torch will use, with a warning about several processes at once."""
    named = os.environ.get("OMP_NUM_THREADS", "").strip() == str(threads)
    source = "from OMP_NUM_THREADS" if named else "one per core"
    found = f"{threads} per process ({source}; --threads N sets another number)"
    each = max(1, cores // 2)
    if threads <= each:
        return MachineCheck("threads", found, "ok")
    return MachineCheck(
        "threads",
        found,
        "note",
        f"to run two processes here, give each --threads {each}: with more threads than cores, "
        "both can be ten times slower",
    )


def _check_space() -> Iterator[MachineCheck]:
    """Free memory and disk space."""
    size, whole = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    known = "SC_AVPHYS_PAGES" in os.sysconf_names  # macOS has no such number
    free = f"{format_bytes(os.sysconf('SC_AVPHYS_PAGES') * size)} free of " if known else ""
    yield MachineCheck("memory", f"{free}{format_bytes(whole * size)}", "ok")
    for what, folder in (("disk here", os.getcwd()), ("temporary", tempfile.gettempdir())):
        room = shutil.disk_usage(folder).free
        scarce = room < _ENOUGH_DISK
        remedy = (
            "checkpoints may not fit; free some space or use another --run-dir" if scarce else ""
        )
        state = "note" if scarce else "ok"
        yield MachineCheck(what, f"{format_bytes(room)} free in {folder}", state, remedy)
