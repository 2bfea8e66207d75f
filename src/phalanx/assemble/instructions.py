"""Processors that announce instructions they do not carry out."""

import os
from pathlib import Path

_WITHOUT_TILES = "AVX512_CORE_BF16"  # the most that oneDNN has below matrix tiles


def avoid_missing_instructions(facts: Path = Path("/proc/cpuinfo")) -> None:
    """Keep oneDNN from matrix tiles (AMX) on virtual machines; a setting of the user's own stays.

    Some of these announce tiles and kill the process at the first one, which only 16-bit products
    use. Must come before torch's first product: oneDNN looks at its setting once.
    """
    try:
        flags = facts.read_text(encoding="utf-8", errors="replace").split("flags", 2)[1].split()
    except (OSError, IndexError):
        return
    if "hypervisor" in flags and "amx_tile" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _WITHOUT_TILES)
