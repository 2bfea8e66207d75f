"""The datasets Phalanx knows by name, with the facts the rest is built from.

Sources of the figures: CIFAR-10 mean and std over its 50,000 training images; Fashion-MNIST
over its 60,000; ImageNet's are the ones every published recipe uses.
"""

from dataclasses import dataclass, replace

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FASHION_CLASSES = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
DIGITS = tuple("0123456789")
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One named dataset. None stands for what only the files themselves can say."""

    help: str
    preset: str  # what `phalanx train --data NAME` uses when no preset is given
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    any_size: bool = False  # images of many sizes, or made to order: the model says what it sees
    augment: str  # "pad-crop" for small images, "resized-crop" for large, "none"
    needs_folder: bool = False
    in_memory: bool = False  # decoded arrays: a worker process would only copy them
    train_images: int | None = None
    valid_images: int | None = None
    classes: tuple[str, ...] | None = None


def grey(value: float) -> tuple[float, float, float]:
    """The same figure for three equal channels."""
    return (value, value, value)


FASHION_MNIST = Dataset(
    help="Fashion-MNIST's four idx files, plain or gzipped",
    preset="fashion-mnist-resnet20",
    mean=grey(0.2860),
    std=grey(0.3530),
    image_size=28,
    augment="pad-crop",
    needs_folder=True,
    in_memory=True,
    train_images=60_000,
    valid_images=10_000,
    classes=FASHION_CLASSES,
)
GENERATED = Dataset(
    help="random images made on the host: measures everything but the disk",
    preset="generated-resnet50",
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    image_size=224,
    any_size=True,
    augment="none",
    classes=tuple(f"class{i:04d}" for i in range(1000)),
)

DATASETS: dict[str, Dataset] = {
    "embedded": replace(
        FASHION_MNIST,
        help="8,000 + 1,500 Fashion-MNIST images that come with Phalanx",
        preset="demo",
        needs_folder=False,
        train_images=8_000,
        valid_images=1_500,
    ),
    "fashion-mnist": FASHION_MNIST,
    "mnist": replace(
        FASHION_MNIST,
        help="MNIST's four idx files, plain or gzipped",
        preset="mnist-resnet8",
        mean=grey(0.1307),
        std=grey(0.3081),
        classes=DIGITS,
    ),
    "cifar10": Dataset(
        help="CIFAR-10's binary files, data_batch_1.bin to 5 and test_batch.bin",
        preset="cifar10-resnet20",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        image_size=32,
        augment="pad-crop",
        needs_folder=True,
        in_memory=True,
        train_images=50_000,
        valid_images=10_000,
        classes=CIFAR10_CLASSES,
    ),
    "folder": Dataset(
        help="train/CLASS/*.jpg and val/CLASS/*.jpg (or validation/), JPEG or PNG",
        preset="folder-resnet18",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        image_size=224,
        any_size=True,
        augment="resized-crop",
        needs_folder=True,
    ),
    "generated": GENERATED,
    "synthetic": replace(
        GENERATED,
        help="random images made once on the device: measures the model alone",
        preset="synthetic-resnet50",
    ),
}
