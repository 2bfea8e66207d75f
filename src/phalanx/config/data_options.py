"""Options of the data and of what happens to images."""

from typing import Literal

from phalanx.catalog.datasets import DATASETS, MAX_FILE_MIB, MAX_PIXELS
from phalanx.config.fields import (
    DatasetName,
    PairText,
    PathText,
    ResolutionText,
    Section,
    ShareText,
    option,
)


class DataConfig(Section):
    """Data: what is read, and in which portions."""

    data: DatasetName = option("embedded", "Which dataset: " + ", ".join(DATASETS) + ".")
    data_dir: PathText | None = option(
        None,
        "Folder that holds the dataset; the environment's DATA_DIR stands in for it.",
        resumable=True,
        aliases=("imagenet-data-path",),
    )
    no_fetch: bool = option(
        False, "Refuse to download a published set that is not in --data-dir.", resumable=True
    )
    image_size: int | None = option(
        None,
        "Height and width the model sees.",
        low=8,
        high=2048,
        auto="the model's own for photographs, else the dataset's",
    )
    batch_size: int = option(
        64, "Micro-batch: images in one forward pass of one replica.", low=1, high=65536
    )
    valid_batch_size: int | None = option(
        None,
        "Images in one forward pass when scoring; answers and counts do not depend on it, nor the "
        "first 8 digits of the loss.",
        low=1,
        high=65536,
        resumable=True,
        auto="the larger of batch-size and 250",
    )
    epoch_tail: Literal["carry", "drop"] = option(
        "carry", "carry: a step may take images of two epochs; drop: what fills no step is left."
    )
    iterations: int = option(
        100, "Length of one epoch of generated and synthetic data, in steps.", low=1
    )
    workers: int | None = option(
        None,
        "Processes that decode and augment; batches are the same for any number.",
        low=0,
        high=256,
        resumable=True,
        auto="one per core, none for sets held in memory",
    )
    val_split: ShareText | None = option(
        None, "Share of a folder's images to validate on, where it has no split of its own."
    )
    max_bad: ShareText | None = option(
        None,
        "Undecodable training images to put up with, such as 10 or 1%.",
        resumable=True,
        auto="10 images or 1 %, whichever is more",
    )
    max_file_mib: int = option(
        MAX_FILE_MIB,
        "Largest file of an image that is read, in MiB; a larger one is a bad image.",
        low=1,
        high=4096,
    )
    max_pixels: int = option(
        MAX_PIXELS,
        "Most pixels an image may have, height times width; one with more is a bad image.",
        low=1,
        high=1_000_000_000,
    )
    exif_orientation: bool = option(
        True, "Turn photographs upright as their EXIF says; false takes them as they are stored."
    )
    eight_bit_io: bool | None = option(
        None,
        "Send images to the device as bytes, a quarter of what floats take.",
        auto="yes, unless they are normalised on the host",
        resumable=True,
    )
    normalization_location: Literal["device", "host", "none"] = option(
        "device", "Where images are normalised; none leaves them in 0..1."
    )
    dataloader_rebatch_size: int = option(
        16,
        "Images a worker prepares at a time; batches are put together from these.",
        low=1,
        high=65536,
        resumable=True,
    )
    dataset_cache: bool = option(
        False,
        "Keep the images' files in memory once they were read; refused where they do not fit.",
        resumable=True,
    )
    gpu_decode: bool = option(
        False,
        "Decode, crop and resize JPEGs on the GPU; other pixels than the CPU's by a rounding.",
    )
    keep_on_device: bool | None = option(
        None,
        "Keep the whole set on the device and augment it there; the pixels are the same.",
        auto="sets of small images, on a GPU that has room",
        resumable=True,
    )
    repeated_augmentation: int = option(
        1, "Times an image comes in a row, augmented anew each time.", low=1, high=64
    )
    progressive_resolution: ResolutionText | None = option(
        None,
        "Smaller images at first, such as 128:30%,176:60% for 128 until 30 % of the run and 176 "
        "until 60 %.",
    )


class AugmentConfig(Section):
    """Augmentation: what happens to images before the model sees them."""

    crop_scale: PairText = option(
        "0.08,1", "Least and most share of the image's area that a random crop takes."
    )
    crop_ratio: PairText = option(
        "3/4,4/3", "Narrowest and widest shape of a random crop, width over height."
    )
    use_bbox_info: bool = option(
        False, "Random crops show a tenth of the object's box or more, where the data has boxes."
    )
    color_jitter: float = option(
        0.0, "Strength of random changes of brightness, contrast and colour.", low=0, high=1
    )
    auto_augment: Literal["none", "rand-augment", "trivial-augment"] = option(
        "none", "Random changes by a published policy: rand-augment or trivial-augment."
    )
    random_erasing: float = option(
        0.0, "Share of training images that lose a random part.", low=0, high=1
    )
    eval_crop: float = option(
        0.875, "Share of the short side that is scored, of photographs.", low=0.1, high=1
    )
    normalization: Literal["mean-std", "mean", "per-image"] = option(
        "mean-std", "mean-std or mean: of the dataset; per-image: each image's own."
    )
    flip_averaging: bool = option(
        False, "Score each image and its mirror image, and take the mean of the answers."
    )
    mixup_alpha: float = option(
        0.0, "Blend each image with its neighbour, by shares of Beta(alpha, alpha).", low=0, high=64
    )
    cutmix_lambda_low: float = option(
        0.0, "Least share of an image that a pasted box of another leaves.", low=0, high=1
    )
    cutmix_lambda_high: float = option(
        0.0,
        "Most share of an image that a pasted box of another leaves; 0 for none.",
        low=0,
        high=1,
    )
    cutmix_disable_prob: float = option(
        0.0, "Share of micro-batches without a pasted box.", low=0, high=1
    )
    cutmix_lambda: float = option(
        1.0, "Boxes as TensorFlow 1's cutmix, version 1, draws them; 1 for none.", low=0, high=1
    )

    @property
    def has_cutmix(self) -> bool:
        """Whether boxes of other images are pasted in."""
        return self.cutmix_lambda_high > 0 or self.cutmix_lambda < 1
