"""Which way of decoding photographs beside training loses least, and what the loss consists of.

    python scripts/lab/decode_variants.py DIR [--variants "x2; x4 single"] [--rounds 3] [--steps 90]
        [--seconds 400] [--out FOLDER] [--device cpu --set model=resnet18 batch-size=8 ...]

DIR is a folder of photographs, by split and class. One process trains one ResNet-50 throughout;
variants alternate, each with the same images and with decoders of its own. Each word of a variant's
name changes one thing: x3, three decoders (the product has two); single, nvJPEG without its
pipeline; launched, training on a stream of high priority; captured, its graph as well; own, crops
on a stream for each decoder; high, crops at high priority; apart, nvJPEG does not wait for crops;
arrays, no Python object for each image (array_decode.py); pinned, the same with tables in pinned
memory; 0.8, the GPU's share; 5ms or 20us, how long a thread of Python may keep the lock; frozen,
without garbage collection; alone, without training; synthetic, training without photographs.

Question: 256 photographs take 26.4 ms, 256 synthetic images 23.0. The decoders of the product have
a step ready every 27 ms: a call of nvJPEG takes 42 ms and its crops 11, twice what they take alone.
What to expect of each cause:
- Both decoders queue crops on one stream, and a call of nvJPEG waits for that stream: then `behind`
  is about 10 ms, `apart` and `own` make it 0, and a batch is ready every 21 ms.
- Copies from memory that is not pinned wait for that stream, too: then `own` takes `crops` from 11
  to 3 ms, and `pinned` to less than `arrays`.
- nvJPEG's small kernels wait for room on the chip: then `launched` takes `nvjpeg` from 42 to 34 ms,
  and `x4 single` gives a batch every 18 ms, as beside a graph alone.
- Threads wait for Python's lock: then `crops` takes far longer than `their cpu`, which includes
  waiting for the GPU, and `20us` is better, `5ms` worse. Not expected: 256 views, each of which
  gives up the lock, take 0.56 ms beside a busy thread and 0.40 without on the CPU machine. There,
  `arrays` saves 2 to 3 ms of work for a batch, so no more than 1.5 ms a step.
- The chip itself is the limit: then training is not `starved`, but `graph` takes 2 to 3 ms longer
  than with synthetic images, in every variant that is fast enough; only cheaper kernels would help.
- The single stop of 0.3 s: to collect all garbage takes 0.27 s on the CPU machine with what is
  imported for training, so `gc2` is in the list of stops, and `frozen` has none; if it is memory
  that nvJPEG or torch allocates anew, a stop says `nvjpeg`, or `allocated` is not 0.

All times are milliseconds: of the stream of training `step` from end to end, `on gpu` from a step's
images to its end, `starved` from there to the next images; the others of threads, for each batch,
`idle` of a decoder between two batches. `allocated`: how often torch asked CUDA for memory. --out:
FOLDER/runs.json, and spans.json with every phase of each variant's last run. With --device cpu the
CPU decodes, to try this out.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from array_decode import Decoded, crop_arrays, decode_arrays, is_plain
from phase_recorder import Mark, Recorder, Span, describe_stops
from torch import Tensor

from phalanx.assemble.dataset_summary import build_input_spec, plan_run
from phalanx.assemble.feed import LoadedFeed
from phalanx.assemble.session import Session
from phalanx.config.read import read_settings
from phalanx.data.formats.decode import EncodedImage
from phalanx.data.loading import gpu_decode
from phalanx.data.loading.device import allocate_pinned
from phalanx.data.loading.gpu_decode import Decode, GpuDecoder
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.nvjpeg import NvJpeg
from phalanx.data.loading.opened_rows import OpenRows
from phalanx.data.loading.reader import Batch, Reader
from phalanx.data.loading.worker_pool import WorkerPool
from phalanx.engine.captured_pass import CapturedPass
from phalanx.engine.step import MicroBatch, build_forward_backward

WORDS: dict[str, dict[str, Any]] = {
    **{f"x{count}": {"decoders": count} for count in (1, 2, 3, 4)},
    "single": {"flags": 1},  # NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE
    "launched": {"launches_high": True},
    "captured": {"launches_high": True, "captures_high": True},
    "own": {"own_streams": True},
    "high": {"crop_priority": -1},
    "apart": {"apart": True},
    "arrays": {"arrays": True},
    "pinned": {"arrays": True, "pinned": True},
    **{f"0.{tenths}": {"percent": 10 * tenths} for tenths in (6, 7, 8, 9)},
    "5ms": {"switch_s": 5e-3},
    "20us": {"switch_s": 2e-5},
    "frozen": {"collects": False},
    "alone": {"trains": False},
    "synthetic": {"reads": False},
}
VARIANTS = (
    "synthetic; x2; x2 own; x2 apart own; x2 launched; x2 apart own launched; x4 single launched; "
    "x2 arrays; x2 pinned own; x3 apart own pinned launched; x4 single apart own pinned launched; "
    "x4 single; x3; x2 high; x2 captured; x2 20us; x2 5ms; x2 0.9; x2 0.8; x2 frozen; x2 alone; "
    "x4 single own pinned alone"
)
WARM_UP = 14  # steps: the batches that were made while nothing trained are used up
PHASES: dict[str, tuple[Any, str]] = {
    "collect": (GpuDecoder, "_collect"),
    "answers": (WorkerPool, "_collect"),
    "batch": (GpuDecoder, "_decode_batch"),
    "nvjpeg": (NvJpeg, "__call__"),
    "crops": (gpu_decode, "_crop_decoded"),
    "rows": (GpuDecoder, "_write_rows"),
}
ON_GPU = ("nvjpeg", "cut", "graph")  # phases that are also timed by the stream they queue work on
COLUMNS = (
    *("images/s", "step", "p95", "max", "on gpu", "graph", "starved", "idle", "nvjpeg", "its cpu"),
    *("behind", "crops", "their cpu", "cut", "rows", "collect", "answers", "allocated"),
)


@dataclass(frozen=True)
class Variant:
    """A way to decode and to train."""

    name: str
    decoders: int = 2
    flags: int = 0
    percent: int = 100
    launches_high: bool = False
    captures_high: bool = False
    own_streams: bool = False
    crop_priority: int = 0
    apart: bool = False
    arrays: bool = False
    pinned: bool = False
    switch_s: float = 1e-4
    collects: bool = True
    trains: bool = True
    reads: bool = True


def parse_variant(name: str) -> Variant:
    """The variant of that name."""
    changes = {key: value for word in name.split() for key, value in WORDS[word].items()}
    return Variant(name, **changes)


def decode_here(files: list[Tensor]) -> list[Tensor]:
    """The CPU in place of the GPU."""
    decoded = [EncodedImage(file.numpy().tobytes(), "image").decode() for file in files]
    return [torch.from_numpy(pixels).permute(2, 0, 1) for pixels in decoded]


def create_with(flags: int) -> Callable[[NvJpeg, int], int]:
    """What creates a decoder with these flags of nvjpegCreateEx."""

    def create(nvjpeg: NvJpeg, backend: int) -> int:
        handle = ctypes.byref(nvjpeg._handle)
        status: int = nvjpeg._library.nvjpegCreateEx(backend, None, None, flags, handle)
        return status

    return create


def decode_apart(nvjpeg: NvJpeg) -> Decode:
    """Decoding in memory of nvJPEG's own stream, so that it need not wait for crops."""

    def decode_files(files: list[Tensor]) -> list[Tensor]:
        crops = torch.cuda.current_stream()
        with torch.cuda.stream(nvjpeg._stream):
            images = nvjpeg(files)
        images[0].record_stream(crops)  # all are parts of one piece of memory
        return images

    return decode_files


