"""Random images made on the host: everything a run does but the disk."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.datasets import DATASETS
from phalanx.errors import ConfigError
from phalanx.plan.draws import draw_below, draw_bits

_SHIFTS = 1 << 16  # so many different images are cut from one block of random bytes


@dataclass(frozen=True, kw_only=True)
class GeneratedSpec:
    """How many random images, how large, and from which seed."""

    images: int
    image_size: int
    seed: int = 0


class _GeneratedSource:
    """Random access to random images: each is a window into one block of hashed bytes."""

    def __init__(self, spec: GeneratedSpec):
        self.spec = spec
        self.classes = DATASETS["generated"].classes or ()
        self.labels: NDArray[np.int64] = np.arange(spec.images, dtype=np.int64) % len(self.classes)

    def __len__(self) -> int:
        return self.spec.images

    @cached_property
    def block(self) -> NDArray[np.uint8]:
        """The bytes that images are cut from."""
        words = (self.spec.image_size**2 * 3 + _SHIFTS) // 8 + 1
        bits = draw_bits(self.spec.seed, "generated-block", np.arange(words))
        return bits.astype("<u8").view(np.uint8)

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB noise."""
        size = self.spec.image_size
        start = int(draw_below(_SHIFTS, self.spec.seed, "generated-start", index))
        return self.block[start : start + size * size * 3].reshape(size, size, 3)

    def name(self, index: int) -> str:
        """The image's number, there being no file."""
        return f"generated[{index}]"

    def fingerprint(self) -> dict[str, Any]:
        """What the images are made from."""
        return {
            "images": len(self),
            "classes": len(self.classes),
            "sha256": f"generated:{self.spec.image_size}:{self.spec.seed}",
        }


def open_generated(spec: GeneratedSpec | None) -> _GeneratedSource:
    """The random images that `spec` asks for."""
    if spec is None or spec.images < 1:
        raise ConfigError("--data generated needs a number of images above zero")
    return _GeneratedSource(spec)
