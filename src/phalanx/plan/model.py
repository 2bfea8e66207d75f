"""The network of a config and the size of its images: rows of tables, changed by options."""

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from phalanx.catalog.datasets import DATASETS
from phalanx.catalog.efficientnets import EfficientNetVariant
from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Norm, Variant
from phalanx.config.schema import Config
from phalanx.errors import ConfigError
from phalanx.units import RunLength, parse_resolutions

Growth = tuple[tuple[int, int], ...]  # (end step, size) of smaller training images


def build_variant(config: Config) -> Variant:
    """The model's row of the table, with the options applied."""
    model = config.model
    variant = MODELS[model.model]
    norm = Norm(
        type=model.norm_type,
        groups=model.norm_num_groups,
        momentum=model.batchnorm_momentum,
        eps=model.norm_eps,
        full_precision=model.full_precision_norm,
        stable=not model.disable_stable_batchnorm,
        interleaved=model.enable_fast_groupnorm,
    )
    variant = replace(
        variant,
        norm=norm,
        padding=model.padding,
        drop_path=variant.drop_path if model.drop_path is None else model.drop_path,
        dropout=variant.dropout if model.dropout_rate is None else model.dropout_rate,
    )
    if isinstance(variant, ResNetVariant):
        return replace(
            variant,
            stride_in=config.resnet.stride_in,
            shortcut=config.resnet.shortcut_type or variant.shortcut,
            project_first=config.resnet.stage1_projection,
        )
    if isinstance(variant, EfficientNetVariant):
        return replace(
            variant,
            group_dim=config.efficientnet.efficientnet_group_dim,
            expand_ratio=config.efficientnet.efficientnet_expand_ratio,
        )
    return variant


def check_variant(name: str, variant: Variant, image_size: int, *, micro_batch: int = 2) -> None:
    """Raise ConfigError if the model cannot be built or trained, or the images are too small."""
    if variant.norm.type == "group":
        norms, groups = variant.norm_channels(), variant.norm.groups
        for path, channels in norms.items():
            if channels % groups:
                raise ConfigError(
                    f"--norm-num-groups {groups}: {path} has {channels} channels, which it does "
                    f"not divide; {_describe_divisors(norms.values())} would work in every layer"
                )
    if isinstance(variant, EfficientNetVariant):
        for block in variant.blocks:
            if block.width % block.groups:
                works = _describe_divisors(b.width for b in variant.blocks)
                raise ConfigError(
                    f"--efficientnet-group-dim {variant.group_dim}: {block.unit} has {block.width} "
                    f"channels, which it does not divide; {works} would work in every block"
                )
    match variant:
        case ResNetVariant(block="basic", stride_in="1x1"):
            raise ConfigError(
                f"--stride-in 1x1: {name} has no bottlenecks and so no 1x1 to stride in; leave it "
                "out"
            )
    if image_size < variant.smallest_image:
        raise ConfigError(
            f"--image-size {image_size}: {name} halves the image {variant.halvings} times, which "
            f"leaves nothing; it needs {variant.smallest_image} pixels or more"
        )
    if micro_batch == 1 and variant.norm.type == "batch" and image_size <= 2**variant.halvings:
        raise ConfigError(
            f"--batch-size 1: at {image_size} pixels {name} ends with one value per channel, which "
            "batch norm cannot normalise; use two images or more, or --norm-type group"
        )


def _describe_divisors(numbers: Iterable[int]) -> str:
    """The common divisors of the numbers, in words: "1, 2 and 4"."""
    common = gcd(*numbers)
    *others, last = [str(n) for n in range(1, common + 1) if common % n == 0]
    return f"{', '.join(others)} and {last}" if others else last


# --- the size of images, at the end of a run and before ---


def choose_image_size(config: Config) -> int:
    """The size of the option, else the model's if images are cropped anyway, else the dataset's."""
    dataset = DATASETS[config.data.data]
    own = MODELS[config.model.model].image_size if dataset.any_size else dataset.image_size
    return config.data.image_size or own


def plan_resolutions(config: Config, image_size: int, length: RunLength) -> Growth:
    """Until which step training images have which smaller size; empty if they never do."""
    text = config.data.progressive_resolution
    if text is None:
        return ()
    total = length.total_steps
    growth = tuple((length.count_steps(end), size) for size, end in parse_resolutions(text))
    ends = [end for end, _ in growth]
    if ends != sorted(set(ends)) or ends[0] == 0:
        raise ConfigError(
            f"--progressive-resolution {text}: ends at steps {ends}; each must come after the one "
            "before it"
        )
    if ends[-1] >= total:
        raise ConfigError(
            f"--progressive-resolution {text}: lasts until step {ends[-1]:,} of {total:,}, and no "
            "step is left at --image-size; end it earlier, such as at 80%"
        )
    if any(size >= image_size for _, size in growth):
        raise ConfigError(
            f"--progressive-resolution {text}: expected sizes below --image-size {image_size}, "
            "which the run ends with"
        )
    return growth


def check_image_sizes(config: Config, image_size: int, growth: Growth) -> None:
    """Raise ConfigError if the network cannot be built, or does not accept an image size."""
    model, batch = config.model.model, config.data.batch_size
    for size in (image_size, *(size for _, size in growth)):
        check_variant(model, build_variant(config), size, micro_batch=batch)
