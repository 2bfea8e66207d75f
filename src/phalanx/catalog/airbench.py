"""The network of airbench, K. Jordan's training of CIFAR-10 in seconds (2024, arXiv 2404.00498)."""

from dataclasses import dataclass
from typing import ClassVar

from phalanx.catalog.variant import Variant


@dataclass(frozen=True, kw_only=True)
class AirbenchVariant(Variant):
    """A fixed filter that whitens patches, then stages of two convolutions that halve the image."""

    family: ClassVar[str] = "airbench"
    widths: tuple[int, ...]  # of each stage
    logit_scale: float = 1 / 9

    @property
    def units(self) -> tuple[str, ...]:
        """Stem, a block for each stage, head."""
        return ("stem", *(f"layer{stage}/0" for stage in range(1, len(self.widths) + 1)), "head")

    @property
    def halvings(self) -> int:
        """Once per stage."""
        return len(self.widths)

    @property
    def smallest_image(self) -> int:
        """The filter removes a pixel and pools round down: two pixels must be left at the end."""
        return 2 * 2**self.halvings + 1

    def norm_channels(self) -> dict[str, int]:
        """Every norm layer's path and channels."""
        return {
            f"layer{stage}.0.bn{place}": width
            for stage, width in enumerate(self.widths, start=1)
            for place in (1, 2)
        }


AIRBENCHES: dict[str, Variant] = {
    "airbench94": AirbenchVariant(widths=(64, 256, 256), image_size=32, classes=10)
}
