"""Batches on the device: from the loader, or for synthetic data generated there once."""

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.assemble.build import choose_backend, choose_decoder
from phalanx.assemble.rank_context import RankContext
from phalanx.config.schema import Config
from phalanx.data.formats.decode import BadImage
from phalanx.data.formats.sources import Split
from phalanx.data.loading.decoder_choice import DecoderChoice
from phalanx.data.loading.device import Normaliser, allocate_pinned, copy_ahead, wait_for_copy
from phalanx.data.loading.gpu_share import ImageCheck
from phalanx.data.loading.loader import Loader, prefetch
from phalanx.data.loading.read_problems import describe_small
from phalanx.data.loading.reader import Batch, InputSpec
from phalanx.engine.evaluate import ValidBatch
from phalanx.engine.step import MicroBatch
from phalanx.plan.machine_choice import count_local_ranks
from phalanx.plan.plan import Plan


class StepImage(NamedTuple):
    """A training image of a step."""

    position: int  # in the training stream
    name: str
    label: str | None  # the class; None for noise


class _DeviceBatch(NamedTuple):
    """A batch on the device, not yet normalised."""

    first: int  # its first image's position in the training stream
    images: torch.Tensor
    labels: torch.Tensor
    indices: torch.Tensor | None = None  # only for scoring


