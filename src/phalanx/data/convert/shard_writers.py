"""Writes shards: tar files for WebDataset, and TFRecord files with ImageNet's keys."""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from phalanx.data.convert.sample import Sample, choose_suffix
from phalanx.data.convert.writer import ShardWriter, write_class_names
from phalanx.data.formats.shards import SHARD_PREFIX
from phalanx.data.formats.tfrecord import BOX_SIDES, LABELS_FILE, SHARDS, number_labels
from phalanx.data.formats.tfrecord_wire import FeatureValues, write_example, write_record
from phalanx.data.formats.webdataset import CLASSES_FILE, METADATA
from phalanx.data.pillow_image import read_image_header
from phalanx.disk import write_atomically


class TarWriter(ShardWriter):
    """Writes tar shards, see `formats.webdataset`; images are not re-encoded.

    Also writes classes.txt, and metadata.json with the number of images.
    """

    only_jpeg = False
    takes_shards = True
    image_overhead = 6 * 512 - 256  # three members, each with a header, padded to 512 bytes

    def shard_path(self, number: int) -> Path:
        """The path of a complete shard."""
        return self.out / f"{SHARD_PREFIX[self.split]}-{number:06}.tar"

    def find_files(self) -> Iterable[Path]:
        """The shards."""
        return self.out.glob(f"{SHARD_PREFIX[self.split]}-*.tar")

    def start(self, whole_shards: int) -> None:
        """Write class names and the number of images: readers refuse shards that have fewer."""
        write_class_names(self.out / CLASSES_FILE, self.classes)
        lengths = {f"{SHARD_PREFIX[split]}_length": count for split, count in self.lengths.items()}
        text = json.dumps(lengths, indent=2, sort_keys=True)
        write_atomically(self.out / METADATA, f"{text}\n")

    def write_shard(self, file: BinaryIO, number: int, samples: Iterator[Sample]) -> None:
        """Write three members for each image: the image, its class, and JSON with name and box."""
        with tarfile.open(fileobj=file, mode="w") as tar:
            for key, sample in enumerate(samples, self.bounds[number]):
                facts = {"filename": sample.name, "label": sample.label}
                if sample.box is not None:
                    facts["bbox"] = [float(side) for side in sample.box]
                _add_member(tar, f"{key:08}.{choose_suffix(sample.data)}", sample.data)
                _add_member(tar, f"{key:08}.cls", str(sample.label).encode())
                _add_member(tar, f"{key:08}.json", json.dumps(facts).encode())


def _add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # no time, no owner: the same bytes every time
    member.size, member.mode = len(data), 0o644
    tar.addfile(member, io.BytesIO(data))


class TFRecordWriter(ShardWriter):
    """Writes TFRecord shards, see `formats.tfrecord`, and labels.txt."""

    only_jpeg = True
    takes_shards = True
    shard_mib = 48  # so that ImageNet gets its usual 1,024 and 128 shards
    image_overhead = 350

    def choose_bounds(self) -> list[int]:
        """Shards of sizes as equal as possible, not more than images."""
        shards = max(1, min(self.shards or 1, self.count))
        return [self.count * number // shards for number in range(shards + 1)]

    @classmethod
    def split_shards(cls, asked: int, split: str) -> int:
        """The number for training as requested; for validation an eighth, as in ImageNet."""
        return max(1, asked * SHARDS[split] // SHARDS["train"])

    @classmethod
    def count_shards(cls, size: float, split: str) -> int:
        """Shards of the usual size, but no more than ImageNet has; then they are larger."""
        return min(SHARDS[split], super().count_shards(size, split))

    def shard_path(self, number: int) -> Path:
        """The path of a complete shard."""
        return self.out / f"{SHARD_PREFIX[self.split]}-{number:05}-of-{self.num_shards:05}"

    def find_files(self) -> Iterable[Path]:
        """The shards."""
        return self.out.glob(f"{SHARD_PREFIX[self.split]}-*-of-*")

    def start(self, whole_shards: int) -> None:
        """Write the class names."""
        write_class_names(self.out / LABELS_FILE, number_labels(self.classes))

    def write_shard(self, file: BinaryIO, number: int, samples: Iterator[Sample]) -> None:
        """Write one record for each image."""
        for sample in samples:
            write_record(file, make_example(sample, self.classes[sample.label]))


def make_example(sample: Sample, class_name: str) -> bytes:
    """A JPEG as an Example message, its label counted from 1."""
    height, width = read_image_header(sample.data).shape
    text = class_name.encode(errors="surrogateescape")
    features: dict[str, FeatureValues] = {
        "image/channels": [3],
        "image/class/label": [sample.label + 1],
        "image/class/synset": [text],
        "image/class/text": [text],
        "image/colorspace": [b"RGB"],
        "image/encoded": [sample.data],
        "image/filename": [sample.name.encode(errors="surrogateescape")],
        "image/format": [b"JPEG"],
        "image/height": [height],
        "image/width": [width],
    }
    if sample.box is not None:
        for side, place in zip(BOX_SIDES, sample.box, strict=True):
            features[f"image/object/bbox/{side}"] = [float(place)]
        features["image/object/bbox/label"] = [sample.label + 1]
    return write_example(features)
