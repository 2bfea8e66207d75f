"""How fast images are made, stage by stage, and who waits for whom."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter

import numpy as np

from phalanx.data.formats.decode import BadImage, EncodedImage, decode_image
from phalanx.data.loading.reader import Reader, open_image

_SAMPLES = 256  # images that the stages are timed on, spread over the set


@dataclass(frozen=True)
class Rate:
    """How many images a second something manages."""

    stage: str
    images_per_second: float
    what: str


_ADVICE = {
    "read": "a faster disk, or `phalanx data build --to packed`, which reads one file",
    "decode": "more --workers, or `phalanx data build --to packed --short-side 256`",
    "augment": "more --workers, or fewer augmentations",
}


def judge_feeding(come: float, eaten: float, *, model: str, stages: Sequence[Rate]) -> str:
    """Who waits for whom, and what would help; rates in images a second."""
    head = f"{come:,.0f} images/s come, {model} eats {eaten:,.0f}"
    if come >= eaten:
        return f"{head}: the model is the limit, data comes {come / eaten:.1f} times as fast"
    made = [rate for rate in stages if rate.stage in _ADVICE]
    slowest = min(made, key=lambda rate: rate.images_per_second)
    return f"{head}: data is the limit, {slowest.stage} above all; {_ADVICE[slowest.stage]}"


def time_stages(reader: Reader, seconds: float, samples: int = _SAMPLES) -> Iterator[Rate]:
    """Reading, decoding and augmenting, on this core."""
    source = reader.source
    spread = np.linspace(0, len(source) - 1, min(samples, len(source))).astype(int).tolist()
    sound = {}
    for index in dict.fromkeys(spread):
        with suppress(BadImage):
            picture = open_image(source, index)
            sound[index] = picture, decode_image(picture)
    if not sound:
        return
    pictures, plain = zip(*sound.values(), strict=True)
    draws = reader.transform.draw(0, np.arange(len(pictures))).tolist()
    out = np.empty((1, reader.recipe.image_size, reader.recipe.image_size, 3), np.uint8)
    read, opened, arrays = cycle(sound), cycle(pictures), cycle(zip(plain, draws, strict=True))
    whole = cycle(zip(pictures, draws, strict=True))

    def augment() -> int:
        image, numbers = next(arrays)
        reader.transform.train([image], [numbers], out, None)
        return 1

    def as_trained() -> int:
        image, numbers = next(whole)
        reader.transform.train([image], [numbers], out, None)
        return 1

    def fetch() -> int:
        open_image(source, next(read))
        return 1

    def decode() -> int:
        decode_image(next(opened))
        return 1

    yield Rate("read", rate_of(fetch, seconds), "bytes of an image from the disk or its cache")
    if isinstance(pictures[0], EncodedImage):
        yield Rate("decode", rate_of(decode, seconds), "the whole image")
    yield Rate("augment", rate_of(augment, seconds), "crop, resize and the rest, of decoded images")
    yield Rate("both", rate_of(as_trained, seconds), "decode no more than needed, and augment")


def rate_of(work: Callable[[], int], seconds: float) -> float:
    """Images a second of work that says how many it did."""
    work()
    begin, images = perf_counter(), 0
    while perf_counter() - begin < seconds:
        images += work()
    return images / (perf_counter() - begin)
