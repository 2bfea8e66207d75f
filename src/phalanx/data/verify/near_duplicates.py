"""Near-duplicate images, found by sorting instead of comparing all pairs."""

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

_MAX_BITS = 2  # of 64, by which two hashes of similar images may differ
_MAX_COLOUR = 6.0  # of 255, by which their thumbnails may differ on average
_BLOCKS = 5  # two hashes that differ in two bits have three blocks of five in common
_NEIGHBOURS = 32  # if many images share a hash, each is compared with the nearest in brightness

_Pairs = NDArray[np.int64]  # [n, 2]
_BIT_COUNTS = np.array([bin(value).count("1") for value in range(256)], np.uint8)


def find_near_duplicates(hashes: NDArray[np.uint64], thumbnails: NDArray[np.uint8]) -> _Pairs:
    """Pairs of rows whose hashes and thumbnails are similar."""
    brightness = thumbnails.mean(axis=1) if len(thumbnails) else np.zeros(0)
    found = [np.empty((0, 2), np.int64)]
    for masked in _mask_hashes(hashes):
        order = np.lexsort((brightness, masked))
        ranked = masked[order]
        for distance in range(1, min(_NEIGHBOURS, len(order) - 1) + 1):
            same = np.flatnonzero(ranked[distance:] == ranked[:-distance])
            if not len(same):
                break
            pairs = np.stack([order[same], order[same + distance]], axis=1)
            found.append(pairs[_are_similar(pairs, hashes, thumbnails)])
    pairs = np.sort(np.concatenate(found), axis=1)
    unique = np.unique(pairs[:, 0] * len(hashes) + pairs[:, 1])  # one number per pair sorts fast
    return np.stack(np.divmod(unique, max(1, len(hashes))), axis=1)


def _mask_hashes(hashes: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
    """The hashes with two of their five blocks masked, for every choice of two."""
    edges = [64 * block // _BLOCKS for block in range(_BLOCKS + 1)]
    masks = [(1 << last) - (1 << first) for first, last in pairwise(edges)]
    for kept in combinations(masks, _BLOCKS - _MAX_BITS):
        yield hashes & np.uint64(sum(kept))


def _are_similar(
    pairs: _Pairs, hashes: NDArray[np.uint64], thumbnails: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    left, right = pairs[:, 0], pairs[:, 1]
    bits = (hashes[left] ^ hashes[right]).view(np.uint8).reshape(-1, 8)
    colour = np.abs(thumbnails[left].astype(np.int16) - thumbnails[right]).mean(axis=1)
    return (_BIT_COUNTS[bits].sum(axis=1) <= _MAX_BITS) & (colour <= _MAX_COLOUR)


def group_pairs(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Groups of rows that are connected by pairs, each sorted, ordered by their first row."""
    parents: dict[int, int] = {}  # a union-find forest

    def find_root(row: int) -> int:
        while (parent := parents.setdefault(row, row)) != row:
            parents[row] = parents[parent]  # path halving
            row = parent
        return row

    for left, right in pairs:
        first, second = sorted((find_root(left), find_root(right)))
        parents[second] = first
    groups: dict[int, list[int]] = {}
    for row in sorted(parents):
        groups.setdefault(find_root(row), []).append(row)
    return [groups[first] for first in sorted(groups)]


def group_equal(rows: NDArray[np.uint8]) -> list[list[int]]:
    """Groups of equal rows of bytes, by number; unique rows are left out."""
    if not len(rows):
        return []
    keys = np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").reshape(-1)
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero((rows[order[1:]] == rows[order[:-1]]).all(axis=1))
    return group_pairs((int(order[place]), int(order[place + 1])) for place in same)
