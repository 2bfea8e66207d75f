"""Kernels compiled for a GPU that this machine does not have, and what their machine code says."""

import re
import subprocess
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

CAPABILITY, MULTIPROCESSORS, SHARED_KIB = 90, 132, 227  # of an H100 or H200
COUNTED = ("HMMA", "HGMMA", "LDG", "LDGSTS", "LDS", "LDSM", "STS", "LDL", "STL", "SHFL", "BAR")


class _Driver:
    """What Triton asks its driver when it compiles."""

    def __init__(self) -> None:
        self._target = import_module("triton.backends.compiler").GPUTarget("cuda", CAPABILITY, 32)

    def get_current_target(self) -> Any:
        """The GPU to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """A stream, of which nothing is asked."""
        return 0


def stand_in_for_gpu() -> None:
    """From here on Triton compiles for that GPU, and nothing is launched."""
    from phalanx.kernels import gpu
    from phalanx.kernels.choices import CHOICES, Launch

    import_module("triton").runtime.driver.set_active(_Driver())
    gpu._INTERPRETER = gpu.Gpu(MULTIPROCESSORS, SHARED_KIB * 2**10, has_tma=True)

    def skip(launches: list[Launch]) -> Launch:
        return launches[0]

    CHOICES.launch_fastest = skip  # type: ignore[assignment,method-assign]


def describe_binary(cubin: bytes) -> str:
    """Registers, stack, instructions in the longest loop, and how many of some kinds in all."""
    tools = Path(import_module("triton").__file__ or "").parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [str(tools / "cuobjdump"), what, file.name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for what in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = found.groups() if found else ("?", "?")
    counts = {word: len(re.findall(rf"\b{word}\b", code)) for word in COUNTED}
    kinds = " ".join(f"{word} {number}" for word, number in counts.items() if number)
    return f"{registers} regs {stack} stack, loop {_find_longest_loop(code)}, {kinds}"


def _find_longest_loop(code: str) -> int:
    """Instructions from a jump's target to the jump, the most."""
    longest = 0
    for place, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);", code):
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < int(place, 16):
            longest = max(longest, (int(place, 16) - int(target[1], 16)) // 16 + 1)
    return longest
