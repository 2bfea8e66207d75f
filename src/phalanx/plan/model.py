"""The network a config asks for: a row of the tables with the options laid over it, checked."""

from dataclasses import replace
from math import gcd

from phalanx.catalog.efficientnets import EfficientNetVariant, inverted_blocks_of
from phalanx.catalog.models import MODELS
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Norm, Variant
from phalanx.config.schema import Config
from phalanx.errors import ConfigError


def build_variant(config: Config) -> Variant:
    """The model's row of the table, as the options change it."""
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
    """Refuse what cannot be built or trained, and images that would vanish on the way."""
    if variant.norm.type == "group":
        _check_norm_groups(variant)
    if isinstance(variant, EfficientNetVariant):
        _check_group_dim(variant)
    if isinstance(variant, ResNetVariant):
        _check_stride(name, variant)
    if image_size < variant.smallest_image:
        raise ConfigError(
            f"--image-size {image_size}: {name} halves the image {variant.halvings} times, which "
            f"leaves nothing; it needs {variant.smallest_image} pixels or more"
        )
    if micro_batch == 1 and variant.norm.type == "batch" and image_size <= 2**variant.halvings:
        raise ConfigError(
            f"--batch-size 1: at {image_size} pixels {name} ends with one value a channel, which "
            "batch norm cannot normalise; take two images or more, or --norm-type group"
        )


def _check_stride(name: str, variant: ResNetVariant) -> None:
    """Only bottlenecks have a 1x1 before their 3x3."""
    if variant.block == "basic" and variant.stride_in == "1x1":
        raise ConfigError(
            f"--stride-in 1x1: {name} has no bottlenecks and so no 1x1 to stride in; leave it away"
        )


def _check_norm_groups(variant: Variant) -> None:
    """Group norm needs as many channels in every group."""
    layers, groups = variant.norm_channels(), variant.norm.groups
    for path, channels in layers.items():
        if channels % groups:
            works = _divisors(gcd(*layers.values()))
            raise ConfigError(
                f"--norm-num-groups {groups}: {path} has {channels} channels, which it does not "
                f"divide; {_join(works)} would work in every layer"
            )


def _check_group_dim(variant: EfficientNetVariant) -> None:
    """A grouped convolution needs as many channels in every group, or one group."""
    blocks, dim = list(inverted_blocks_of(variant)), variant.group_dim
    for block in blocks:
        if block.width % block.groups:
            works = _divisors(gcd(*(b.width for b in blocks)))
            raise ConfigError(
                f"--efficientnet-group-dim {dim}: {block.unit} has {block.width} channels, which "
                f"it does not divide; {_join(works)} would work in every block"
            )


def _divisors(number: int) -> list[int]:
    """What divides it, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _join(numbers: list[int]) -> str:
    """1, 2 and 4."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
