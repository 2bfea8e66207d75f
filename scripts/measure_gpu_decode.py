"""Images/s of JPEGs decoded, cropped and normalised on the GPU, and the error of their pixels.

    python scripts/measure_gpu_decode.py DIR [--percent 40] [--batch-size 256] [--seconds 5]

DIR holds a set of photographs in any form, packed or a folder. Prints the rate of decoding alone
and of cropping alone, both from memory; then of whole batches into device memory, with files opened
by this process and by 4, 8 and 16 workers, of which the given share (by default all) is decoded by
the device; finally the mean difference of training and scoring pixels from the CPU's. With --device
cpu the CPU decodes, to try out the script.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from phalanx.catalog.datasets import DATASETS
from phalanx.data.formats.decode import EncodedImage
from phalanx.data.formats.detect import detect_datasets
from phalanx.data.formats.sources import Split
from phalanx.data.loading.device import Normaliser
from phalanx.data.loading.gpu_decode import (
    Decode,
    GpuDecoder,
    NvJpeg,
    find_gpu_decode_problem,
)
from phalanx.data.loading.loader import Loader
from phalanx.data.loading.opened_rows import OpenRows, is_gpu_decodable
from phalanx.data.loading.reader import BatchRequest, InputSpec, Reader
from phalanx.data.transforms.transform import TransformSpec, choose_crop_and_flip
from phalanx.kernels.crop_resize import crop_and_resize
from phalanx.plan.order import Order

WORKERS = (0, 4, 8, 16)
WARM_UP = 3  # batches that do not count
COMPARED = 4  # batches whose pixels are compared


def decode_here(files: list[Tensor]) -> list[Tensor]:
    """The CPU in place of the GPU decoder."""
    decoded = [EncodedImage(file.numpy().tobytes(), "image").decode() for file in files]
    return [torch.from_numpy(pixels).permute(2, 0, 1) for pixels in decoded]


def make_spec(words: argparse.Namespace) -> InputSpec:
    """The input of training on a set of photographs."""
    found = detect_datasets(words.dir)[0]
    spec = InputSpec(
        data=found.data,
        data_dir=str(found.folder),
        image_size=words.size,
        transform=TransformSpec(augment="resized-crop"),
        seed=0,
        gpu_percent=words.percent,
    )
    images = len(spec.open("train"))
    return replace(spec, order=Order(images=images, global_batch=words.batch_size, seed=0))


class Bench:
    """What the measurements share: images, device and duration."""

    def __init__(self, words: argparse.Namespace):
        self.spec, self.device = make_spec(words), torch.device(words.device)
        self.seconds, self.batch = words.seconds, words.batch_size
        self.on_gpu = self.device.type == "cuda"
        self.make_decode: Callable[[], Decode] = lambda: (
            NvJpeg(self.device) if self.on_gpu else decode_here
        )
        dataset = DATASETS[self.spec.data]
        self.normaliser = Normaliser(dataset.mean, dataset.std, device=self.device)

    def reader(self, split: Split = "train") -> Reader:
        """A reader of one split."""
        return Reader(self.spec, split)

    def wait(self) -> None:
        """Wait until the device is idle, before the clock is read."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def rate(self, work: Callable[[], object]) -> float:
        """Images/s of a function that handles a batch."""
        for _ in range(WARM_UP):
            work()
        self.wait()
        begin, batches = perf_counter(), 0
        while perf_counter() - begin < self.seconds:
            work()
            batches += 1
        self.wait()
        return batches * self.batch / (perf_counter() - begin)

    def parts_alone(self) -> dict[str, float]:
        """The rates of decoding and of cropping the same batch again and again."""
        reader, order = self.reader(), self.spec.order
        assert order is not None
        indices, draws = reader.find_samples(order.positions(0))
        opened = [reader.try_open(index) for index in indices.tolist()]
        usable = [image for image in opened if is_gpu_decodable(image)]  # type: ignore[arg-type]
        usable = (usable * self.batch)[: self.batch]
        if not usable:
            return {}
        choices = [
            choose_crop_and_flip(self.spec.transform, (image.height, image.width), None, numbers)
            for image, numbers in zip(usable, draws, strict=True)
        ]
        crops, flips = zip(*choices, strict=True)
        files = [torch.frombuffer(bytearray(image.data), dtype=torch.uint8) for image in usable]
        decoder = self.make_decode()
        tensors, size = decoder(files), self.spec.image_size
        return {
            "decode alone": self.rate(lambda: decoder(files)),
            "cut alone": self.rate(lambda: crop_and_resize(tensors, crops, flips, size=size)),
        }

    def together(self, workers: int) -> tuple[float, int]:
        """Images/s of whole batches with that many workers, and calls that the decoder refused."""
        decoders: list[GpuDecoder] = []

        def build(reader: Reader, open_rows: OpenRows) -> GpuDecoder:
            decoders.append(self.build_decoder(reader, open_rows))
            return decoders[-1]

        with Loader(self.spec, workers=workers, backend=build) as loader:
            steps = loader.steps_from(0, sys.maxsize, micro_batch=self.batch)

            def fill() -> None:
                [batch] = next(steps)
                if batch.ready is not None:
                    batch.ready.wait()
                self.normaliser(batch.pixels)

            rate = self.rate(fill)
        return rate, sum(decoder.failed_calls for decoder in decoders)

    def build_decoder(self, reader: Reader, open_rows: OpenRows | None = None) -> GpuDecoder:
        """The decoder of a reader's batches."""
        decode = None if self.on_gpu else decode_here
        return GpuDecoder(reader, self.device, open_rows=open_rows, decode=decode)

    def difference(self, split: Split) -> tuple[float, float]:
        """The difference of pixels from the host's, in 255ths: the mean, and the worst image's."""
        reader, size, order = self.reader(split), self.spec.image_size, self.spec.order
        assert order is not None
        decoder = self.build_decoder(self.reader(split))
        apart = []
        for step in range(COMPARED):
            positions = order.positions(step)
            positions = positions if split == "train" else positions % len(reader.source)
            expected = np.empty((len(positions), size, size, 3), np.uint8)
            known = reader.fill(positions, expected)
            [batch] = decoder.batches([BatchRequest(positions, size)])
            if batch.ready is not None:
                batch.ready.synchronize()
            assert (batch.indices == known.indices).all()
            difference = np.abs(batch.pixels.cpu().numpy().astype(np.int16) - expected)
            apart.append(difference.mean(axis=(1, 2, 3)))
        decoder.close()
        return float(np.mean(apart)), float(np.max(apart))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--percent", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    words = parser.parse_args()
    problem = find_gpu_decode_problem(torch.device(words.device))
    if problem and words.device != "cpu":
        parser.error(problem)
    bench = Bench(words)
    for what, rate in bench.parts_alone().items():
        print(f"{what:<24}{rate:>10,.0f} images/s", flush=True)
    for workers in WORKERS:
        rate, refused = bench.together(workers)
        more = f", {refused} calls refused" if refused else ""
        print(f"together, {workers:>2} workers{rate:>13,.0f} images/s{more}", flush=True)
    splits: tuple[Split, ...] = ("train", "valid")
    for split in splits:
        mean, worst = bench.difference(split)
        print(f"{split}: pixels {mean:.2f} of 255 from the CPU's, {worst:.2f} at most")


if __name__ == "__main__":
    main()
