"""The random numbers of dropout and drop-path, drawn outside the model.

They are the counter-based draws of phalanx.plan.draws, made on the device: a number is a pure
function of the seed, the module's path, and the image's position in the training stream.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from phalanx.kernels.random_bits import draw_bits, shift_right, to_signed
from phalanx.plan.draws import stream_key


@lru_cache(maxsize=64)
def _stream_keys(seed: int, names: tuple[str, ...], device: torch.device) -> Tensor:
    """The keys of several streams, [names, 1, 1]."""
    keys = [to_signed(int(stream_key(seed, name, 0))) for name in names]
    return torch.tensor(keys, dtype=torch.int64, device=device)[:, None, None]


def draw_dropout_noise(
    sizes: Mapping[str, int], *, seed: int, first: int, images: int, device: torch.device
) -> dict[str, Tensor]:
    """For each module path, [images, its size] uniform in [0, 1), in steps of 2**-24.

    Paths of one size are drawn together: a kernel costs the same for one or fifty.
    """
    noise: dict[str, Tensor] = {}
    for size in sorted(set(sizes.values())):
        paths = tuple(path for path, own in sizes.items() if own == size)
        counters = torch.arange(first * size, (first + images) * size, device=device)
        bits = draw_bits(counters.view(images, size), _stream_keys(seed, paths, device))
        noise |= dict(zip(paths, shift_right(bits, 40).float() * 2.0**-24, strict=True))
    return noise
