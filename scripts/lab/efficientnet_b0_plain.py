"""EfficientNet-B0 in plain torch, from the same weights and noise: what the kernels must equal."""

from typing import Any

import mbconv_ops as ops
import torch
import torch.nn.functional as F
from efficientnet_b0_network import Network
from efficientnet_b0_weights import Shape
from torch import Tensor


def normalise(leaf: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """A BatchNorm in training; its weights are float32 beside 16-bit images."""
    weight, bias = leaf[f"{name}.weight"], leaf[f"{name}.bias"]
    return F.batch_norm(x, None, None, weight, bias, True, 0.1, ops.EPS)


def plain_block(leaf: dict[str, Tensor], shape: Shape, x: Tensor, keep: Tensor) -> Tensor:
    """One block of a channels_last image."""
    name, added = shape.name, x
    if shape.middle != shape.into:
        x = F.conv2d(x, leaf[f"{name}.expand"][:, :, None, None])
        x = F.silu(normalise(leaf, f"{name}.1", x))
    kernel = leaf[f"{name}.depthwise"].permute(2, 0, 1)[:, None]
    x = F.conv2d(x, kernel, None, shape.stride, shape.kernel // 2, 1, shape.middle)
    x = F.silu(normalise(leaf, f"{name}.2", x))
    mean = x.mean((2, 3))
    hidden = F.silu(F.linear(mean, leaf[f"{name}.w1"], leaf[f"{name}.b1"].to(x.dtype)))
    gate = torch.sigmoid(F.linear(hidden, leaf[f"{name}.w2"], leaf[f"{name}.b2"].to(x.dtype)))
    x = F.conv2d(x * gate[:, :, None, None], leaf[f"{name}.project"][:, :, None, None])
    x = normalise(leaf, f"{name}.3", x)
    return x * keep.to(x.dtype)[:, None, None, None] + added if shape.skip else x


def plain_loss(net: Network, leaf: dict[str, Tensor], image: Tensor, labels: Tensor) -> Tensor:
    """The loss of an NHWC image."""
    x = image.permute(0, 3, 1, 2)
    kernel = leaf["stem.w"].view(32, 3, 3, 3).permute(0, 3, 1, 2)
    x = F.silu(normalise(leaf, "stem", F.conv2d(x, kernel, None, 2, 1)))
    for block, keep in zip(net.blocks, net.keep, strict=True):
        x = plain_block(leaf, block.shape, x, keep)
    x = F.conv2d(x, leaf["head.w"][:, :, None, None])
    x = F.silu(normalise(leaf, "head", x)).mean((2, 3)) * net.drop.to(x.dtype)
    logits = F.linear(x, leaf["fc.w"], leaf["fc.b"].to(x.dtype))
    return F.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), labels)


def plain_gradients(
    net: Network, image: Tensor, labels: Tensor, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients by autograd; at 16 bits with the 16-bit weights and float32 vectors."""
    leaf = {}
    for name, value in net.weights.half.items():
        vector = value.ndim == 1
        source = net.weights.master[name] if vector else value
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaf[name] = source.to(wide if vector else dtype).detach().clone().requires_grad_()
    scale = net.scale if dtype == torch.float16 else 1.0
    loss = plain_loss(net, leaf, image.to(dtype), labels)
    grads = torch.autograd.grad(loss * scale, list(leaf.values()))
    return loss.detach(), {n: g.double() / scale for n, g in zip(leaf, grads, strict=True)}


def relative(found: Tensor, wanted: Tensor) -> float:
    """The error's norm over the reference's."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


def compare_network(net: Network, image: Tensor, labels: Tensor) -> dict[str, Any]:
    """Errors of the network's gradients and of plain torch's, against float64."""
    net.draw()
    wanted_loss, wanted = plain_gradients(net, image, labels, torch.float64)
    loss = net.gradients(image, labels)
    own = {name: g.double() / net.scale for name, g in net.weights.grad.items()}
    row: dict[str, Any] = {"loss": float(loss - wanted_loss)}
    row["all"] = relative(flat(own), flat(wanted))
    least = 1e-5 * float(flat(wanted).norm())  # below it, rounding is all there is
    wanted = {name: value for name, value in wanted.items() if float(value.norm()) > least}
    own = {name: own[name] for name in wanted}
    errors = {name: relative(own[name], wanted[name]) for name in wanted}
    row["worst"] = max(errors.items(), key=lambda pair: pair[1])
    if net.dtype != torch.float32:
        _, plain = plain_gradients(net, image, labels, net.dtype)
        plain = {name: plain[name] for name in wanted}
        row["torch_all"] = relative(flat(plain), flat(wanted))
        ratios = sorted(
            (errors[name] / max(relative(plain[name], wanted[name]), 1e-9), name) for name in wanted
        )
        row["ratio_median"], row["ratio_most"] = ratios[len(ratios) // 2][0], ratios[-3:]
    return row


def flat(values: dict[str, Tensor]) -> Tensor:
    """All in one vector, in the order of names."""
    return torch.cat([values[name].reshape(-1) for name in sorted(values)])
