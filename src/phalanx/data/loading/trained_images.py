"""Images that a model is scored on although it was trained on them, by their checksums."""

from collections.abc import Mapping
from math import sqrt

import numpy as np
from numpy.typing import NDArray

_EARLIER = "earlier"  # beside a checkpoint's splits: see `keep_trained_checksums`

_Checksums = Mapping[str, NDArray[np.uint32]]
"""The checksums of a checkpoint: of the images of each split, 0 for those not read."""


def keep_trained_checksums(checksums: _Checksums) -> dict[str, NDArray[np.uint32]]:
    """What a run keeps of a checkpoint's checksums when it continues with other data, or as a fork.

    Without order: which training images the weights have seen, whatever their names are now.
    """
    trained = _join_trained(checksums)
    return {_EARLIER: trained} if len(trained) else {}


def select_kept_checksums(checksums: _Checksums) -> dict[str, NDArray[np.uint32]]:
    """Those of the checksums that `keep_trained_checksums` has kept."""
    return {name: values for name, values in checksums.items() if name == _EARLIER}


def describe_trained_images(checksums: _Checksums, scored: NDArray[np.uint32]) -> str:
    """A note if a model was trained on images that it is scored on; empty if not.

    checksums: those of its checkpoint. scored: of the images that were scored, none of them 0.
    """
    trained = _join_trained(checksums)
    found = int(np.isin(scored, trained).sum())
    by_chance = len(scored) * len(trained) / 2**32
    if found <= 20 * sqrt(by_chance):  # never exceeded by chance alone
        return ""
    verb = "is" if found == 1 else "are"
    return (
        f"{found:,} of the {len(scored):,} images scored {verb} among those trained on, so the "
        "score is too high"
    )


def _join_trained(checksums: _Checksums) -> NDArray[np.uint32]:
    """The checksums of all training images that were read, sorted."""
    parts = [checksums[name] for name in ("train", _EARLIER) if name in checksums]
    joined = np.unique(np.concatenate([np.empty(0, np.uint32), *parts]))
    return joined[joined != 0]
