"""What a run has read: a checksum of each image, so that it never trains on two of one name."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from phalanx.data.formats.index import IndexedSource
from phalanx.data.loading.reader import ReadProblems
from phalanx.errors import DataError


class SeenImages:
    """The checksums of one split, 0 for an image that was not read yet. They travel with a run.

    An image that is read for the first time after it changed is not known, and passes.
    """

    def __init__(self, source: IndexedSource):
        self._source = source
        self.checksums: NDArray[np.uint32] = np.zeros(len(source), np.uint32)
        self._bad_compared = 0

    def compare(self, indices: Iterable[int], problems: ReadProblems) -> None:
        """Take in what was read of these images; raises DataError for one that has changed."""
        for index in indices:
            checksum = problems.checksums.pop(index, 0)
            if checksum and index >= 0:
                self._refuse_other(index, checksum)
                self.checksums[index] = checksum
        if len(problems.bad) > self._bad_compared:
            for index in list(problems.bad)[self._bad_compared :]:
                self._refuse_other(index, None)
            self._bad_compared = len(problems.bad)

    def _refuse_other(self, index: int, checksum: int | None) -> None:
        known = int(self.checksums[index])
        if known and known != checksum:
            what = "cannot be read any more" if checksum is None else "has other bytes now"
            raise DataError(
                f"{self._source.name(index)} in {self._source.root}: {what}, but this run has read "
                "it before: bring the old image back and resume the run, or resume it with "
                "--accept-changed-data"
            )
