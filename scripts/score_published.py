"""Score published weights twice: as published, in numpy, and converted, in Phalanx.

    python scripts/score_published.py IMAGES SYNSETS \\
        --weights resnet50-v1 PACKAGE resnet50-v1.safetensors \\
        --weights efficientnet_lite0 FILE.pth efficientnet_lite0.safetensors

IMAGES is a folder of nXXXXXXXX_name.JPEG. SYNSETS lists the 1,000 wnids, a line each in the order
of the classes: timm/data/_info/imagenet_synsets.txt of `pip download --no-deps timm`. How to get
and convert the weights is in convert_weights.py.

Both get the same bytes, resized and cropped as Phalanx scores. Fails if top-1 or top-5 differ by
more than a point. The logits differ by more than rounding, because in the folded input zero is
another colour and the first convolution pads with it: little for resnet50-v1, whose means are
nearly ImageNet's, and more for EfficientNet-Lite.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from numpy_nets import Bytes, Floats, Logits, keras_logits, lite_logits

from phalanx.catalog.datasets import IMAGENET_MEAN, IMAGENET_STD
from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Variant
from phalanx.data.formats.decode import EncodedImage
from phalanx.data.loading.device import Normaliser
from phalanx.data.transforms.transform import TransformSpec, build_transform
from phalanx.models.build import build_model
from phalanx.models.weights import read_weights

BATCH = 10
CLASSES = 1000
EPS = 1e-3
LARGEST_DIFFERENCE = 1.0  # points
COLUMNS = (
    "weights",
    "image size",
    "n",
    "numpy top-1, top-5",
    "phalanx top-1, top-5",
    "difference, points",
    "largest relative logit difference",
)
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Published:
    """One set of weights: its evaluation in numpy and the variant it is converted for."""

    read: Callable[[Path], Logits]
    variant: Variant


def first_resnet() -> Variant:
    """The ResNet-50 of the paper, which strides in the first 1x1."""
    today = MODELS["resnet50"]
    assert isinstance(today, ResNetVariant)
    return replace(today, stride_in="1x1", norm=replace(today.norm, eps=EPS))


def lite(size: int) -> Variant:
    """An EfficientNet-Lite that pads as TensorFlow does."""
    today = MODELS[f"efficientnet_lite{size}"]
    return replace(today, padding="same", norm=replace(today.norm, eps=EPS))


PUBLISHED = {
    "resnet50-v1": Published(keras_logits, first_resnet()),
    **{f"efficientnet_lite{size}": Published(lite_logits, lite(size)) for size in range(3)},
}


@dataclass(frozen=True)
class Score:
    """Top-1 and top-5 accuracy in percent."""

    top1: float
    top5: float

    def __str__(self) -> str:
        return f"{self.top1:.2f}, {self.top5:.2f}"


def read_labels(images: list[Path], synsets: Path) -> Labels:
    """The class of each image, by the wnid its name begins with."""
    wnids = synsets.read_text(encoding="utf-8").split()
    if len(wnids) != CLASSES or wnids != sorted(wnids):
        sys.exit(f"{synsets}: {len(wnids)} words, expected {CLASSES} sorted wnids")
    numbers = {wnid: number for number, wnid in enumerate(wnids)}
    strange = [path.name for path in images if path.name.partition("_")[0] not in numbers]
    if strange:
        sys.exit(f"{strange[0]}: no wnid of {synsets} in front; name images nXXXXXXXX_name.JPEG")
    return np.array([numbers[path.name.partition("_")[0]] for path in images])


def read_crops(images: list[Path], size: int) -> Bytes:
    """The images resized and cropped as for scoring."""
    crops = np.empty((len(images), size, size, 3), np.uint8)
    transform = build_transform(TransformSpec(augment="resized-crop"))
    for path, crop in zip(images, crops, strict=True):
        transform.apply_evaluation(EncodedImage(path.read_bytes(), path.name).decode(), crop)
    return crops


def phalanx_logits(variant: Variant, converted: Path) -> Logits:
    """Phalanx's model with the converted weights, in 32 bits on the CPU."""
    model = build_model(variant, num_classes=CLASSES)
    model.load_state_dict(read_weights(converted, model.state_dict()))
    model.eval()
    normaliser = Normaliser(IMAGENET_MEAN, IMAGENET_STD, device=torch.device("cpu"))

    def logits(pixels: Bytes) -> Floats:
        with torch.inference_mode():
            return model(normaliser(pixels)).numpy()

    return logits


def evaluate(logits: Logits, crops: Bytes) -> Floats:
    """The logits of all images, a batch at a time."""
    return np.concatenate([logits(crops[at : at + BATCH]) for at in range(0, len(crops), BATCH)])


def score(logits: Floats, labels: Labels) -> Score:
    """Top-1 and top-5 accuracy of logits."""
    guesses = np.argsort(-logits, axis=1)[:, :5]
    hits = guesses == labels[:, None]
    return Score(100 * float(hits[:, 0].mean()), 100 * float(hits.any(axis=1).mean()))


def relative_difference(logits: Floats, reference: Floats) -> float:
    """The largest difference of a logit, relative to the largest logit of its image."""
    return float((np.abs(logits - reference) / np.abs(reference).max(axis=1, keepdims=True)).max())


def rows(
    chosen: list[list[str]], images: list[Path], labels: Labels
) -> Iterator[tuple[str, float]]:
    """For each set of weights, a line of the table and the larger difference of its scores."""
    for name, original, converted in chosen:
        published = PUBLISHED[name]
        crops = read_crops(images, published.variant.image_size)
        reference = evaluate(published.read(Path(original)), crops)
        logits = evaluate(phalanx_logits(published.variant, Path(converted)), crops)
        theirs, ours = score(reference, labels), score(logits, labels)
        apart = Score(ours.top1 - theirs.top1, ours.top5 - theirs.top5)
        relative = relative_difference(logits, reference)
        size = published.variant.image_size
        line = f"| {name} | {size} | {len(labels)} | {theirs} | {ours} | {apart} | {relative:.1e} |"
        yield line, max(abs(apart.top1), abs(apart.top5))


def read_words() -> argparse.Namespace:
    """The command line, after checking that every name is known and every file exists."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("images", type=Path, metavar="IMAGES")
    parser.add_argument("synsets", type=Path, metavar="SYNSETS")
    parser.add_argument(
        "--weights",
        nargs=3,
        action="append",
        required=True,
        metavar=("NAME", "PUBLISHED", "CONVERTED"),
        help=f"repeatable; NAME is one of {', '.join(PUBLISHED)}",
    )
    words = parser.parse_args()
    for name, original, converted in words.weights:
        if name not in PUBLISHED:
            parser.error(f"--weights: no weights are called {name!r}: {', '.join(PUBLISHED)}")
        for path in (words.images, words.synsets, Path(original), Path(converted)):
            if not path.exists():  # reported now, not after minutes of numpy
                parser.error(f"{path}: no such file; how to get it: {__file__}, first lines")
    return words


def main() -> None:
    """Print the table line by line, as results arrive."""
    words = read_words()
    images = sorted(words.images.glob("n*.JPEG"))
    if not images:
        sys.exit(f"{words.images}: no nXXXXXXXX_name.JPEG here")
    labels = read_labels(images, words.synsets)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    largest = 0.0
    for line, apart in rows(words.weights, images, labels):
        print(line, flush=True)
        largest = max(largest, apart)
    if largest > LARGEST_DIFFERENCE:
        sys.exit(f"scores differ by {largest:.2f} points, more than {LARGEST_DIFFERENCE:.0f}")


if __name__ == "__main__":
    main()
