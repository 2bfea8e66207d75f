"""Many strings in two arrays, which processes can share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StringArray:
    """Many strings in two arrays: a Python string is made only when one is requested."""

    data: NDArray[np.uint8]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        begin = int(self.ends[number - 1]) if number else 0
        return bytes(self.data[begin : int(self.ends[number])]).decode(errors="surrogateescape")


def pack_strings(strings: Iterable[str]) -> StringArray:
    """The strings as a StringArray."""
    encoded = [string.encode(errors="surrogateescape") for string in strings]
    ends = np.cumsum([len(string) for string in encoded], dtype=np.int64)
    return StringArray(np.frombuffer(b"".join(encoded), np.uint8), ends)


def replace_unstorable(text: str) -> str:
    """The text with lone surrogates escaped: JSON can hold them, file names and indexes cannot."""
    try:
        text.encode(errors="surrogateescape")
        return text
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()


def join_strings(parts: Sequence[StringArray]) -> StringArray:
    """The strings of all parts, concatenated."""
    starts = np.cumsum([0, *(len(part.data) for part in parts)])
    ends = [part.ends + start for part, start in zip(parts, starts[:-1], strict=True)]
    return StringArray(np.concatenate([part.data for part in parts]), np.concatenate(ends))