class VariantDecoder(GpuDecoder):
    """The product's decoder, with the streams of a variant."""

    def __init__(
        self, reader: Reader, open_rows: OpenRows, variant: Variant, recorder: Recorder
    ) -> None:
        on_gpu, device = recorder.on_gpu, torch.device("cuda" if recorder.on_gpu else "cpu")
        super().__init__(
            reader, device, open_rows=open_rows, decode=None if on_gpu else decode_here
        )
        twins = {}
        if on_gpu:
            self._stream = torch.cuda.Stream(device, priority=variant.crop_priority)
            if variant.apart:
                self._decoders = [decode_apart(nvjpeg) for nvjpeg in self._nvjpegs]
        for one in self._decoders if variant.own_streams else []:
            twins[id(one)] = twin = copy(self)
            if on_gpu:
                twin._stream = torch.cuda.Stream(device, priority=variant.crop_priority)
        self._twins, self._variant, self._record = twins, variant, recorder.record
        named = zip(self._decoders, self._nvjpegs, strict=False)
        self._by_decode = {id(one): nvjpeg for one, nvjpeg in named if variant.arrays}
        for twin in twins.values():
            vars(twin).update(_record=self._record, _by_decode=self._by_decode, _variant=variant)

    def _decode_batch(self, batch: Any, decode: Decode) -> Batch:
        return GpuDecoder._decode_batch(self._twins.get(id(decode), self), batch, decode)

    def _decode_jpegs(self, batch: Any, out: Tensor, decode: Decode) -> list[int]:
        nvjpeg, jpegs, files = self._by_decode.get(id(decode)), batch.jpegs, batch.files
        if nvjpeg is None or not is_plain(jpegs, files):
            return super()._decode_jpegs(batch, out, decode)
        apart = torch.cuda.stream(nvjpeg._stream) if self._variant.apart else nullcontext()
        try:
            with apart:
                run = partial(decode_arrays, nvjpeg, jpegs, files)
                decoded: Decoded = self._record("nvjpeg", run)
        except RuntimeError:
            return super()._decode_jpegs(batch, out, decode)
        if self._variant.apart:
            decoded.flat.record_stream(torch.cuda.current_stream())
        size, pinned = batch.request.size, self._variant.pinned
        self._record("crops", lambda: crop_arrays(decoded, jpegs, size, out, pinned=pinned))
        return []


