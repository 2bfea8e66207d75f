"""Training-mode batch norm with the operations around it in an EfficientNet, as separate passes.

The vectors of a norm are those of phalanx.kernels.batch_norm: forward v = [mean, rstd, scale,
shift], backward u = [dgamma, dbeta, a, b, c], where the gradient of the norm's input is
a * gradient + b * input + c. `finish_vectors` and `finish_back` there compute them from the partial
sums [2, programs, C] here. These passes differ from those there in what they fuse with the norm,
and in loads that stay 16 bytes wide although channels are multiples of 8 only.

`noise` [N, 1] is uniformly random: drop-path drops a block's contribution where it is below `rate`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.image_layout import count_row_programs, count_rows, to_channels_last
from phalanx.mbconv.kernel_op import kernel_op


def _by_channel(vector: Tensor) -> Tensor:
    """A vector of channels in a shape that broadcasts with images."""
    return vector[None, :, None, None]


def silu_and_derivative(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """silu(z) and its derivative, where z is the normalised x, in float32."""
    z = x.float() * _by_channel(v[2]) + _by_channel(v[3])
    p = z.sigmoid()
    return z * p, p * (1 + z * (1 - p))


def _find_drop_path_factor(noise: Tensor, rate: float) -> Tensor:
    """The drop-path factor of each image: 0 or 1 / (1 - rate)."""
    return (noise.view(-1, 1, 1, 1) >= rate).float() / (1 - rate)


def _as_partial_sums(gradient: Tensor, x: Tensor) -> Tensor:
    """The sums of gradient and gradient * x by channel, in the first row; others are zero."""
    programs = count_row_programs(count_rows(x), x.shape[1])
    sums = torch.stack([gradient.sum((0, 2, 3)), (gradient * x.float()).sum((0, 2, 3))])
    return F.pad(sums[:, None], (0, 0, 0, programs - 1))


@kernel_op("phalanx.mbconv.norms_fused.sum_channels")
def sum_channels(x: Tensor) -> Tensor:
    """Partial sums of x and x * x."""
    return _as_partial_sums(x.float(), x)


@kernel_op("phalanx.mbconv.norms_fused.sum_gradients")
def sum_gradients(dy: Tensor, x: Tensor, noise: Tensor | None, rate: float) -> Tensor:
    """Partial sums of the gradient of a norm's output and of it times x, the norm's input.

    dy is the gradient of that output or, with noise, of its drop-path.
    """
    gradient = dy.float()
    if noise is not None:
        gradient = gradient * _find_drop_path_factor(noise, rate)
    return _as_partial_sums(gradient, x)


@kernel_op("phalanx.mbconv.norms_fused.silu_back")
def silu_back(dy: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of a norm's output, from the gradient dy of its SiLU, and partial sums of it."""
    ds = to_channels_last((dy.float() * silu_and_derivative(x, v)[1]).to(x.dtype))
    return ds, _as_partial_sums(ds.float(), x)


@kernel_op("phalanx.mbconv.partial_sums_fused.add_partials")
def add_partials(partials: Tensor, columns: int) -> Tensor:
    """[programs, rows, columns] summed over the first dimension and transposed: [columns, rows]."""
    return partials.view(len(partials), -1, columns).sum(0).T.contiguous()


@kernel_op("phalanx.mbconv.norms_fused.norm_silu")
def norm_silu(x: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
    """silu(norm(x)), times the gate [N, C] of a squeeze-excite."""
    act, _ = silu_and_derivative(x, v)
    if gate is not None:
        act = act * gate[:, :, None, None]
    return to_channels_last(act.to(x.dtype))


@kernel_op("phalanx.mbconv.norms_fused.norm_add")
def norm_add(x: Tensor, v: Tensor, add: Tensor | None, noise: Tensor | None, rate: float) -> Tensor:
    """norm(x), with drop-path if there is noise, plus the skip connection."""
    y = x.float() * _by_channel(v[2]) + _by_channel(v[3])
    if noise is not None:
        y = y * _find_drop_path_factor(noise, rate)
    if add is not None:
        y = y + add.float()
    return to_channels_last(y.to(x.dtype))


def _norm_back(gradient: Tensor, x: Tensor, u: Tensor) -> Tensor:
    """The gradient of a norm's input."""
    dx = gradient * _by_channel(u[2]) + x.float() * _by_channel(u[3]) + _by_channel(u[4])
    return to_channels_last(dx.to(x.dtype))


@kernel_op("phalanx.mbconv.norms_fused.norm_add_back")
def norm_add_back(dy: Tensor, x: Tensor, u: Tensor, noise: Tensor | None, rate: float) -> Tensor:
    """The gradient of x from dy, that of norm(x) or, with noise, of its drop-path."""
    gradient = dy.float()
    if noise is not None:
        gradient = gradient * _find_drop_path_factor(noise, rate)
    return _norm_back(gradient, x, u)


@kernel_op("phalanx.mbconv.norms_fused.norm_gate_back")
def norm_gate_back(
    x: Tensor, v: Tensor, u: Tensor, dmean: Tensor, dy: Tensor | None, gate: Tensor | None
) -> Tensor:
    """The gradient of x from dy, that of silu(norm(x)) * gate, and dmean [N, C] of every pixel.

    Without dy and gate, from dmean only.
    """
    gradient = dmean[:, :, None, None]
    if dy is not None and gate is not None:
        gradient = dy.float() * gate[:, :, None, None] + gradient
    return _norm_back(gradient * silu_and_derivative(x, v)[1], x, u)
