"""What was found out about the images of a split while they were read."""

from dataclasses import dataclass, field

from phalanx.data.formats.sources import Split
from phalanx.errors import DataError

NOTES_KEPT = 1000  # about small images, in each process
_BAD_SHOWN = 5


@dataclass(frozen=True)
class ReadProblems:
    """The problems met while reading one split, and checksums, by index of the image.

    A checksum is removed when the batch with its image is yielded.
    """

    bad_images: dict[int, str] = field(default_factory=dict)  # name, and what is wrong with it
    notes: dict[int, str] = field(default_factory=dict)  # on the first that had to be enlarged
    checksums: dict[int, int] = field(default_factory=dict)  # of recently read images
    # bad ones, and JPEGs that are damaged: a GPU would not decode them as the cores do
    cores_only: dict[int, None] = field(default_factory=dict)

    def record_bad(self, index: int, reason: str) -> None:
        """Record an image that cannot be read."""
        self.bad_images[index], self.cores_only[index] = reason, None

    def copy(self) -> "ReadProblems":
        """A copy for another process, without checksums; a thread may still be reading."""
        found = self.bad_images.copy(), self.notes.copy()
        return ReadProblems(*found, cores_only=self.cores_only.copy())

    def add(self, other: "ReadProblems") -> None:
        """Add the problems of another process that reads the same split."""
        for index, text in other.bad_images.items():
            self.bad_images.setdefault(index, text)
        for index, text in other.notes.items():
            self.notes.setdefault(index, text)
        self.cores_only.update(other.cores_only)

    def refuse_all_bad(self, images: int) -> None:
        """Raise DataError if all training images are bad."""
        if len(self.bad_images) == images:
            raise DataError(self._describe_bad("none of the training images can be read"))

    def refuse_too_many_bad(self, max_bad: int | None) -> None:
        """Raise DataError if more training images are bad than the run tolerates."""
        if max_bad is not None and len(self.bad_images) > max_bad:
            raise DataError(
                self._describe_bad(f"more than {max_bad} training images cannot be read")
                + "\nfix or remove them (a resume then needs --accept-changed-data), or allow more "
                "with --max-bad"
            )

    def _describe_bad(self, what: str) -> str:
        """The first bad images by name, below a line that says what is wrong."""
        first = [self.bad_images[index] for index in sorted(self.bad_images)[:_BAD_SHOWN]]
        return "\n".join([f"{what}, the first are:", *first])


def describe_small(notes: list[str], split: Split) -> str:
    """One line for all images of a split that had to be enlarged; it names the first."""
    more = len(notes) - 1
    if not more:
        return notes[0]
    least = "at least " if len(notes) >= NOTES_KEPT else ""
    noun = {"train": "training image", "valid": "validation image"}[split]
    verb, plural = ("is", "") if more == 1 else ("are", "s")
    so_far = " so far" if split == "train" else ""
    return f"{notes[0]}, and so {verb} {least}{more:,} more {noun}{plural}{so_far}"