class Trainer:
    """One model in training, and loaders for each share."""

    def __init__(self, words: argparse.Namespace, exits: ExitStack) -> None:
        flags = {"data": "folder", "data-dir": str(words.dir), "batch-size": "256"}
        flags |= {"half-type": "float16", "loss-scaling": "128", "validation-mode": "none"}
        flags |= {"lr": "0.01", "steps": "1000000", "device": words.device}
        flags |= dict(text.split("=", 1) for text in words.set)
        settings = read_settings("synthetic-resnet50", flags)
        self.plan, dataset = plan_run(settings)
        self._config, self._exits, self._steps = settings.config, exits, words.steps
        session = Session(self._config, self.plan, classes=dataset.classes)
        self.session = exits.enter_context(session)
        self.device = self.session.device
        self.on_gpu = self.device.type == "cuda"
        self.recorder = Recorder(on_gpu=self.on_gpu, timed_by_streams=ON_GPU)
        for name, place in PHASES.items():
            self.recorder.wrap(name, *place)
        if self.on_gpu:
            self.recorder.wrap_kernel()
        gc.callbacks.append(self.recorder.on_gc)
        self._loaders: dict[int, Loader] = {}
        self._variant = Variant("")
        self.spans: list[Span] = []  # of the last run
        rows, size = self.plan.micro_batch, self.plan.image_size
        images = torch.randn(rows, 3, size, size, device=self.device)
        images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(self.plan.num_classes, (rows,), device=self.device)
        self._fixed = [MicroBatch(images, labels, 0)]
        self._high = torch.cuda.Stream(priority=-1) if self.on_gpu else None
        for _ in range(4):  # kernels are chosen, the graph is captured
            self.session.train_step(self._fixed, 0.0)
        usual = self.session._forward_backward
        self._passes = {False: usual, True: usual}
        if self.on_gpu:
            self.recorder.wrap("graph", torch.cuda.CUDAGraph, "replay")
            high = CapturedPass(self.session.model, self.session.options, global_batch=rows)
            high._stream = self._high
            self._passes[True] = build_forward_backward(high, global_batch=rows)

    def _find_loader(self, percent: int) -> Loader:
        """The loader of a share: its workers live as long as this process."""
        if percent not in self._loaders:
            spec = build_input_spec(self._config, self.plan)
            self._loaders[percent] = self._exits.enter_context(
                Loader(
                    replace(spec, gpu_percent=percent),
                    workers=self.plan.workers,
                    images_per_task=self._config.data.dataloader_rebatch_size,
                    allocate=allocate_pinned if self.on_gpu else None,
                    backend=self._build_decoder,
                )
            )
        return self._loaders[percent]

    def _build_decoder(self, reader: Reader, open_rows: OpenRows) -> GpuDecoder:
        return VariantDecoder(reader, open_rows, self._variant, self.recorder)

    @contextmanager
    def _open_batches(self, variant: Variant) -> Iterator[Iterator[Sequence[MicroBatch]]]:
        """The same images each time, by the variant's decoders."""
        if not variant.reads:
            yield repeat(self._fixed)
            return
        self._variant, loader = variant, self._find_loader(variant.percent)
        session = self.session
        with closing(
            LoadedFeed(loader, self.plan, session.normaliser, session.rank_context)
        ) as feed:
            try:
                yield feed.batches_from(0)
            finally:
                feed.close()
                if ("train", True) in loader._backends:  # what failed early has none
                    loader._streams.pop("train").close()
                    loader._backends.pop(("train", True)).close()

    @contextmanager
    def _apply(self, variant: Variant) -> Generator[None, None, None]:
        """Within the block the product's constants and streams are the variant's."""
        vars(self.session)["_forward_backward"] = self._passes[variant.captures_high]
        stream: AbstractContextManager[object] = nullcontext()
        if variant.launches_high and self.on_gpu:
            stream = torch.cuda.stream(self._high)
        counts: dict[str, Any] = {"_DECODERS": variant.decoders, "_BUFFERS": variant.decoders + 2}
        if not variant.collects:
            gc.collect()
            gc.freeze()
            gc.disable()
        with (
            patch.multiple(gpu_decode, _SWITCH_S=variant.switch_s, **counts),
            patch.object(NvJpeg, "_create", create_with(variant.flags)),
            stream,
        ):
            try:
                yield
            finally:
                gc.enable()
                gc.unfreeze()

    def _take_step(self, variant: Variant, batches: Iterator[Sequence[MicroBatch]]) -> None:
        record, mark = self.recorder.record, self.recorder.mark
        called, passes = perf_counter(), record("wait", lambda: next(batches))
        begin = mark()
        if variant.trains:
            record("launch", lambda: self.session.train_step(passes, 1e-3))
        elif self.on_gpu:
            torch.cuda.current_stream().synchronize()
        self.recorder.marks.append(Mark("step", called, begin, mark()))

    def run(self, variant: Variant) -> dict[str, Any]:
        """Some steps of a variant: its row."""
        with self._apply(variant), self._open_batches(variant) as batches:
            for _ in range(WARM_UP):
                self._take_step(variant, batches)
            self.recorder.start()
            before = self._count_allocations()
            for _ in range(self._steps):
                self._take_step(variant, batches)
            allocated = self._count_allocations() - before
            self.spans, marks = self.recorder.spans.copy(), self.recorder.marks.copy()
            if self.on_gpu:
                torch.cuda.synchronize()  # marks can be read from here on
        return self._summarise(variant, marks) | {"allocated": allocated}

    def _count_allocations(self) -> int:
        """How often torch has allocated memory of the device from CUDA."""
        stats: dict[str, Any] = torch.cuda.memory_stats() if self.on_gpu else {}
        return int(stats.get("num_device_alloc", 0))

    def _summarise(self, variant: Variant, marks: list[Mark]) -> dict[str, Any]:
        find_time = self.recorder.find_time
        times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for name, called, begin, end in marks:
            times[name].append((called, find_time(begin), find_time(end)))
        ends = [end for *_, end in times["step"]]
        steps = [1e3 * (after - before) for before, after in pairwise(ends)]
        starved = [now[1] - last[2] for last, now in pairwise(times["step"])]
        walls: dict[str, float] = defaultdict(float)
        cpus: dict[str, float] = defaultdict(float)
        for span in self.spans:
            walls[span.name] += 1e3 * (span.end - span.begin)
            cpus[span.name] += 1e3 * span.cpu
        each = max(1, sum(span.name == "batch" for span in self.spans))
        elapsed = 1e3 * (ends[-1] - ends[0])
        row = {
            "images/s": 1e3 * self.plan.global_batch * len(steps) / elapsed,
            "step": median(steps),
            "p95": float(np.percentile(steps, 95)),
            "max": max(steps),
            "on gpu": 1e3 * median(end - begin for _, begin, end in times["step"]),
            "graph": 1e3 * median([end - begin for _, begin, end in times["graph"]] or [0.0]),
            "starved": 1e3 * mean(starved),
            "idle": max(0.0, variant.decoders * elapsed - walls["batch"]) / each * variant.reads,
            "behind": 1e3 * sum(max(0.0, t[1] - t[0]) for t in times["nvjpeg"]) / each,
            "cut": 1e3 * sum(t[2] - t[1] for t in times["cut"]) / each,
            **{name: walls[name] / each for name in ("nvjpeg", "crops", "rows", "collect")},
            "its cpu": cpus["nvjpeg"] / each,
            "their cpu": cpus["crops"] / each,
            "answers": walls["answers"] / each,
        }
        return row | {"stops": list(describe_stops(ends, self.spans))}


