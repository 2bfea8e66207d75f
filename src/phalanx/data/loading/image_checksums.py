"""Checksums of the images that a run has read, to notice an image that changes during the run."""

from collections.abc import Iterable, Mapping
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.folder import FolderSource
from phalanx.data.formats.index import IndexedSource
from phalanx.data.loading.read_problems import ReadProblems
from phalanx.errors import CheckpointError, DataError


class ImageChecksums:
    """The checksums of one split, 0 for images not read yet; stored in checkpoints.

    An image that changed before it was first read is not noticed. One that becomes unreadable
    while a process runs is left out from then on, and reported; if an earlier process of the run
    could read it, that is an error, because the run would not be the same.
    """

    def __init__(self, source: IndexedSource, problems: ReadProblems):
        self._source, self._problems = source, problems
        self.checksums: NDArray[np.uint32] = np.zeros(len(source), np.uint32)
        self._read_earlier = self.checksums.astype(bool)
        self._bad_compared = 0
        self._resized: int | None = None  # index of an image whose file size has changed, if any

    def restore(self, checksums: NDArray[np.uint32]) -> None:
        """Restore the checksums of earlier processes; images known as bad by now were bad then."""
        if (checksums.shape, checksums.dtype) != (self.checksums.shape, self.checksums.dtype):
            raise CheckpointError(
                f"{self._source.root}: {len(self.checksums):,} images, but the checkpoint has the "
                f"checksums of {len(checksums):,}; it was made from other data"
            )
        self.checksums[:] = checksums
        self._read_earlier = checksums != 0
        self._bad_compared = len(self._problems.bad_images)
        # checking the sizes of a million files takes a while: training starts meanwhile
        Thread(target=self._compare_sizes, daemon=True).start()

    def _compare_sizes(self) -> None:
        if isinstance(self._source, FolderSource):
            self._resized = self._source.find_resized()

    def compare(self, indices: Iterable[int]) -> None:
        """Store the checksums of images just read; raises DataError for one that has changed."""
        if self._resized is not None:
            raise DataError(
                f"{self._source.name(self._resized)} in {self._source.root}: is gone or its size "
                "has changed since this run began: restore the old file and resume, or resume "
                "with --accept-changed-data"
            )
        bad, latest = self._problems.bad_images, self._problems.checksums
        for index in indices:
            checksum = latest.pop(index, 0)
            if checksum and index >= 0:
                if self.checksums[index] not in (0, checksum):
                    raise self._changed(index, "its contents have changed")
                self.checksums[index] = checksum
        if len(bad) > self._bad_compared:
            for index in list(bad)[self._bad_compared :]:
                if self._read_earlier[index]:
                    raise self._changed(index, "has become unreadable")
            self._bad_compared = len(bad)

    def _changed(self, index: int, what: str) -> DataError:
        return DataError(
            f"{self._source.name(index)} in {self._source.root}: {what} since this run read it: "
            "restore the old image and resume, or resume with --accept-changed-data"
        )


def merge_checksums(
    parts: Iterable[Mapping[str, NDArray[np.uint32]]],
) -> dict[str, NDArray[np.uint32]]:
    """The checksums that several processes have collected, by split."""
    merged: dict[str, NDArray[np.uint32]] = {}
    for part in parts:
        for split, checksums in part.items():
            merged[split] = np.maximum(merged[split], checksums) if split in merged else checksums
    return merged
