"""The environment of a run: versions, machine and code. Found without importing torch."""

import os
import platform
import subprocess
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import phalanx
from phalanx.plan.machine import count_cores

_PACKAGES = ("torch", "numpy", "safetensors", "opencv-python-headless", "simplejpeg", "Pillow")


def collect_environment() -> dict[str, str | int]:
    """Facts that may explain different results on two machines."""
    versions = {f"{name} version": _installed_version(name) or "none" for name in _PACKAGES}
    return {
        "phalanx version": phalanx.__version__,
        "commit": _code_commit(),
        "python version": platform.python_version(),
        **versions,
        "system": platform.platform(),
        "processor": _processor_name(),
        "cores": count_cores(),
    }


def hash_code() -> str:
    """A digest of this program's source files and of torch's version."""
    digest = sha256((_installed_version("torch") or "").encode())
    folder = Path(phalanx.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _installed_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _code_commit() -> str:
    """The commit of this code, marked if files were changed since."""
    folder = Path(phalanx.__file__).parents[2]
    if not (folder / ".git").exists():
        return "none"
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return described.stdout.strip() or "none"


def _processor_name() -> str:
    """The model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
