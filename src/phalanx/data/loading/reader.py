"""The specification of batches, the batch itself, and the reader that fills it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from phalanx.catalog.plugins import load_plugins
from phalanx.data.formats.arrays import GeneratedSpec
from phalanx.data.formats.decode import BadImage, EncodedImage, Image, image_shape
from phalanx.data.formats.image_file import DEFAULT_LIMITS, ReadLimits
from phalanx.data.formats.index import IndexedSource
from phalanx.data.formats.sources import Source, Split, ValSplit, open_source
from phalanx.data.layouts.listing import DEFAULT_LAYOUT, LayoutOptions
from phalanx.data.loading.cache import ImageCache, is_cacheable
from phalanx.data.loading.gpu_share import GpuShare, is_gpu_decodable
from phalanx.data.loading.read_problems import NOTES_KEPT, ReadProblems
from phalanx.data.orientation import turn_box
from phalanx.data.transforms.augment import Box
from phalanx.data.transforms.transform import Transform, TransformSpec, build_transform
from phalanx.errors import DataError
from phalanx.plan.order import Order

_Integers = NDArray[np.int64]
_Bytes = NDArray[np.uint8]

_BLOCK = 1024  # positions of the stream whose random numbers are drawn together


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """Everything that determines a batch's pixels; sent to worker processes as JSON."""

    data: str
    plugin: str | None = None  # modules that add datasets to the tables
    data_dir: str | None = None
    image_size: int
    transform: TransformSpec
    seed: int
    order: Order | None = None  # None if there is no training
    valid_images: int | None = None  # of generated data; 0 if a run has none of any kind
    layout: LayoutOptions = DEFAULT_LAYOUT
    val_split: str | None = None  # how much to hold out for validation, for data without a split
    growth: tuple[tuple[int, int], ...] = ()  # (end step, size) of smaller training images
    limits: ReadLimits = DEFAULT_LIMITS  # an image that exceeds them is bad
    upright: bool = True  # whether images are turned as their EXIF says
    gpu_percent: int = 0  # percentage of the images left to a GPU to decode
    # the step from which on the cores decode each image once before the GPU may; None: no need
    checked_since: int | None = None

    def size_at(self, step: int) -> int:
        """Height and width of a step's training images."""
        return next((size for end, size in self.growth if step < end), self.image_size)

    @property
    def first_checked_step(self) -> int | None:
        """The first step after each image was decoded once by the cores; None: no need to wait."""
        if self.order is None or self.checked_since is None:
            return None
        return self.order.find_end(self.order.find_next_pass(self.checked_since))

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that can be opened."""
        if self.order is None:
            return ("valid",)
        return ("train",) if self.valid_images == 0 else ("train", "valid")

    def open(self, split: Split) -> Source:
        """The images of one split."""
        if self.plugin:
            load_plugins(self.plugin)
        trained = self.order.images if self.order else 0
        images = trained if split == "train" else self.valid_images or 0
        generated = GeneratedSpec(images=images, image_size=self.image_size, seed=self.seed)
        val_split = None if self.val_split is None else ValSplit(self.val_split, self.seed)
        # without training, a folder without splits is scored as a whole
        layout = replace(self.layout, scoring=self.order is None and split == "valid")
        source = open_source(
            self.data,
            self.data_dir,
            split,
            generated=generated,
            val_split=val_split,
            layout=layout,
            limits=self.limits,
        )
        if isinstance(source, IndexedSource):
            source.upright = self.upright
        if split == "train" and self.order is not None and self.order.images != len(source):
            raise DataError(
                f"{self.data_dir or self.data}: {len(source):,} training images, but this run was "
                f"planned for {self.order.images:,}; restore the data or start a new run"
            )
        return source

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "InputSpec":
        """The spec that `to_dict` was called on."""
        order, transform, growth = plain["order"], plain["transform"], plain["growth"]
        pairs = {name: tuple(transform[name]) for name in ("scale", "ratio")}
        nested = {
            "order": None if order is None else Order(**order),
            "transform": TransformSpec(**{**transform, **pairs}),
            "growth": tuple(map(tuple, growth)),
            "limits": ReadLimits(**plain["limits"]),
            "layout": LayoutOptions(**plain["layout"]),
        }
        return cls(**{**plain, **nested})


class BatchRequest(NamedTuple):
    """The images wanted in a batch."""

    positions: _Integers  # ascending; in the training stream, or in the split for scoring
    size: int  # height and width
    by_gpu: bool = True  # whether a GPU decodes its share of them


@dataclass(frozen=True)
class Batch:
    """A batch of images, for training or scoring."""

    pixels: Any  # uint8 [B, H, W, 3]: an array, or a tensor if made on the device
    labels: Any  # int64 [B]; in the same memory as the pixels
    indices: _Integers  # [B]; -1 on rows of padding or that could not be read
    positions: _Integers  # [B]; as requested, -1 on rows of padding
    ready: Any = None  # the event to wait for before using pixels made on the device

    def __getitem__(self, rows: slice) -> "Batch":
        """Some of the rows, without copying."""
        return Batch(
            self.pixels[rows],
            self.labels[rows],
            self.indices[rows],
            self.positions[rows],
            self.ready,
        )


class Reader:
    """Fills rows of pixels from one split and records which images are bad or small."""

    def __init__(
        self,
        spec: InputSpec,
        split: Split,
        *,
        problems: ReadProblems | None = None,
        max_bad: int | None = None,
        cache: ImageCache | None = None,
    ):
        self.spec = spec
        self.split = split
        self.max_bad = max_bad if split == "train" else None
        self.source = spec.open(split)
        self.transform = build_transform(spec.transform)
        self.gpu_share = GpuShare.of_split(split, spec.gpu_percent, spec.order, spec.checked_since)
        self.problems = problems or ReadProblems()
        self._cache = cache if is_cacheable(self.source) else None
        self._find_box: Callable[[int], Box | None] | None = (
            getattr(self.source, "box", None) if spec.transform.boxes else None
        )
        # keep two blocks, because a step may straddle them
        self._draw_block = lru_cache(2)(partial(_draw_block, spec, self.transform))

    def fill(self, positions: _Integers, out: _Bytes) -> Batch:
        """Write an image into each row of `out`, which becomes the batch's pixels."""
        fill = self._fill_training if self.split == "train" else self._fill_evaluation
        indices = fill(positions, out)
        return Batch(out, self.find_labels(indices), indices, positions)

    def _fill_training(self, positions: _Integers, out: _Bytes) -> _Integers:
        indices, draws = self.find_samples(positions)
        images = [self.open(index) for index in indices.tolist()]
        if any(image is None or isinstance(image, EncodedImage) for image in images):
            for row, image in enumerate(images):
                if isinstance(image, EncodedImage):  # a crop would not show damage outside of it
                    image.decodes_whole = bool(positions[row] < self.gpu_share.checked_until)
                index = int(indices[row])
                indices[row], _ = self.fill_row(index, image, draws[row], out[row])
        else:  # pixels in memory: the whole batch in one call
            boxes = map(self.find_box, indices.tolist(), images)
            samples = list(zip(images, draws, boxes, strict=True))
            self.transform.apply_training(samples, out)  # type: ignore[arg-type]
        return indices

    def _fill_evaluation(self, positions: _Integers, out: _Bytes) -> _Integers:
        indices, draws = self.find_samples(positions)
        for row, index in enumerate(positions.tolist()):
            indices[row], _ = self.fill_row(index, self.open(index), draws[row], out[row])
        return indices

    def fill_row(
        self,
        index: int,
        image: Image | None,
        draws: Sequence[float],
        out: _Bytes,
        *,
        skips: Callable[[int, Image], bool] = lambda index, image: False,
    ) -> tuple[int, Image | None]:
        """Write an image, or the replacement of a bad one, into `out`; returns the index used.

        A bad image is replaced by the next one that decodes when training, and by black, with index
        -1, when scoring. skips: whether an image is not to be decoded; it is then returned as the
        second value, and nothing is written.
        """
        while True:
            if image is None and self.split == "valid":
                out[:] = 0
                return -1, None
            if image is None:
                index, image = self._find_next_readable(index)
            if skips(index, image):
                return index, image
            try:
                self._decode_row(index, image, draws, out)
                return index, None
            except BadImage as bad:
                self.record_bad(index, bad)
                image = None

    def _decode_row(self, index: int, image: Image, draws: Sequence[float], out: _Bytes) -> None:
        """Write an image into `out`; record one that is found to be for the cores only."""
        if self.split == "train":
            sample = image, draws, self.find_box(index, image)
            self.transform.apply_training([sample], out[None])
        else:
            self.transform.apply_evaluation(image, out)
        is_suspect = isinstance(image, EncodedImage) and image.decodes_whole and not image.is_intact
        if is_suspect and is_gpu_decodable(image):
            self.problems.cores_only[index] = None

    def find_gpu_rows(self, request: BatchRequest) -> NDArray[np.bool_]:
        """Which rows of a batch the GPU decodes, if it can decode their files."""
        return self.gpu_share.find_rows(request.positions) & request.by_gpu

    def leaves_to_gpu(self, index: int, image: Image) -> TypeGuard[EncodedImage]:
        """Whether the GPU decodes this image where it is the GPU's turn."""
        return index not in self.problems.cores_only and self.gpu_share.takes(index, image)

    def find_samples(self, positions: _Integers) -> tuple[_Integers, list[list[float]]]:
        """The image index at each position, and in training the random numbers to augment it."""
        if self.split == "valid":
            return positions.copy(), [[]] * len(positions)
        indices, draws = [], []
        for first, last in _find_runs(positions):
            for number in range(first // _BLOCK, last // _BLOCK + 1):
                start = number * _BLOCK
                part = slice(max(first - start, 0), last + 1 - start)
                block_indices, block_draws = self._draw_block(number)
                indices.append(block_indices[part])
                draws += block_draws[part]
        return np.concatenate(indices), draws

    def find_labels(self, indices: _Integers) -> _Integers:
        """The class of each image; 0 for index -1."""
        return np.where(indices < 0, 0, self.source.labels[indices])

    def find_box(self, index: int, image: Image | None) -> Box | None:
        """The bounding box in the upright image; None if it is unknown or crops do not use it."""
        box = None if self._find_box is None else self._find_box(index)
        if box is not None and isinstance(image, EncodedImage):
            return turn_box(box, image.orientation)
        return box

    def _find_next_readable(self, index: int) -> tuple[int, Image]:
        """The next image that can be opened, and its index; raises DataError if there is none."""
        image = None
        while image is None:
            self.problems.refuse_all_bad(len(self.source))
            index = (index + 1) % len(self.source)
            image = self.open(index)
        return index, image

    def open(self, index: int) -> Image | None:
        """The image, decoded or still encoded; None for a bad one. Records problems and notes."""
        if index in self.problems.bad_images:
            return None
        image = self.try_open(index)
        if isinstance(image, BadImage):
            self.record_bad(index, image)
            return None
        size, notes = self.spec.image_size, self.problems.notes
        height, width = image_shape(image)
        if (height < size or width < size) and len(notes) < NOTES_KEPT:
            name = self.source.name(index)
            notes[index] = f"{name}: {width}x{height} is enlarged for {size}x{size}"
        return image

    def try_open(self, index: int) -> Image | BadImage:
        """The image, or the BadImage error; may be called from any thread."""
        try:
            image = open_image(self.source, index, self._cache)
        except BadImage as bad:
            return bad
        if isinstance(self.source, IndexedSource):
            self.problems.checksums[index] = self.source.checksum(index, image)
        return image

    def recheck_bad(self, index: int) -> None:
        """Record an image that was bad before; raises DataError if it can be read now."""
        try:
            self.source.read(index)
        except BadImage as bad:
            self.record_bad(index, bad)
        else:
            raise DataError(
                f"{self.source.name(index)} in {self.spec.data_dir}: can be read now, but this run "
                "could not read it before and left it out: restore the file as it was, or resume "
                "with --accept-changed-data"
            )

    def record_bad(self, index: int, bad: BadImage) -> None:
        """Record a bad image; raises DataError if there are too many."""
        self.problems.record_bad(index, str(bad))
        self.problems.refuse_too_many_bad(self.max_bad)


def _find_runs(positions: _Integers) -> list[tuple[int, int]]:
    """The first and last of each run of consecutive positions; a whole step is one run."""
    first, last = int(positions[0]), int(positions[-1])
    if last - first + 1 == len(positions):
        return [(first, last)]
    ends = np.flatnonzero(np.diff(positions) != 1)
    lasts = [*positions[ends].tolist(), last]
    return list(zip([first, *positions[ends + 1].tolist()], lasts, strict=True))


def _draw_block(
    spec: InputSpec, transform: Transform, number: int
) -> tuple[_Integers, list[list[float]]]:
    """The images and random numbers of one block of the training stream.

    Drawn together for many steps, because numpy's cost is per call rather than per number.
    """
    if spec.order is None:
        raise ValueError("an input spec without an order has no training batches")
    positions = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int64)
    return spec.order.indices(positions), transform.draw(spec.seed, positions, spec.order).tolist()


def open_image(source: Source, index: int, cache: ImageCache | None = None) -> Image:
    """An image of a source: still encoded if the source supports that, else its pixels."""
    if cache is None:
        image: Image = getattr(source, "image", source.read)(index)
        return image
    data = cache.get(index)
    if data is None:
        data = bytes(source.read_encoded(index))  # type: ignore[attr-defined]
        cache.put(index, data)
    return source.to_image(index, data)  # type: ignore[attr-defined]
