"""Images that an index knows the place of: whole files, or pieces of larger ones."""

import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.decode import BadImage, EncodedImage, Image, decode
from phalanx.data.formats.index import Index

_OPEN_FILES = 128  # shards kept open by one process
# The size of what was found to be bad when the index was built: a row of the table below.
BAD_CHECKSUM, TRUNCATED_SHARD, DAMAGED_SHARD, WRONG_LABEL, NO_LABEL = -1, -2, -3, -4, -5
_REASONS = {
    BAD_CHECKSUM: "the checksum of its data does not fit",
    TRUNCATED_SHARD: "the shard is cut off there, what follows is lost; fetch it again",
    DAMAGED_SHARD: "the shard is damaged there, what follows is lost; fetch it again",
    WRONG_LABEL: "label {label}, but there are {classes} classes, counted from {first}; mend it",
    NO_LABEL: "its class is not told as a whole number; mend it",
}


class IndexedSource:
    """Random access to images by an index, wherever their bytes lie.

    first_label: the number that the files give the first class, to speak of labels as they do.
    """

    def __init__(self, root: Path, index: Index, *, first_label: int = 0):
        self.root, self.index, self.first_label = root, index, first_label
        self._open: OrderedDict[int, int] = OrderedDict()
        self._lock = Lock()

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each image."""
        return self.index.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""
        return self.index.classes

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> NDArray[np.uint8]:
        """The image as RGB; raises BadImage when it cannot be read or decoded."""
        return decode(self.encoded(index), self.name(index))

    def image(self, index: int) -> Image:
        """The image, to be decoded as far as it is needed; raises BadImage."""
        return EncodedImage(self.encoded(index), self.name(index))

    def encoded(self, index: int) -> bytes:
        """The bytes of the image's file, or of its piece of one."""
        file, size = int(self.index.file_of[index]), int(self.index.sizes[index])
        try:
            if self.index.names is None:
                return (self.root / self.index.files[file]).read_bytes()
            if size < 0:
                raise self.known_bad(index)
            with self._lock:  # another thread may close what this one is about to read
                data = os.pread(self._handle(file), size, int(self.index.offsets[index]))
        except OSError as cause:
            raise BadImage(self.name(index), cause.strerror or str(cause)) from None
        if len(data) < size:
            raise BadImage(self.name(index), "the file ends before the image does")
        return data

    def fault(self, index: int) -> int:
        """What the index knows to be wrong with an image, as a key of REASONS; 0 for nothing."""
        return 0 if self.index.names is None else min(0, int(self.index.sizes[index]))

    def known_bad(self, index: int) -> BadImage:
        """The error to raise for an image that the index knows to be bad."""
        label = int(self.index.labels[index]) + self.first_label
        why = _REASONS[self.fault(index)].format(
            label=label, classes=len(self.classes), first=self.first_label
        )
        return BadImage(self.name(index), why)

    def expect(self, indices: list[int]) -> None:
        """Tell the system which images come next, where they are pieces of larger files."""
        if self.index.names is None or not hasattr(os, "posix_fadvise"):
            return
        for index in indices:
            with suppress(OSError), self._lock:  # told when it is read
                place, size = int(self.index.offsets[index]), int(self.index.sizes[index])
                handle = self._handle(int(self.index.file_of[index]))
                os.posix_fadvise(handle, place, size, os.POSIX_FADV_WILLNEED)

    def _handle(self, file: int) -> int:
        """A descriptor of a file that holds many images; the one unused longest is closed."""
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) == _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[file] = os.open(self.root / self.index.files[file], os.O_RDONLY)
        return self._open[file]

    def name(self, index: int) -> str:
        """What a person can find the image by."""
        return self.index.name(index)

    def box(self, index: int) -> tuple[float, float, float, float] | None:
        """The part of the image that holds its object: left, top, right, bottom in 0..1."""
        if self.index.boxes is None or np.isnan(self.index.boxes[index, 0]):
            return None
        left, top, right, bottom = map(float, self.index.boxes[index])
        return left, top, right, bottom

    def fingerprint(self) -> dict[str, Any]:
        """Counts, and a hash that changes when an image comes, goes or changes its size."""
        return self.index.fingerprint()

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)
