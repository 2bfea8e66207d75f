"""What a batch is made from, what it is, and the function that fills one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.plugins import load_plugins
from phalanx.data.formats.decode import BadImage, EncodedImage, Image, image_shape
from phalanx.data.formats.generated import GeneratedSpec
from phalanx.data.formats.sources import Source, Split, ValSplit, open_source
from phalanx.data.loading.cache import Cache, is_cached
from phalanx.data.transforms.transform import TransformSpec, build_transform
from phalanx.errors import DataError
from phalanx.plan.order import Order

_NOTES_KEPT = 10
_STRETCH = 1024  # positions of the stream whose chances are drawn together
_BAD_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """All that decides a batch's pixels; travels to worker processes as JSON."""

    data: str
    plugin: str | None = None  # modules that add datasets to the tables
    data_dir: str | None = None
    image_size: int
    treatment: TransformSpec
    seed: int
    order: Order | None = None  # None where nothing is trained
    generated_images: int = 0
    generated_valid_images: int = 0
    val_split: float | None = None  # share of a folder's images that become its validation split
    growth: tuple[tuple[int, int], ...] = ()  # until which step training images have which size

    def size_at(self, step: int) -> int:
        """Height and width of that step's training images."""
        return next((size for end, size in self.growth if step < end), self.image_size)

    def open(self, split: Split) -> Source:
        """The images of one split."""
        if self.plugin:
            load_plugins(self.plugin)
        lengths = {"train": self.generated_images, "valid": self.generated_valid_images}
        generated = GeneratedSpec(images=lengths[split], image_size=self.image_size, seed=self.seed)
        chosen = None if self.val_split is None else ValSplit(self.val_split, self.seed)
        source = open_source(self.data, self.data_dir, split, generated=generated, val_split=chosen)
        if split == "train" and self.order is not None and self.order.images != len(source):
            raise DataError(
                f"{self.data_dir or self.data}: {len(source):,} training images, but this run is "
                f"laid out for {self.order.images:,}; restore the data or start a new run"
            )
        return source

    def to_json(self) -> dict[str, Any]:
        """Plain values that `from_json` takes back."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "InputSpec":
        """The recipe that `to_json` was called on."""
        order, treatment = plain["order"], plain["treatment"]
        pairs = {name: tuple(treatment[name]) for name in ("scale", "ratio")}
        return cls(
            **{
                **plain,
                "order": None if order is None else Order(**order),
                "treatment": TransformSpec(**{**treatment, **pairs}),
                "growth": tuple(map(tuple, plain["growth"])),
            }
        )


@dataclass(frozen=True)
class Batch:
    """Images of one micro-batch, or of one portion when scoring."""

    pixels: Any  # uint8 [B, H, W, 3]: an array, or a tensor where they are made on the device
    labels: Any  # int64 [B]; with the pixels
    indices: NDArray[np.int64]  # [B]; -1 on rows that only pad or could not be read
    positions: NDArray[np.int64]  # [B]; in the stream when training, else in the split
    ready: Any = None  # what to wait for before the pixels are used, where a device makes them


@dataclass(frozen=True)
class ReadingNotes:
    """What came up while reading one split, by image; grows as reading goes on."""

    bad: dict[int, str] = field(default_factory=dict)  # its name and what is wrong with it
    notes: dict[int, str] = field(default_factory=dict)  # the first few that had to be enlarged


class _Rows(NamedTuple):
    """What a fill says of its rows."""

    labels: NDArray[np.int64]
    indices: NDArray[np.int64]


class Reader:
    """Fills rows of pixels from one split and remembers which images were bad or small."""

    def __init__(
        self,
        recipe: InputSpec,
        split: Split,
        *,
        findings: ReadingNotes,
        max_bad: int | None,
        cache: Cache | None = None,
    ):
        self.recipe = recipe
        self.split = split
        self.max_bad = max_bad if split == "train" else None
        self.source = recipe.open(split)
        self.transform = build_transform(recipe.treatment)
        self.boxes = getattr(self.source, "box", None) if recipe.treatment.boxes else None
        self.findings = findings
        self._cache = cache if is_cached(self.source) else None
        self._stretches: dict[int, tuple[NDArray[np.int64], list[list[float]]]] = {}

    def fill(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> _Rows:
        """Write an image into each row: keys are stream positions, or indices when scoring."""
        fill = self._fill_training if self.split == "train" else self._fill_scoring
        return fill(keys, out)

    def _fill_training(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> _Rows:
        indices, draws = self.look_up(keys)
        images = [self._read(wanted) for wanted in indices.tolist()]
        plain = not any(image is None or isinstance(image, EncodedImage) for image in images)
        if plain and self.boxes is None:  # pixels in memory: the whole batch in one call
            self.transform.train(images, draws, out, None)  # type: ignore[arg-type]
            return _Rows(self.source.labels[indices], indices)
        for row, image in enumerate(images):
            indices[row] = self._fill_row(int(indices[row]), image, draws[row], out[row])
        return _Rows(self.source.labels[indices], indices)

    def _fill_row(
        self, index: int, image: Image | None, draws: Sequence[float], out: NDArray[np.uint8]
    ) -> int:
        """Write one image, or the next one that decodes; gives the index it has."""
        while True:
            if image is None:
                index, image = self.next_readable(index)
            boxes = None if self.boxes is None else [self.boxes(index)]
            try:
                self.transform.train([image], [draws], out[None], boxes)
                return index
            except BadImage as bad:
                self.set_aside(index, bad)
                image = None

    def look_up(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[list[float]]]:
        """The image and the draws of consecutive positions, which may lie in two stretches."""
        indices, draws = [], []
        first, last = int(positions[0]), int(positions[-1])
        for number in range(first // _STRETCH, last // _STRETCH + 1):
            start = number * _STRETCH
            part = slice(max(first - start, 0), last + 1 - start)
            stretch = self._draw_stretch(number)
            indices.append(stretch[0][part])
            draws += stretch[1][part]
        return np.concatenate(indices), draws

    def _draw_stretch(self, number: int) -> tuple[NDArray[np.int64], list[list[float]]]:
        """What happens in a stretch of the stream; drawn in one go, for many steps to come."""
        if number not in self._stretches:
            if self.recipe.order is None:
                raise ValueError("a recipe without an order has no training batches")
            positions = np.arange(number * _STRETCH, (number + 1) * _STRETCH, dtype=np.int64)
            drawn = (
                self.recipe.order.indices(positions),
                self.transform.draw(self.recipe.seed, positions).tolist(),
            )
            kept = list(self._stretches.items())[-1:]  # a step may straddle two
            self._stretches = dict([*kept, (number, drawn)])
        return self._stretches[number]

    def _fill_scoring(self, keys: NDArray[np.int64], out: NDArray[np.uint8]) -> _Rows:
        indices = keys.copy()
        for row, index in enumerate(keys.tolist()):
            image = self._read(index)
            try:
                if image is not None:
                    self.transform.evaluate(image, out[row])
            except BadImage as bad:
                self.set_aside(index, bad)
                image = None
            if image is None:
                out[row] = 0
                indices[row] = -1
        return _Rows(np.where(indices < 0, 0, self.source.labels[keys]), indices)

    def next_readable(self, index: int) -> tuple[int, Image]:
        """The image after this one that opens, and its index; raises DataError when none does."""
        image = None
        while image is None:
            bad = self.findings.bad
            if len(bad) == len(self.source):
                raise DataError(_describe_bad(bad, "none of the training images can be read"))
            index = (index + 1) % len(self.source)
            image = self._read(index)
        return index, image

    def _read(self, index: int) -> Image | None:
        """The image, decoded or to be decoded; None for one that is known to be bad."""
        if index in self.findings.bad:
            return None
        return self.take(index, self.try_open(index))

    def try_open(self, index: int) -> Image | BadImage:
        """The image, or what is wrong with it."""
        try:
            return open_image(self.source, index, self._cache)
        except BadImage as bad:
            return bad

    def try_read(self, index: int) -> None:
        """Read an image whole, and set it aside if that cannot be done."""
        try:
            self.source.read(index)
        except BadImage as bad:
            self.set_aside(index, bad)

    def take(self, index: int, image: Image | BadImage) -> Image | None:
        """The opened image, noted when it is small; None for a bad one, which is set aside."""
        if isinstance(image, BadImage):
            self.set_aside(index, image)
            return None
        self._note_size(index, image)
        return image

    def set_aside(self, index: int, bad: BadImage) -> None:
        """Remember a bad image; raises DataError when there are too many."""
        self.findings.bad[index] = str(bad)
        check_bad(self.findings.bad, self.max_bad)

    def _note_size(self, index: int, image: Image) -> None:
        size = self.recipe.image_size
        height, width = image_shape(image)
        if (height < size or width < size) and len(self.findings.notes) < _NOTES_KEPT:
            name = self.source.name(index)
            self.findings.notes[index] = f"{name}: {width}x{height} is enlarged for {size}x{size}"


def open_image(source: Source, index: int, cache: Cache | None = None) -> Image:
    """An image of a source: one that can wait with decoding does, others have their pixels."""
    if cache is not None:
        return EncodedImage(_cached(source, index, cache), source.name(index))
    image: Image = getattr(source, "image", source.read)(index)
    return image


def _cached(source: Any, index: int, cache: Cache) -> bytes:
    """The bytes of an image, read once."""
    data = cache.get(index)
    if data is None:
        data = bytes(source.encoded(index))
        cache.put(index, data)
    return data


def check_bad(bad: dict[int, str], max_bad: int | None) -> None:
    """Raise DataError when more training images are bad than the run puts up with."""
    if max_bad is not None and len(bad) > max_bad:
        raise DataError(
            _describe_bad(bad, f"more than {max_bad} training images cannot be read")
            + "\nmend or remove them, or allow more with --max-bad"
        )


def _describe_bad(bad: dict[int, str], what: str) -> str:
    """The first bad images by name, under a line that says what they mean."""
    return "\n".join([f"{what}, the first are:", *(bad[i] for i in sorted(bad)[:_BAD_SHOWN])])
