"""A block of EfficientNet in training: forward and backward written out with phalanx.mbconv.

Tensors by name, in the order of the data: x, the input; raw, its expansion before the norm; d, the
depthwise convolution; gated, the output of squeeze-excite; p, the projection. v holds the vectors
of a norm (phalanx.mbconv.norms). Where there are several implementations, the fastest is chosen
once per shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.fused.half_copies import to_half
from phalanx.fused.mbconv_parts import (
    NamedTensors,
    SizeLimitedUnit,
    check_norm,
    check_square_conv,
    find_norm_vectors,
    multiply,
    to_gradients,
)
from phalanx.fused.module_checks import UnitNotFused, check_types
from phalanx.fused.unit import Gradients
from phalanx.kernels.batch_norm import finish_back
from phalanx.kernels.choices import CHOICES, Implementations
from phalanx.kernels.image_layout import (
    count_rows,
    to_channels_last,
    to_image,
    to_rows,
)
from phalanx.mbconv.depthwise import convolve, convolve_back
from phalanx.mbconv.expand import can_expand, can_expand_back, expand, expand_back
from phalanx.mbconv.norms import (
    add_partials,
    norm_add,
    norm_add_back,
    norm_gate_back,
    norm_silu,
    silu_back,
    sum_channels,
    sum_gradients,
)
from phalanx.mbconv.squeeze_excite import (
    excite,
    excite_back,
    finish_excite_back,
    sum_images,
    sum_images_back,
)
from phalanx.models.efficientnet import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from phalanx.models.units import FusedUnit

_SAVED_NAMES = (
    *("x", "noise", "expand", "depthwise", "project"),
    *("raw", "v1", "d", "v2", "mean", "hidden", "gate", "gated", "p", "v3"),
)
_WINDOWS = ((3, 1), (3, 2), (5, 1), (5, 2))  # kernel and stride


@dataclass(frozen=True)
class _BlockLayers:
    """The layers of a block by their function; the block of the first stage has no expansion."""

    expand: nn.Conv2d | None
    expand_norm: nn.BatchNorm2d | None
    depthwise: nn.Conv2d
    depthwise_norm: nn.BatchNorm2d
    excite: SqueezeExcite
    project: nn.Conv2d
    project_norm: nn.BatchNorm2d
    skips: bool
    rate: float

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All parameters, by the names that their gradients have here."""
        reduce, widen = self.excite.conv_reduce, self.excite.conv_expand
        parameters: dict[str, Any] = {}
        if self.expand is not None and self.expand_norm is not None:
            parameters |= {"expand": self.expand.weight}
            parameters |= {"norm1": self.expand_norm.weight, "bias1": self.expand_norm.bias}
        parameters |= {"depthwise": self.depthwise.weight}
        parameters |= {"norm2": self.depthwise_norm.weight, "bias2": self.depthwise_norm.bias}
        parameters |= {"excite1": reduce.weight, "excite_bias1": reduce.bias}
        parameters |= {"excite2": widen.weight, "excite_bias2": widen.bias}
        parameters |= {"project": self.project.weight}
        return parameters | {"norm3": self.project_norm.weight, "bias3": self.project_norm.bias}

    @property
    def excite_weights(self) -> list[Tensor]:
        """w1 [R, C], b1, w2 [C, R], b2."""
        layers = (self.excite.conv_reduce, self.excite.conv_expand)
        pairs = [(layer.weight.detach().flatten(1), layer.bias) for layer in layers]
        return [each.detach() for pair in pairs for each in pair if each is not None]


def _check_layers(block: nn.Module) -> _BlockLayers:
    """The layers of either kind of block, if the kernels support them all."""
    if isinstance(block, InvertedResidual):
        expand, first = check_square_conv(block.conv_pw, 1), check_norm(block.bn1)
        norms, project = (block.bn2, block.bn3), block.conv_pwl
        check_types((block.act1, block.act2), nn.SiLU, nn.SiLU)
    elif isinstance(block, DepthwiseSeparableConv):
        expand, first = None, None
        norms, project = (block.bn1, block.bn2), block.conv_pw
        check_types((block.act1,), nn.SiLU)
    else:
        raise UnitNotFused(f"{type(block).__name__} is not a block of EfficientNet")
    check_types((block.se,), SqueezeExcite)
    return _BlockLayers(
        expand,
        first,
        check_square_conv(block.conv_dw),
        check_norm(norms[0]),
        cast(SqueezeExcite, block.se),
        check_square_conv(project, 1),
        check_norm(norms[1]),
        block.skips,
        block.rate,
    )


def _is_depthwise(conv: nn.Conv2d) -> bool:
    """Whether a convolution is depthwise, with a size and stride that our kernels support."""
    sizes = (conv.kernel_size[0], conv.stride[0])
    return conv.groups == conv.in_channels == conv.out_channels and sizes in _WINDOWS


