"""What a run has read: a checksum of each image, so that it never trains on two of one name."""

from collections.abc import Iterable
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.folder import FolderSource
from phalanx.data.formats.index import IndexedSource
from phalanx.data.loading.reader import ReadProblems
from phalanx.errors import CheckpointError, DataError


class SeenImages:
    """The checksums of one split, 0 for an image that was not read yet. They travel with a run.

    An image that is read for the first time after it changed is not known, and passes. One that
    goes bad under a process is left out from there on, and reported; under a resume it is an
    error, because the run would not be the same.
    """

    def __init__(self, source: IndexedSource, problems: ReadProblems):
        self._source, self._problems = source, problems
        self.checksums: NDArray[np.uint32] = np.zeros(len(source), np.uint32)
        self._read_earlier = self.checksums.astype(bool)
        self._bad_compared = 0
        self._resized: int | None = None  # an image whose file has another size, once one is found

    def restore(self, checksums: NDArray[np.uint32]) -> None:
        """Take over what earlier processes have read; what is bad by now was bad for them, too."""
        if (checksums.shape, checksums.dtype) != (self.checksums.shape, self.checksums.dtype):
            raise CheckpointError(
                f"{self._source.root}: {len(self.checksums):,} images, but the checkpoint has the "
                f"checksums of {len(checksums):,}; it was made from other data"
            )
        self.checksums[:] = checksums
        self._read_earlier = checksums != 0
        self._bad_compared = len(self._problems.bad)
        # a million files take a while to look at: training begins meanwhile
        Thread(target=self._compare_sizes, daemon=True).start()

    def _compare_sizes(self) -> None:
        if isinstance(self._source, FolderSource):
            self._resized = self._source.find_resized()

    def compare(self, indices: Iterable[int]) -> None:
        """Take in what was read of these images; raises DataError for one that has changed."""
        if self._resized is not None:
            raise DataError(
                f"{self._source.name(self._resized)} in {self._source.root}: is gone or its size "
                "has changed since this run began: restore the old file and resume, or resume "
                "with --accept-changed-data"
            )
        bad, latest = self._problems.bad, self._problems.checksums
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
