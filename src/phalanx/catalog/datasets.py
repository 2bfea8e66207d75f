"""The datasets that Phalanx knows by name, with the facts from which everything else follows.

Sources of the figures: CIFAR-10 and CIFAR-100 mean and std over their 50,000 training images;
Fashion-MNIST over its 60,000; ImageNet's are the ones every published recipe uses, and its counts
are those of the classification task of ILSVRC 2012 (Russakovsky et al. 2015); the mean size of its
files is that of ILSVRC2012_img_train.tar, 147,897,477,120 bytes, over its images.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatch

MAX_FILE_MIB, MAX_PIXELS = 256, 64_000_000  # limits for an image, unless the user sets others
NEWEST_LISTING_RULE = 2  # raise it when other images or splits are found in the same folder
CENTRE_CROP_FRACTION = 0.875  # share of the short side that is seen when scoring photographs
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
    "ankle boot",
)  # fmt: skip
_SMALL_IMAGES = 64
_DIGITS = tuple("0123456789")
_CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle",
    "bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle",
    "chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup",
    "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house",
    "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man",
    "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy",
    "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal",
    "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar",
    "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman",
    "worm",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One named dataset. None stands for what is known only from the files."""

    help: str
    preset: str  # what `phalanx train --data NAME` uses when no preset is given
    model_presets: tuple[tuple[str, str], ...] = ()  # instead, by a pattern for the model's name
    small_preset: str = ""  # instead, for models made for small images
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    any_size: bool = False  # images of many sizes, or generated: the model determines the size
    augment: str  # "pad-crop" for small images, "resized-crop" for large, "none"
    needs_folder: bool = False
    in_memory: bool = False  # decoded arrays: a worker process would only copy them
    train_images: int | None = None
    valid_images: int | None = None
    classes: tuple[str, ...] | None = None
    class_count: int | None = None  # of a published set whose class names are only in its files
    image_bytes: int | None = None  # mean size of a training image's file

    def preset_for(self, model: str, *, model_size: int) -> str:
        """The preset of the model's own family, if this dataset has one.

        model_size: of the images that the model is made for.
        """
        if self.any_size and model_size <= _SMALL_IMAGES:
            return self.small_preset or self.preset
        own = (preset for pattern, preset in self.model_presets if fnmatch(model, pattern))
        return next(own, self.preset)

    @property
    def num_classes(self) -> int | None:
        """The number of classes, if it is known without the files."""
        return self.class_count if self.classes is None else len(self.classes)


def _grey(value: float) -> tuple[float, float, float]:
    """The same figure for three equal channels."""
    return (value, value, value)


_FASHION_MNIST = Dataset(
    help="Fashion-MNIST's four idx files, plain or gzipped",
    preset="fashion-mnist-resnet20",
    mean=_grey(0.2860),
    std=_grey(0.3530),
    image_size=28,
    augment="pad-crop",
    needs_folder=True,
    in_memory=True,
    train_images=60_000,
    valid_images=10_000,
    classes=_FASHION_CLASSES,
)
_CIFAR10 = Dataset(
    help="CIFAR-10's binary files, data_batch_1.bin to 5 and test_batch.bin, or their .tar.gz",
    preset="cifar10-resnet20",
    model_presets=(("resnet9", "cifar10-fast"), ("airbench94", "cifar10-94")),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    image_size=32,
    augment="pad-crop",
    needs_folder=True,
    in_memory=True,
    train_images=50_000,
    valid_images=10_000,
    classes=_CIFAR10_CLASSES,
)
_GENERATED = Dataset(
    help="random images made on the host: measures everything but the disk",
    preset="generated-resnet50",
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    image_size=224,
    any_size=True,
    augment="none",
    classes=tuple(f"class{i:04d}" for i in range(1000)),
)
_PHOTOGRAPHS = Dataset(
    help="images in class folders, with or without train/ and val/ above them",
    preset="folder-resnet18",
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    image_size=224,
    any_size=True,
    augment="resized-crop",
    needs_folder=True,
)

DATASETS: dict[str, Dataset] = {
    "embedded": replace(
        _FASHION_MNIST,
        help="8,000 + 1,500 Fashion-MNIST images that come with Phalanx",
        preset="demo",
        needs_folder=False,
        train_images=8_000,
        valid_images=1_500,
    ),
    "fashion-mnist": _FASHION_MNIST,
    "mnist": replace(
        _FASHION_MNIST,
        help="MNIST's four idx files, plain or gzipped",
        preset="mnist-resnet8",
        mean=_grey(0.1307),
        std=_grey(0.3081),
        classes=_DIGITS,
    ),
    "cifar10": _CIFAR10,
    "cifar100": replace(
        _CIFAR10,
        help="CIFAR-100's binary files, train.bin and test.bin, or their .tar.gz; fine labels",
        preset="cifar100-resnet20",
        model_presets=(),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        classes=_CIFAR100_CLASSES,
    ),
    "folder": _PHOTOGRAPHS,
    "imagenet": replace(
        _PHOTOGRAPHS,
        help="ImageNet as folders of synsets, with its bounding boxes if they are there",
        preset="imagenet-resnet50",
        model_presets=(
            ("resnext*", "imagenet-resnext101"),
            ("efficientnet_b6", "imagenet-efficientnet-b6"),
            ("efficientnet_b[457]", "imagenet-efficientnet-b4"),
            ("efficientnet*", "imagenet-efficientnet-b0"),
        ),
        small_preset="folder-resnet18",
        train_images=1_281_167,
        valid_images=50_000,
        class_count=1000,
        image_bytes=115_000,
    ),
    "tfrecord": replace(_PHOTOGRAPHS, help="ImageNet's train-00000-of-01024 and so on"),
    "tar": replace(_PHOTOGRAPHS, help="WebDataset's train-000000.tar and so on"),
    "parquet": replace(_PHOTOGRAPHS, help="train-*.parquet with a column of images"),
    "packed": replace(_PHOTOGRAPHS, help="train.phx and valid.phx, made by `phalanx data build`"),
    "generated": _GENERATED,
    "synthetic": replace(
        _GENERATED,
        help="random images made once on the device: measures the model alone",
        preset="synthetic-resnet50",
    ),
}

PUBLISHED = ("cifar10", "cifar100", "mnist", "fashion-mnist")  # can be fetched by these names