class LoadedFeed:
    """Batches of the images that a loader reads."""

    def __init__(
        self,
        loader: Loader,
        plan: Plan,
        normaliser: Normaliser,
        context: RankContext,
        *,
        check: ImageCheck | None = None,
    ) -> None:
        self.loader, self._plan, self._normaliser, self._context = loader, plan, normaliser, context
        known = check or ImageCheck(since=0)
        self._choice = DecoderChoice(normaliser.device, known)
        loader.problems["train"].cores_only.update(dict.fromkeys(known.cores_only))
        self.new_notes: list[str] = []  # for the user, not printed yet
        if self._choice.gpu_decodes and not loader.spec.gpu_percent:
            self.new_notes.append(
                "this run was to decode JPEGs on the GPU; here the cores decode them, and pixels "
                "differ by rounding"
            )
        self._labels: NDArray[np.int64] | None = None
        self._copying: dict[str, Generator[Any, None, None]] = {}  # running copies, by split

    def close(self) -> None:
        """Stop copying; call it before closing the loader, whose batches are being copied."""
        while self._copying:
            self._copying.popitem()[1].close()

    def relabel(self, numbers: NDArray[np.int64]) -> None:
        """Score with another numbering of the classes: label i becomes numbers[i]."""
        self._labels = numbers

    def batches_from(self, step: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from `step` on."""
        stop, first = self._plan.total_steps, self.loader.spec.first_checked_step
        if first is not None:
            yield from self._choice.watch(self._read_steps(step, min(first, stop)))
            self.exchange_problems()  # a GPU would not notice what another rank's cores have found
            self._choice.conclude(self._context.gather, is_over=True)
            self.loader.on_device = self._choice.gpu_decodes
            self.new_notes.append(self._choice.describe(first))
            step = max(step, first)
        yield from self._read_steps(step, stop)

    def _read_steps(self, step: int, stop: int) -> Iterator[list[MicroBatch]]:
        if not self._context.reads_images():
            yield from self._blank_steps(step, stop)
            return
        steps = self.loader.steps_from(
            step, stop, micro_batch=self._plan.micro_batch, share=self._context.train_share
        )
        for passes in self._prefetch_to_device(steps, "train"):
            yield [
                MicroBatch(self._normaliser.normalise(batch.images), batch.labels, batch.first)
                for batch in passes
            ]

    def _blank_steps(self, step: int, stop: int) -> Iterator[list[MicroBatch]]:
        """Micro-batches for a stage that gets no images: positions in the stream, and meta tensors.

        Nothing is read.
        """
        spec, plan, rows = self.loader.spec, self._plan, self._plan.micro_batch
        assert spec.order is not None
        for now in range(step, stop):
            positions = spec.order.positions(now)
            slices = self._context.train_share.slices(plan.global_batch // rows)
            firsts = [int(positions[number * rows]) for number in slices]
            blank = _blank_batch(rows, spec.size_at(now), self._normaliser.device)
            yield [MicroBatch(blank.images, blank.labels, first) for first in firsts]

    def validation_batches(self) -> Iterator[ValidBatch]:
        """Every validation image of this rank's share, once."""
        if not self._context.reads_images(scoring=True):
            rows, images = self._plan.valid_batch, len(self.loader.source("valid"))
            blank = _blank_batch(rows, self.loader.spec.image_size, self._normaliser.device)
            yield from [blank] * len(self._context.valid_share.batches(-(-images // rows)))
            return
        own = self.loader.evaluation_batches(self._plan.valid_batch, self._context.valid_share)
        batches = ([batch] for batch in own)
        for (batch,) in self._prefetch_to_device(batches, "valid"):
            assert batch.indices is not None
            yield ValidBatch(self._normaliser.normalise(batch.images), batch.labels, batch.indices)

    def _prefetch_to_device(
        self, steps: Iterator[list[Batch]], split: Split
    ) -> Iterator[list[_DeviceBatch]]:
        """Each step's batches on the device; on a GPU they are copied while it computes."""

        def copy(step: list[Batch]) -> list[_DeviceBatch]:
            return [self._copy(batch, scored=split == "valid") for batch in step]

        if self._normaliser.device.type != "cuda" or not self.loader.needs_prefetch(split):
            yield from map(copy, steps)
            return
        device = self._normaliser.device
        copied = copy_ahead(steps, copy, device)
        if split in self._copying:
            self._copying[split].close()
        self._copying[split] = ahead = prefetch(copied)
        for step, done in ahead:
            parts = (part for one in step for part in one[1:] if part is not None)
            wait_for_copy(parts, done, device)
            yield step

    def _copy(self, batch: Batch, *, scored: bool) -> _DeviceBatch:
        if batch.ready is not None:  # made on the device, on another stream than this one
            batch.ready.wait()
            batch.pixels.record_stream(torch.cuda.current_stream(batch.pixels.device))
        labels = batch.labels if self._labels is None else self._labels[batch.labels]
        return _DeviceBatch(
            int(batch.positions[0]),
            self._normaliser.copy_pixels(batch.pixels),
            self._normaliser.copy_integers(labels),
            self._normaliser.copy_integers(batch.indices) if scored else None,
        )

    def sample_images(self, count: int) -> torch.Tensor:
        """About `count` training images spread over the dataset, normalised but not augmented."""
        size, images = self.loader.spec.image_size, len(self.loader.source("train"))
        pictures = []
        for index in range(0, images, max(1, images // count)):
            picture = np.empty((size, size, 3), np.uint8)
            if self._write_evaluation("train", index, picture):  # else reported in training
                pictures.append(picture)
        return self._normaliser(np.stack(pictures))

    def _write_evaluation(self, split: Split, index: int, out: NDArray[np.uint8]) -> bool:
        """Write an image as it is scored into `out`; False if it cannot be read."""
        reader = self.loader.reader(split)
        image = reader.try_open(index)
        with suppress(BadImage):
            if not isinstance(image, BadImage):
                reader.transform.apply_evaluation(image, out)
                return True
        return False

    def names(self, indices: NDArray[np.int64]) -> list[str]:
        """The names of validation images, by which the user can find them."""
        return [self.loader.source("valid").name(index) for index in indices.tolist()]

    def digest_labels(self) -> str:
        """A hash of the validation labels in order, which identifies the validation images."""
        labels = np.ascontiguousarray(self.loader.source("valid").labels, np.int64)
        return sha256(labels.tobytes()).hexdigest()

    def list_step_images(self, step: int) -> list[StepImage]:
        """The images of a step, counted from 1; for an unreadable one, its replacement."""
        order, source = self.loader.spec.order, self.loader.source("train")
        bad = self.loader.problems["train"].bad_images
        assert order is not None
        images = []
        for position in order.positions(step - 1).tolist():
            index = int(order.indices([position])[0])
            while index in bad:  # the reader replaces it by the next one, too
                index = (index + 1) % len(source)
            label = source.classes[int(source.labels[index])]
            images.append(StepImage(position, source.name(index), label))
        return images

    def bad_images(self) -> dict[str, str]:
        """Images that could not be read: name and reason."""
        return {
            self.loader.source(split).name(index): reason
            for split, found in self.loader.problems.items()
            for index, reason in sorted(found.bad_images.copy().items())  # a thread may add to it
        }

    def exchange_problems(self) -> None:
        """Add the image problems of other ranks; with several ranks, all must call it."""
        if self._context.ranks is not None:
            own = {split: found.copy() for split, found in self.loader.problems.items()}
            for theirs in self._context.gather(own):
                for split, found in theirs.items():
                    self.loader.problems[split].add(found)

    def recheck_bad(self, names: Collection[str]) -> None:
        """Count bad images of earlier processes of this run towards the number tolerated."""
        self.loader.recheck_bad(names)

    def image_check(self, step: int) -> ImageCheck | None:
        """What a checkpoint at this step must keep of the images' check; all ranks must call it."""
        since, first = self.loader.spec.checked_since, self.loader.spec.first_checked_step
        if since is None or first is None:
            return None
        self.exchange_problems()
        self._choice.conclude(self._context.gather, is_over=step >= first)
        choice = self._choice
        cores_only = tuple(sorted(self.loader.problems["train"].cores_only.copy()))
        return ImageCheck(since, choice.is_decided, choice.waited, cores_only)

    def image_checksums(self) -> dict[str, NDArray[np.uint32]]:
        """The checksums of the images read so far, by split."""
        return self.loader.image_checksums

    def gather_scored_checksums(self) -> NDArray[np.uint32]:
        """Checksums of the validation images read so far; with several ranks, all must call it."""
        own = self.loader.image_checksums.get("valid", np.empty(0, np.uint32))
        return np.concatenate(self._context.gather(own[own != 0]))

    def restore_checksums(self, checksums: Mapping[str, NDArray[np.uint32]]) -> None:
        """Compare all images with the checksums from earlier processes of this run."""
        self.loader.restore_checksums(checksums)

    def notes(self) -> dict[str, str]:
        """Notes for the user so far, by key; only the first note of a key needs to be shown."""
        notes = {text: text for text in self.loader.describe_unsaved_indexes()}
        for split, found in self.loader.problems.items():
            about = found.notes.copy().items()  # negative: a worker process, not an image
            notes |= {text: text for index, text in about if index < 0}
            if small := [text for index, text in about if index >= 0]:
                notes[f"small {split}"] = describe_small(small, split)
        return notes

    def thumbnails(self, indices: list[int]) -> NDArray[np.uint8]:
        """Validation images as the model sees them, before normalisation."""
        size = self.loader.spec.image_size
        pictures = np.zeros((len(indices), size, size, 3), np.uint8)
        for row, index in enumerate(indices):  # one that was deleted since stays black
            self._write_evaluation("valid", index, pictures[row])
        return pictures


def _blank_batch(rows: int, size: int, device: torch.device) -> ValidBatch:
    """A batch whose images are on another stage: meta tensors, labels 0 and indices -1."""
    images = torch.empty(rows, 3, size, size, device="meta")
    labels = torch.zeros(rows, dtype=torch.int64, device=device)
    return ValidBatch(images, labels, torch.full_like(labels, -1))


class _SyntheticFeed:
    """One batch of noise on the device, used for every pass: nothing is read or copied."""

    def __init__(self, plan: Plan, device: torch.device, seed: int, context: RankContext) -> None:
        self._plan, self._context = plan, context
        self.new_notes: list[str] = []  # never any
        generator = torch.Generator().manual_seed(seed)
        rows = max(plan.micro_batch, plan.valid_batch)
        shape = (rows, 3, plan.image_size, plan.image_size)
        images = torch.randn(shape, generator=generator)
        labels = torch.randint(plan.num_classes, (rows,), generator=generator)
        self._images = images.to(device, memory_format=torch.channels_last)
        self._labels = labels.to(device)

    def batches_from(self, step: int) -> Iterator[list[MicroBatch]]:
        """The same images for every pass."""
        rows = self._plan.micro_batch
        slices = self._context.train_share.slices(self._plan.global_batch // rows)
        images, labels = self._images[:rows], self._labels[:rows]
        for now in range(step, self._plan.total_steps):
            begin = now * self._plan.global_batch
            yield [MicroBatch(images, labels, begin + rows * number) for number in slices]

    def validation_batches(self) -> Iterator[ValidBatch]:
        """The same images again and again, up to the plan's number of validation images."""
        rows, images = self._plan.valid_batch, self._plan.valid_images
        for number in self._context.valid_share.batches(-(-images // rows)):
            first = number * rows
            indices = torch.arange(first, first + rows, device=self._labels.device)
            real = torch.where(indices < images, indices, -1)
            yield ValidBatch(self._images[:rows], self._labels[:rows], real)

    def sample_images(self, count: int) -> torch.Tensor:
        """The first images of the batch of noise."""
        return self._images[:count]

    def names(self, indices: NDArray[np.int64]) -> list[str]:
        """Made-up names for made-up images."""
        return [f"synthetic[{index}]" for index in indices.tolist()]

    def digest_labels(self) -> str:
        """The number of validation images, which is all that identifies noise."""
        return str(self._plan.valid_images)

    def list_step_images(self, step: int) -> list[StepImage]:
        """Made-up names: the same images for every pass."""
        start, rows = (step - 1) * self._plan.global_batch, self._plan.micro_batch
        return [
            StepImage(start + row, f"synthetic[{row % rows}]", None)
            for row in range(self._plan.global_batch)
        ]

    def bad_images(self) -> dict[str, str]:
        """Always empty: noise is never bad."""
        return {}

    def exchange_problems(self) -> None:
        """Nothing to exchange."""

    def recheck_bad(self, names: Collection[str]) -> None:
        """Nothing to do: noise is never bad."""

    def image_check(self, step: int) -> ImageCheck | None:
        """Always None: nothing is read."""
        return None

    def image_checksums(self) -> dict[str, NDArray[np.uint32]]:
        """Always empty: nothing is read."""
        return {}

    def gather_scored_checksums(self) -> NDArray[np.uint32]:
        """Always empty."""
        return np.empty(0, np.uint32)

    def restore_checksums(self, checksums: Mapping[str, NDArray[np.uint32]]) -> None:
        """Nothing to restore."""

    def notes(self) -> dict[str, str]:
        """Always empty."""
        return {}

    def thumbnails(self, indices: list[int]) -> NDArray[np.uint8]:
        """Black images: noise is not shown."""
        return np.zeros((len(indices), 8, 8, 3), np.uint8)


Feed = LoadedFeed | _SyntheticFeed


@contextmanager
def open_feed(
    spec: InputSpec,
    plan: Plan,
    normaliser: Normaliser,
    config: Config,
    *,
    context: RankContext,
    check: ImageCheck | None = None,
) -> Iterator[Feed]:
    """Context with the run's source of batches; worker processes end with it.

    check: what the run knows of its images; None if they are not checked.
    """
    if spec.data == "synthetic":
        yield _SyntheticFeed(plan, normaliser.device, spec.seed, context)
        return
    device = normaliser.device
    spec, notes = choose_decoder(spec, plan, device, config, context, check)
    backend = choose_backend(spec, device, config)
    is_resident = backend is not None and not spec.gpu_percent
    loader = Loader(
        spec,
        workers=0 if is_resident else plan.workers,
        max_bad=plan.max_bad,
        images_per_task=config.data.dataloader_rebatch_size,
        cache=count_local_ranks(context.layout) if config.data.dataset_cache else 0,
        allocate=allocate_pinned if device.type == "cuda" else None,
        backend=backend,
    )
    with loader, closing(LoadedFeed(loader, plan, normaliser, context, check=check)) as feed:
        feed.new_notes += notes
        yield feed