def print_table(rows: list[dict[str, Any]], names: Sequence[str]) -> None:
    """A line for each variant: the medians of its runs, and the range of its rates."""
    print(
        f"{'':<32}{'range':>16}" + "".join(f"{name:>{max(7, len(name) + 1)}}" for name in COLUMNS)
    )
    for name in names:
        own = [row for row in rows if row["variant"] == name]
        if own:
            rates = sorted(row["images/s"] for row in own)
            line = f"{name:<32}{f'{rates[0]:,.0f}-{rates[-1]:,.0f}':>16}"
            for column in COLUMNS:
                value = median(row[column] for row in own)
                form = ",.0f" if column == "images/s" else ".1f"
                line += f"{value:>{max(7, len(column) + 1)}{form}}"
            print(line)


def main() -> int:
    """Alternate between the variants, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seconds", type=float, default=400, help="no run begins after that")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", nargs="*", default=[], help="options of phalanx train")
    words = parser.parse_args()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    began, names = perf_counter(), [name.strip() for name in words.variants.split(";")]
    variants = [parse_variant(name) for name in names]
    rows: list[dict[str, Any]] = []
    spans: dict[str, list[Span]] = {}
    with ExitStack() as exits:
        trainer = Trainer(words, exits)
        print(f"ready after {perf_counter() - began:.0f} s", flush=True)
        for number in range(words.rounds):
            turn = number * len(variants) // words.rounds
            for variant in (*variants[turn:], *variants[:turn]):
                if perf_counter() - began > words.seconds:
                    break
                row: dict[str, Any] = {"variant": variant.name, "round": number}
                try:
                    row |= trainer.run(variant)
                except Exception as failure:  # noqa: BLE001 - the others are measured all the same
                    print(f"{variant.name}: {str(failure)[:300]}", flush=True)
                    continue
                rows.append(row)
                spans[variant.name] = trainer.spans
                for stop in row["stops"][:3]:
                    print(f"{variant.name}, round {number}, {stop[:230]}", flush=True)
        print_table(rows, names)
        print(f"{len(rows)} runs, {perf_counter() - began:.0f} s")
    if words.out:
        words.out.mkdir(parents=True, exist_ok=True)
        for file, content in (("runs", rows), ("spans", spans)):
            (words.out / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
