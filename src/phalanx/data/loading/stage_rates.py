"""How fast images are loaded, stage by stage, and whether data or model is the bottleneck."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np

from phalanx.data.formats.decode import BadImage, EncodedImage, Image, decode_image
from phalanx.data.loading.reader import Reader, open_image

_SAMPLES = 256  # images to time the stages on, spread over the dataset


@dataclass(frozen=True)
class StageRate:
    """The images/s of one stage."""

    stage: str
    images_per_second: float
    what: str


_ON_GPU = "--gpu-decode true (in a new run), "
_ADVICE = {
    "read": "a faster disk, or `phalanx data build --to packed`, which reads one file",
    "decode": "more --workers, {on_gpu}or `phalanx data build --to packed --short-side 256`",
    "augment": "more --workers, or fewer augmentations",
}


def describe_bottleneck(
    loaded: float,
    trained: float,
    *,
    model: str,
    stages: Sequence[StageRate],
    gpu_could_decode: bool = False,
) -> str:
    """Which is slower, loading or training, and what would help; rates in images/s."""
    head = f"reads {loaded:,.0f} images/s; {model} needs {trained:,.0f}"
    if loaded >= trained:
        ratio = loaded / trained
        digits = 0 if ratio >= 10 else 1
        return f"{head}: the model is the limit, data is {ratio:,.{digits}f} times as fast"
    advised = [rate for rate in stages if rate.stage in _ADVICE]
    slowest = min(advised, key=lambda rate: rate.images_per_second)
    advice = _ADVICE[slowest.stage].format(on_gpu=_ON_GPU if gpu_could_decode else "")
    return f"{head}: data is the limit, mostly {slowest.stage}; {advice}"


def time_stages(reader: Reader, seconds: float, samples: int = _SAMPLES) -> Iterator[StageRate]:
    """The rates of reading, decoding and augmenting on one core."""
    source, size = reader.source, reader.spec.image_size
    spread = np.linspace(0, len(source) - 1, min(samples, len(source))).astype(int).tolist()
    readable: dict[int, tuple[Image, Image]] = {}  # by index: as opened, and decoded
    for index in dict.fromkeys(spread):
        with suppress(BadImage):
            image = open_image(source, index)
            readable[index] = image, decode_image(image)
    if not readable:
        return
    opened, decoded = zip(*readable.values(), strict=True)
    draws = reader.transform.draw(0, np.arange(len(opened))).tolist()
    out = np.empty((1, size, size, 3), np.uint8)

    def augment(sample: tuple[Image, list[float]]) -> None:
        reader.transform.apply_training([(*sample, None)], out)

    def time(work: Callable[[Any], object], items: Iterable[Any]) -> float:
        coming = cycle(items)

        def handle_one() -> int:
            work(next(coming))
            return 1

        return measure_rate(handle_one, seconds)

    reading = time(partial(open_image, source), readable)
    yield StageRate("read", reading, "bytes of an image from the disk or its cache")
    if isinstance(opened[0], EncodedImage):
        yield StageRate("decode", time(decode_image, opened), "the whole image")
    augmenting = time(augment, zip(decoded, draws, strict=True))
    yield StageRate("augment", augmenting, "crop, resize and the rest, of decoded images")
    both = time(augment, zip(opened, draws, strict=True))
    yield StageRate("both", both, "decode no more than needed, and augment")


def measure_rate(work: Callable[[], int], seconds: float) -> float:
    """The images/s of `work`, which returns how many images it has processed."""
    work()
    begin, images = perf_counter(), 0
    while perf_counter() - begin < seconds:
        images += work()
    return images / (perf_counter() - begin)
