"""Arrays from JSON, checked: their shape, and that they contain only numbers."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.serve.api_error import ApiError

_NUMBERS = {int, float}
_SHOWN = 60


def flatten(values: Sequence[Any], shape: Sequence[int], what: str) -> list[Any]:
    """Nested lists of a shape as one list; raises ApiError where they have another.

    what: a name of the values, for the message.
    """
    flat: Sequence[Any] = values
    for depth, size in enumerate(shape):
        odd = next((v for v in flat if type(v) is not list or len(v) != size), None)
        if odd is not None:
            found = f"a list of {len(odd):,}" if type(odd) is list else f"{odd!r}"[:_SHOWN]
            raise ApiError(
                400,
                f"{what}: expected {list(shape)} numbers each; dimension {depth} has {found} "
                f"instead of a list of {size:,}",
            )
        flat = list(chain.from_iterable(flat))
    return list(flat)


def to_floats(flat: list[Any], what: str) -> NDArray[np.float32]:
    """Numbers as float32; raises ApiError for anything else, and for numbers beyond its range."""
    strange = set(map(type, flat)) - _NUMBERS
    if strange:
        odd = next(value for value in flat if type(value) in strange)
        raise ApiError(400, f"{what}: expected numbers, found {odd!r}"[:200])
    with np.errstate(over="ignore"):
        values = np.array(flat, np.float32)
    finite = np.isfinite(values)
    if not finite.all():
        odd = flat[int(finite.argmin())]
        raise ApiError(400, f"{what}: {odd:g} is too large for float32, which ends at 3.4e+38")
    return values


def to_bytes(flat: list[Any], what: str) -> NDArray[np.uint8]:
    """Numbers from 0 to 255 as bytes; raises ApiError for anything else."""
    values = to_floats(flat, what)
    if values.size and not (values.min() >= 0 and values.max() <= 255):  # also false for NaN
        raise ApiError(
            400,
            f"{what}: pixels must be from 0 to 255, these go from {values.min():g} to "
            f"{values.max():g}",
        )
    pixels = np.rint(values)
    if values.size and values.max() <= 1 and (pixels != values).any():
        raise ApiError(
            400,
            f"{what}: pixels must be from 0 to 255, these are fractions from 0 to 1; multiply them "
            "by 255, or send whole numbers if they are that dark",
        )
    return pixels.astype(np.uint8)
