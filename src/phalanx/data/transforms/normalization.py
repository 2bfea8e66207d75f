"""The constants of a normalisation: the factor and the offset of each channel."""

from collections.abc import Sequence


def find_scale_and_shift(
    mean: Sequence[float], std: Sequence[float], normalization: str
) -> tuple[list[float], list[float]]:
    """For each channel the factor for a byte, and the offset to add.

    mean-std: values in 0..1, minus the mean, over the std. mean: values in 0..255, minus the mean.
    none: values in 0..1. per-image has no constants: the result is that of mean-std.

    >>> find_scale_and_shift([0.5], [0.2], "mean")
    ([1.0], [-127.5])
    """
    if normalization == "mean":
        return [1.0 for _ in mean], [-255 * value for value in mean]
    if normalization == "none":
        return [1 / 255 for _ in mean], [0.0 for _ in mean]
    return [1 / (255 * value) for value in std], [
        -value / spread for value, spread in zip(mean, std, strict=True)
    ]