def _run_fastest(part: str, conv: nn.Conv2d, x: Tensor, implementations: Implementations) -> Any:
    """The result of the fastest, which is timed once per shape; off the GPU, of the first."""
    if len(implementations) == 1 or not x.is_cuda:
        return next(iter(implementations.values()))()
    sizes = (*conv.weight.shape, *conv.stride, *x.shape)
    return CHOICES.run_fastest(f"mbconv {part} {sizes} {x.dtype}", implementations)


def _expand(conv: nn.Conv2d, saved: NamedTensors) -> tuple[Tensor, Tensor]:
    """The expansion and its sums."""
    x, weight = saved["x"], saved["expand"].flatten(1)

    def apart() -> tuple[Tensor, Tensor]:
        raw = to_image(to_rows(x) @ weight.T, x)
        return raw, sum_channels(raw)

    implementations: dict[str, Any] = {"apart": apart}
    if can_expand(weight):
        implementations = {"own": lambda: expand(x, weight, False), **implementations}
    return _run_fastest("expand", conv, x, implementations)


def _convolve(conv: nn.Conv2d, saved: NamedTensors) -> tuple[Tensor, Tensor]:
    """The depthwise convolution and its sums."""
    raw, v, weight = saved.get("raw", saved["x"]), saved.get("v1"), saved["depthwise"]
    stride, kernel = conv.stride[0], conv.kernel_size[0]

    def activate() -> Tensor:
        return raw if v is None else norm_silu(raw, v, None)

    def by_cudnn() -> tuple[Tensor, Tensor]:
        d = F.conv2d(activate(), weight, None, conv.stride, conv.padding, 1, conv.groups)
        d = to_channels_last(d)
        return d, sum_channels(d)

    if not _is_depthwise(conv):
        return by_cudnn()
    implementations: dict[str, Any] = {"own": lambda: convolve(activate(), weight, None, stride)}
    if v is not None and kernel == 3:  # SiLU on load, a few times per value
        on_load = {"on the load": lambda: convolve(raw, weight, v, stride)}
        implementations = on_load | implementations if stride == 2 else implementations | on_load
    return _run_fastest("convolve", conv, raw, implementations)


def _forward(layers: _BlockLayers, saved: NamedTensors) -> Tensor:
    """The block's output; what backward needs is added to `saved`."""
    if layers.expand is not None and layers.expand_norm is not None:
        saved["raw"], sums = _expand(layers.expand, saved)
        saved["v1"] = find_norm_vectors(layers.expand_norm, sums, saved["raw"])
    d, sums = _convolve(layers.depthwise, saved)
    v = find_norm_vectors(layers.depthwise_norm, sums, d)
    excited = excite(sum_images(d, v), layers.excite_weights, d.shape[2] * d.shape[3])
    gated = norm_silu(d, v, excited[2])
    p = to_image(to_rows(gated) @ saved["project"].flatten(1).T, d)
    v3 = find_norm_vectors(layers.project_norm, sum_channels(p), p)
    saved |= {"d": d, "v2": v, "gated": gated, "p": p, "v3": v3}
    saved |= dict(zip(("mean", "hidden", "gate"), excited, strict=True))
    return norm_add(p, v3, saved["x"] if layers.skips else None, saved.get("noise"), layers.rate)


def _project_back(
    layers: _BlockLayers, saved: NamedTensors, dy: Tensor, gradients: NamedTensors
) -> Tensor:
    """The gradient of squeeze-excite's output."""
    p, noise = saved["p"], saved.get("noise")
    sums = sum_gradients(dy, p, noise, layers.rate)
    u = finish_back(sums, saved["v3"], count_rows(p))
    gradients["norm3"], gradients["bias3"] = u[:2]
    dp = to_rows(norm_add_back(dy, p, u, noise, layers.rate))
    gradients["project"] = multiply(dp.T, to_rows(saved["gated"]))
    return to_image(dp @ saved["project"].flatten(1), p)


def _excite_back(
    layers: _BlockLayers, saved: NamedTensors, dt: Tensor, gradients: NamedTensors
) -> Tensor:
    """The gradient of the depthwise convolution's output."""
    d, v, gate = saved["d"], saved["v2"], saved["gate"]
    back = sum_images_back(d, v, dt)
    pixels, weights = d.shape[2] * d.shape[3], layers.excite_weights[::2]
    dhidden, dmean = excite_back(back, weights, saved["hidden"], gate, pixels)
    excited = [saved["mean"], saved["hidden"], gate, dhidden]
    u, *excite_gradients = finish_excite_back(back, excited, dmean, v, count_rows(d))
    names = ("excite1", "excite_bias1", "excite2", "excite_bias2")
    gradients |= dict(zip(names, excite_gradients, strict=True))
    gradients["norm2"], gradients["bias2"] = u[:2]
    return norm_gate_back(d, v, u, dmean, dt, gate)


