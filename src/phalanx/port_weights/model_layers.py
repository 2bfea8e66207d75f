"""The layers of a model that have weights: their paths, places and shapes, known without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.catalog.efficientnets import EfficientNetVariant, InvertedBlock
from phalanx.catalog.resnets import ResNetVariant
from phalanx.catalog.variant import Norm, Variant

Shape = tuple[int, ...]
COUNTER = "num_batches_tracked"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer with weights.

    part: its role, which tables of older names are made from: stem, block, projection, expand,
    depthwise, reduce, widen, project, top or head.
    """

    path: str  # as timm has it
    kind: str  # "conv", "norm" or "dense"
    part: str
    shapes: dict[str, Shape]  # by tensor: weight, bias, running_mean...
    stage: int = 0  # of the block it is in, as its path counts them
    index: int = 0  # of the block in its stage, from 0
    number: int = 0  # of the block in the whole network, from 0
    step: int = 0  # of a ResNet's block: its first, second or third convolution
    stride: int = 1
    channels: int = 0  # that leave it
    norm_after: str = ""  # of a convolution: the path of the norm behind it, if any


def iterate_layers(variant: Variant, classes: int) -> Iterator[Layer]:
    """The layers of a ResNet, ResNeXt or EfficientNet, in the order of the data."""
    match variant:
        case ResNetVariant():
            yield from _iterate_resnet(variant, classes)
        case EfficientNetVariant():
            yield from _iterate_efficientnet(variant, classes)


def has_layers(variant: Variant) -> bool:
    """Whether the variant is of a family that older programs had."""
    return isinstance(variant, ResNetVariant | EfficientNetVariant)


@dataclass(frozen=True)
class _BlockLocation:
    """Where a layer is: what all layers of a block have in common."""

    prefix: str = ""
    stage: int = 0
    index: int = 0
    number: int = 0


def _conv_and_norm(
    norm: Norm,
    place: _BlockLocation,
    *,
    names: tuple[str, str],
    shape: Shape,
    part: str,
    step: int = 0,
    stride: int = 1,
) -> Iterator[Layer]:
    """A convolution and the norm behind it; without norms the convolution has a bias."""
    name, after = (place.prefix + name for name in names)
    out, has_norm = shape[0], norm.type != "none"
    conv = Layer(
        path=name,
        kind="conv",
        part=part,
        shapes={"weight": shape} if has_norm else {"weight": shape, "bias": (out,)},
        stage=place.stage,
        index=place.index,
        number=place.number,
        step=step,
        stride=stride,
        channels=out,
        norm_after=after if has_norm else "",
    )
    yield conv
    if has_norm:
        statistics: dict[str, Shape] = {"running_mean": (out,), "running_var": (out,), COUNTER: ()}
        learned: dict[str, Shape] = {"weight": (out,), "bias": (out,)}
        shapes = learned | (statistics if norm.type == "batch" else {})
        yield replace(conv, path=after, kind="norm", shapes=shapes, norm_after="")


def _head(path: str, features: int, *, classes: int) -> Layer:
    shapes: dict[str, Shape] = {"weight": (classes, features), "bias": (classes,)}
    return Layer(path=path, kind="dense", part="head", shapes=shapes, channels=classes)


def _iterate_resnet(variant: ResNetVariant, classes: int) -> Iterator[Layer]:
    norm, width = variant.norm, variant.stem_width
    kernel, stride = (7, 2) if variant.stem == "large" else (3, 1)
    stem = (width, 3, kernel, kernel)
    yield from _conv_and_norm(
        norm, _BlockLocation(), names=("conv1", "bn1"), shape=stem, part="stem", stride=stride
    )
    for number, block in enumerate(variant.blocks):
        place = _BlockLocation(
            f"layer{block.stage}.{block.index}.", block.stage, block.index, number
        )
        inp, inner, out = block.channels_in, block.width, block.channels_out
        convs: tuple[Shape, ...] = ((inner, inp, 3, 3), (out, inner, 3, 3))
        if variant.block == "bottleneck":
            grouped = (inner, inner // variant.groups, 3, 3)
            convs = ((inner, inp, 1, 1), grouped, (out, inner, 1, 1))
        for step, shape in enumerate(convs, start=1):
            names = (f"conv{step}", f"bn{step}")
            stride = block.stride if step == 1 else 1
            yield from _conv_and_norm(
                norm, place, names=names, shape=shape, part="block", step=step, stride=stride
            )
        if variant.projects(block):
            names, shape = ("downsample.0", "downsample.1"), (out, inp, 1, 1)
            yield from _conv_and_norm(norm, place, names=names, shape=shape, part="projection")
    yield _head(variant.head, variant.features, classes=classes)


def _iterate_efficientnet(variant: EfficientNetVariant, classes: int) -> Iterator[Layer]:
    norm, blocks = variant.norm, variant.blocks
    ends = {  # names, outputs, inputs and kernel
        "stem": (("conv_stem", "bn1"), (variant.stem_channels, 3, 3, 3)),
        "top": (("conv_head", "bn2"), (variant.features, blocks[-1].channels_out, 1, 1)),
    }

    def iterate_end(part: str) -> Iterator[Layer]:
        names, shape = ends[part]
        return _conv_and_norm(norm, _BlockLocation(), names=names, shape=shape, part=part)

    yield from iterate_end("stem")
    for number, block in enumerate(blocks):
        yield from _iterate_inverted(norm, block, number=number)
    yield from iterate_end("top")
    yield _head(variant.head, variant.features, classes=classes)


def _iterate_inverted(norm: Norm, block: InvertedBlock, *, number: int) -> Iterator[Layer]:
    place = _BlockLocation(f"blocks.{block.stage}.{block.index}.", block.stage, block.index, number)
    wide = block.width
    shapes: dict[str, Shape] = {
        "expand": (wide, block.channels_in, 1, 1),
        "depthwise": (wide, wide // block.groups, block.kernel, block.kernel),
        "project": (block.channels_out, wide, 1, 1),
    }
    convs = {"expand": "conv_pw", "depthwise": "conv_dw", "project": "conv_pwl"}
    if not block.widens:
        convs = {"depthwise": "conv_dw", "project": "conv_pw"}
    for step, (part, conv) in enumerate(convs.items(), start=1):
        names = (conv, f"bn{step}")
        yield from _conv_and_norm(norm, place, names=names, shape=shapes[part], part=part)
        if part == "depthwise":
            yield from _squeeze_excite(place, wide, narrow=block.squeeze_width)


def _squeeze_excite(place: _BlockLocation, wide: int, *, narrow: int) -> Iterator[Layer]:
    """The two convolutions of squeeze-and-excite, which have biases; Lite has neither."""
    sizes = {"reduce": ("conv_reduce", narrow, wide), "widen": ("conv_expand", wide, narrow)}
    for part, (name, out, inp) in sizes.items() if narrow else ():
        yield Layer(
            path=f"{place.prefix}se.{name}", kind="conv", part=part, channels=out,
            shapes={"weight": (out, inp, 1, 1), "bias": (out,)},
            stage=place.stage, index=place.index, number=place.number,
        )  # fmt: skip
