"""Options of the data and of what happens to images."""

from typing import Literal

from phalanx.catalog.datasets import (
    CENTRE_CROP_FRACTION,
    DATASETS,
    MAX_FILE_MIB,
    MAX_PIXELS,
    NEWEST_LISTING_RULE,
)
from phalanx.config.fields import (
    DatasetName,
    ImageShare,
    PairText,
    PathText,
    ResolutionText,
    Section,
    ShareText,
    ValSplitText,
    option,
)


class DataConfig(Section):
    """Data: what is read, and in what batches."""

    data: DatasetName = option("embedded", "Which dataset: " + ", ".join(DATASETS) + ".")
    data_dir: PathText | None = option(
        None,
        "Folder that holds the dataset; without it, the environment variable DATA_DIR is used.",
        resumable=True,
        aliases=("imagenet-data-path",),
    )
    no_fetch: bool = option(
        False,
        "Do not download a published dataset that is missing from --data-dir.",
        resumable=True,
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
        "Images in one forward pass when scoring; it does not change predictions, and "
        "changes the loss only from its 9th digit on.",
        low=1,
        high=65536,
        resumable=True,
        auto="the larger of batch-size and 250",
    )
    epoch_tail: Literal["carry", "drop"] = option(
        "carry",
        "carry: a step may span two epochs; drop: images that do not fill a step are skipped.",
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
        auto="one per core, none for datasets held in memory",
    )
    val_split: ValSplitText | None = option(
        None,
        "Images to hold out for validation, where the data has no such split: a share such as "
        "10% or 0.1, or a number such as 40; the same share of each class.",
    )
    valid_split: str | None = option(
        None,
        "Folder beside train/ to validate on, or a split named in the --labels file.",
        auto="the first that exists of val, valid, validation, dev, eval, test",
    )
    class_from: Literal["prefix"] | None = option(
        None,
        "prefix: file names begin with the class, up to the first dot, underscore or hyphen.",
        auto="the folder an image is in",
    )
    labels: PathText | None = option(
        None,
        "File with the label of each image: CSV or JSON Lines with path, label and optionally "
        "split.",
        resumable=True,
    )
    listing_rule: int = option(
        NEWEST_LISTING_RULE,
        "Version of the rule for which files are images and what --val-split takes; 1: .jpg, "
        ".jpeg and .png directly in class folders.",
        low=1,
        high=NEWEST_LISTING_RULE,
    )
    max_bad: ShareText | None = option(
        None,
        "Undecodable training images to tolerate, such as 10 or 1%.",
        resumable=True,
        auto="10 images or 1%, whichever is more",
    )
    max_file_mib: int = option(
        MAX_FILE_MIB,
        "Largest image file to read, in MiB; a larger one counts as a bad image.",
        low=1,
        high=4096,
    )
    max_pixels: int = option(
        MAX_PIXELS,
        "Most pixels an image may have (height x width); one with more counts as a bad image.",
        low=1,
        high=1_000_000_000,
    )
    exif_orientation: bool = option(
        True, "Turn photographs upright as their EXIF says; false takes them as they are stored."
    )
    eight_bit_io: bool | None = option(
        None,
        "Send images to the device as bytes, a quarter of the size of floats.",
        auto="yes, unless images are normalised on the host",
        resumable=True,
    )
    normalization_location: Literal["device", "host", "none"] = option(
        "device", "Where images are normalised; none leaves them in 0..1."
    )
    dataloader_rebatch_size: int = option(
        16,
        "Images a worker prepares at a time; batches are assembled from these.",
        low=1,
        high=65536,
        resumable=True,
    )
    dataset_cache: bool = option(
        False,
        "Keep image files in memory once they have been read; refused if they do not fit.",
        resumable=True,
    )
    gpu_decode: ImageShare | None = option(
        None,
        "Decode, crop and resize JPEGs on the GPU: all, or a share such as 0.4 while the cores do "
        "the rest; pixels differ from the CPU's by rounding.",
        low=0,
        high=1,
        auto="photographs in training from the second epoch on, if the GPU has engines for them "
        "and has waited for the cores in the first",
    )
    keep_on_device: bool | None = option(
        None,
        "Keep the whole dataset on the device and augment it there; the pixels are the same.",
        auto="datasets of small images, if the GPU has room",
        resumable=True,
    )
    repeated_augmentation: int = option(
        1,
        "How often each image is used in a row, with a new augmentation each time.",
        low=1,
        high=64,
    )
    progressive_resolution: ResolutionText | None = option(
        None,
        "Smaller images first: 128:30%,176:60% trains at 128 pixels up to 30% of the run and at "
        "176 up to 60%.",
    )


class AugmentConfig(Section):
    """Augmentation: what happens to images before the model sees them."""

    crop_scale: PairText = option(
        "0.08,1", "Smallest and largest share of the image's area that a random crop covers."
    )
    crop_ratio: PairText = option(
        "3/4,4/3", "Narrowest and widest aspect ratio (width / height) of a random crop."
    )
    crop_rule: int = option(
        2,
        "Version of the rule that shrinks random crops; 1: by averages, as earlier releases did.",
        low=1,
        high=2,
    )
    shift_pixels: int = option(
        4, "Most pixels by which small images are shifted, in each direction.", low=0, high=7
    )
    shift_fill: Literal["black", "reflect"] = option(
        "black", "What fills the gap when a small image is shifted: black, or its own reflection."
    )
    flips: Literal["random", "alternating"] = option(
        "random",
        "random: half of the images of an epoch are mirrored; alternating: each image in every "
        "other epoch.",
    )
    use_bbox_info: bool = option(
        False,
        "Random crops show at least a tenth of the object's bounding box, if the data has boxes.",
    )
    color_jitter: float = option(
        0.0, "Strength of random changes of brightness, contrast and colour.", low=0, high=1
    )
    auto_augment: Literal["none", "rand-augment", "trivial-augment"] = option(
        "none", "Published augmentation policy: rand-augment or trivial-augment."
    )
    random_erasing: float = option(
        0.0, "Share of training images with a random rectangle erased.", low=0, high=1
    )
    eval_crop: float = option(
        CENTRE_CROP_FRACTION,
        "Share of the short side that the center crop keeps when scoring photographs.",
        low=0.1,
        high=1,
    )
    normalization: Literal["mean-std", "mean", "per-image"] = option(
        "mean-std",
        "mean-std or mean of the dataset, or per-image: each image's own mean and deviation.",
    )
    flip_averaging: bool = option(
        False, "Score each image and its mirror image, and average the two predictions."
    )
    mixup_alpha: float = option(
        0.0,
        "Mixup: blend each image with another; the shares come from Beta(alpha, alpha).",
        low=0,
        high=64,
    )
    cutmix_lambda_low: float = option(
        0.0,
        "Cutmix: smallest share of an image that stays visible around the pasted box.",
        low=0,
        high=1,
    )
    cutmix_lambda_high: float = option(
        0.0,
        "Cutmix: largest share of an image that stays visible; 0 turns cutmix off.",
        low=0,
        high=1,
    )
    cutmix_disable_prob: float = option(
        0.0, "Cutmix: share of micro-batches that are left as they are.", low=0, high=1
    )
    cutmix_lambda: float = option(
        1.0,
        "Cutmix with boxes drawn as in TensorFlow 1's version 1; 1 turns it off.",
        low=0,
        high=1,
    )

    @property
    def has_cutmix(self) -> bool:
        """Whether boxes of other images are pasted in."""
        return self.cutmix_lambda_high > 0 or self.cutmix_lambda < 1
