"""A few encoded images of every kind, to be written in one form and read back."""

import io
from dataclasses import replace
from itertools import islice

import numpy as np
from PIL import Image

from phalanx.data.convert.build import OUTPUT_FORMATS
from phalanx.data.convert.sample import EncodeOptions, Sample, convert_sample
from phalanx.data.formats.decode import BadImage

CLASSES = ("cat", "dög", "n01440764")
KINDS = (("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"))
BOX = (0.125, 0.25, 0.5, 0.75)


def encode(mode, form, *, value=100, size=(20, 16)):
    """An image file of smooth content, which a JPEG keeps almost as it is."""
    width, height = size
    ramp = np.linspace(0, 60, width)[None, :] + np.full((height, 1), value)
    image = Image.fromarray(ramp.astype(np.uint8)).convert(mode)
    file = io.BytesIO()
    image.save(file, form, quality=95)
    return file.getvalue()


def make_samples(count=10, *, boxes=False):
    """Images of all kinds in turn, in three classes, one name not ASCII."""
    return [
        Sample(
            name=f"train/dög/{number} ü.jpg" if number % 3 == 1 else f"train/{number}.jpg",
            data=encode(*KINDS[number % 4], value=10 * number),
            label=number % 3,
            box=BOX if boxes and number % 2 else None,
        )
        for number in range(count)
    ]


def undecodable(name="broken.jpg"):
    """A JPEG that is none beyond its first bytes."""
    return Sample(name=name, data=b"\xff\xd8 and then nothing", label=0)


def convert(sample, options):
    """The sample as a build would hand it to a writer; one that cannot be decoded stays."""
    try:
        return convert_sample(sample, options)
    except BadImage:
        return replace(sample, data=b"", shape=(0, 0)) if options.raw else sample


def make_writer(to, folder, split="train", *, count, classes=CLASSES, **job):
    """What writes a split in a format."""
    return OUTPUT_FORMATS[to](out=folder, split=split, count=count, classes=classes, **job)


def write_split(to, samples, folder, split="train", *, count=None, **job):
    """Write a split as a build does: each image converted first, on after the last whole shard."""
    writer = make_writer(to, folder, split, count=count or len(samples), **job)
    options = EncodeOptions(
        only_jpeg=writer.only_jpeg, short_side=job.get("short_side"), raw=job.get("raw", False)
    )
    converted = (convert(sample, options) for sample in samples)
    writer.write(lambda first: islice(converted, first, None))
