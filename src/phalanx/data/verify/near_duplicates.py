"""Images that are nearly the same: found by sorting, never by comparing each with each."""

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

_BITS_APART = 2  # of 64, up to which two outlines are alike
_COLOURS_APART = 6.0  # of 255 on average, up to which two thumbnails are
_BLOCKS = 5  # a pair that differs in two bits has three blocks of five alike
_NEIGHBOURS = 32  # a crowd of one outline is compared with this many of the nearest brightness

_Pairs = NDArray[np.int64]  # [n, 2]
_ONES = np.array([bin(value).count("1") for value in range(256)], np.uint8)


def find_near_duplicates(outlines: NDArray[np.uint64], colours: NDArray[np.uint8]) -> _Pairs:
    """Pairs of places whose outlines and colours are alike."""
    brightness = colours.mean(axis=1) if len(colours) else np.zeros(0)
    found = [np.empty((0, 2), np.int64)]
    for key in _keys(outlines):
        order = np.lexsort((brightness, key))
        ranked = key[order]
        for apart in range(1, min(_NEIGHBOURS, len(order) - 1) + 1):
            same = np.flatnonzero(ranked[apart:] == ranked[:-apart])
            if not len(same):
                break
            pairs = np.stack([order[same], order[same + apart]], axis=1)
            found.append(pairs[_alike(pairs, outlines, colours)])
    pairs = np.sort(np.concatenate(found), axis=1)
    alone = np.unique(pairs[:, 0] * len(outlines) + pairs[:, 1])  # one number a pair sorts fast
    return np.stack(np.divmod(alone, max(1, len(outlines))), axis=1)


def _keys(outlines: NDArray[np.uint64]) -> Iterator[NDArray[np.uint64]]:
    """The outlines with two of their five blocks blanked out, in every way there is."""
    edges = [64 * block // _BLOCKS for block in range(_BLOCKS + 1)]
    masks = [(1 << last) - (1 << first) for first, last in pairwise(edges)]
    for kept in combinations(masks, _BLOCKS - _BITS_APART):
        yield outlines & np.uint64(sum(kept))


def _alike(
    pairs: _Pairs, outlines: NDArray[np.uint64], colours: NDArray[np.uint8]
) -> NDArray[np.bool_]:
    left, right = pairs[:, 0], pairs[:, 1]
    differing = (outlines[left] ^ outlines[right]).view(np.uint8).reshape(-1, 8)
    apart = np.abs(colours[left].astype(np.int16) - colours[right]).mean(axis=1)
    return (_ONES[differing].sum(axis=1) <= _BITS_APART) & (apart <= _COLOURS_APART)


def group_pairs(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Places that hang together by pairs, each group sorted, the groups by their first place."""
    leader: dict[int, int] = {}

    def lead(place: int) -> int:
        while (above := leader.setdefault(place, place)) != place:
            leader[place] = leader[above]  # halve the way for the next one
            place = above
        return place

    for left, right in pairs:
        first, second = sorted((lead(left), lead(right)))
        leader[second] = first
    groups: dict[int, list[int]] = {}
    for place in sorted(leader):
        groups.setdefault(lead(place), []).append(place)
    return [groups[first] for first in sorted(groups)]


def group_equal(rows: NDArray[np.uint8]) -> list[list[int]]:
    """Places whose rows of bytes are the same; those that are alone are left out."""
    if not len(rows):
        return []
    keys = np.ascontiguousarray(rows).view(f"V{rows.shape[1]}").reshape(-1)
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero((rows[order[1:]] == rows[order[:-1]]).all(axis=1))
    return group_pairs((int(order[at]), int(order[at + 1])) for at in same)
