"""The chances of dropout and drop-path, drawn outside the model.

The same counter-based draws as phalanx.plan.draws, made on the device: a chance is a pure
function of the seed, the module's path, and the image's place in the training stream.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from phalanx.kernels.rounding import signed
from phalanx.plan.draws import GOLDEN, stream_key

_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None))


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift int64 as if it were unsigned."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix(words: Tensor) -> Tensor:
    """Twin of phalanx.plan.draws.mix."""
    for bits, factor in _ROUNDS:
        words = words ^ _shift_right(words, bits)
        words = words if factor is None else words * signed(factor)
    return words


@lru_cache(maxsize=64)
def _keys_of(seed: int, names: tuple[str, ...], device: torch.device) -> Tensor:
    """The keys of several streams, [names, 1, 1]."""
    keys = [signed(int(stream_key(seed, name, 0))) for name in names]
    return torch.tensor(keys, dtype=torch.int64, device=device)[:, None, None]


def _draw_bits(keys: Tensor, places: Tensor) -> Tensor:
    """64 random bits for each key and place: twin of phalanx.plan.draws.draw_bits."""
    return _mix(_mix(places * signed(int(GOLDEN)) + keys) ^ keys)


def draw_dropout_noise(
    wanted: Mapping[str, int], *, seed: int, first: int, images: int, device: torch.device
) -> dict[str, Tensor]:
    """For each module path, [images, numbers it wants] uniform in [0, 1), in steps of 2**-24.

    Paths that want equally many are drawn together: a kernel costs the same for one or fifty.
    """
    chances: dict[str, Tensor] = {}
    for width in sorted(set(wanted.values())):
        paths = tuple(path for path, numbers in wanted.items() if numbers == width)
        places = torch.arange(first * width, (first + images) * width, device=device)
        bits = _draw_bits(_keys_of(seed, paths, device), places.view(images, width))
        uniform = _shift_right(bits, 40).float() * 2.0**-24
        chances |= dict(zip(paths, uniform, strict=True))
    return chances