def _convolve_back(
    conv: nn.Conv2d, saved: NamedTensors, dd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the preceding norm's output, its sums, and the gradient of the weights.

    Without such a norm, the first is the gradient of the block's input; the sums are meaningless.
    """
    raw, v, weight = saved.get("raw", saved["x"]), saved.get("v1"), saved["depthwise"]
    stride = conv.stride[0]

    def by_cudnn() -> tuple[Tensor, Tensor, Tensor]:
        x = raw if v is None else norm_silu(raw, v, None)
        da, dw, _ = torch.ops.aten.convolution_backward(
            dd, x, weight, None, conv.stride, conv.padding, [1, 1], False, [0, 0], conv.groups,
            [True, True, False],
        )  # fmt: skip
        da, dw = to_channels_last(da), dw.permute(0, 2, 3, 1)
        return (da, da, dw) if v is None else (*silu_back(da, raw, v), dw)

    def own() -> tuple[Tensor, Tensor, Tensor]:
        ds, sums, partials = convolve_back(dd, raw, weight, v, stride)
        return ds, sums, add_partials(partials, conv.in_channels)

    if not _is_depthwise(conv):
        return by_cudnn()
    implementations: dict[str, Any] = {"own": own}
    if (stride, conv.kernel_size[0]) == (1, 5):  # elsewhere our kernel is far faster
        implementations["cudnn"] = by_cudnn
    return _run_fastest("convolve back", conv, raw, implementations)


def _expand_back(
    layers: _BlockLayers, saved: NamedTensors, ds: Tensor, u: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's input, including the skip's, and of the expansion's weights."""
    raw, x, weight = saved["raw"], saved["x"], saved["expand"].flatten(1)
    add = dy if layers.skips else None

    def apart() -> tuple[Tensor, Tensor]:
        dc = to_rows(norm_add_back(ds, raw, u, None, 0.0))
        dx = dc @ weight if add is None else torch.addmm(to_rows(add), dc, weight)
        return to_image(dx, x), multiply(dc.T, to_rows(x))

    implementations: dict[str, Any] = {"apart": apart}
    if can_expand_back(weight):
        implementations = {
            "own": lambda: expand_back(ds, x, weight, u, add, False),
            **implementations,
        }
    assert layers.expand is not None
    return _run_fastest(f"expand back {layers.skips}", layers.expand, x, implementations)


def _backward(layers: _BlockLayers, saved: NamedTensors, dy: Tensor) -> tuple[Tensor, NamedTensors]:
    """The gradients of the input and of all parameters, by name."""
    gradients: NamedTensors = {}
    dt = _project_back(layers, saved, dy, gradients)
    dd = _excite_back(layers, saved, dt, gradients)
    ds, sums, gradients["depthwise"] = _convolve_back(layers.depthwise, saved, dd)
    if layers.expand is None:
        return (ds + dy if layers.skips else ds), gradients
    u = finish_back(sums, saved["v1"], count_rows(ds))
    gradients["norm1"], gradients["bias1"] = u[:2]
    dx, gradients["expand"] = _expand_back(layers, saved, ds, u, dy)
    return dx, gradients


class _MbconvBlock(SizeLimitedUnit):
    """A block of either kind."""

    def __init__(self, block: nn.Module, half: torch.dtype) -> None:
        self._layers = _check_layers(block)
        super().__init__([block], half, self._layers.depthwise)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters of the block."""
        return list(self._layers.parameters.values())

    def run(self, x: Tensor, drop_path: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """The block's output."""
        layers, saved = self._layers, {"x": x}
        if drop_path is not None and layers.skips:
            saved["noise"] = drop_path
        for name in ("expand", "depthwise", "project"):
            conv = getattr(layers, name)
            if conv is not None:
                saved[name] = to_half(conv.weight, self.half)
        y = _forward(layers, saved)
        return y, [saved.get(name) for name in _SAVED_NAMES]

    def run_back(
        self, dy: Tensor, second: Tensor | None, saved: Sequence[Any], *, needs_input_grad: bool
    ) -> Gradients:
        """Gradients from that of the output."""
        named = zip(_SAVED_NAMES, saved, strict=True)
        tensors = {name: tensor for name, tensor in named if tensor is not None}
        dx, gradients = _backward(self._layers, tensors, dy)
        return dx, None, to_gradients(gradients, self._layers.parameters)


def build_mbconv_block(modules: Sequence[nn.Module], half: torch.dtype) -> FusedUnit:
    """A function that runs a block in training, computing in `half`."""
    (block,) = modules
    return _MbconvBlock(block, half)
