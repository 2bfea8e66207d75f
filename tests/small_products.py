"""Operations on small shapes with random operands, for tests of phalanx.products."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.batch_norm import pack_signs
from phalanx.products import conv, fold, gradients

IMAGES, SIZE, WIDE, NARROW = 4, 6, 128, 64  # 144 pixels: no tile divides them


@dataclass(frozen=True)
class Case:
    """An operation, its definition, and what both are given."""

    name: str
    operation: Callable[..., Any]
    reference: Callable[..., Any]
    operands: tuple[Any, ...]


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def to_double(value: Any) -> Any:
    if isinstance(value, list):
        return [to_double(each) for each in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return torch.float64 if isinstance(value, torch.dtype) else value


class Draws:
    """Random operands of one type on one device, the same for a seed."""

    def __init__(self, dtype: torch.dtype, device: str, seed: int = 0):
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def image(self, channels: int, size: int = SIZE) -> Tensor:
        x = self.normal(IMAGES, channels, size, size).to(self.device, self.dtype)
        return x.contiguous(memory_format=torch.channels_last)

    def matrix(self, rows: int, columns: int, depth: int) -> Tensor:
        return (self.normal(rows, columns) / depth**0.5).to(self.device, self.dtype)

    def vectors(self, rows: int, columns: int) -> Tensor:
        return self.normal(rows, columns).to(self.device)


def product_cases(draws: Draws) -> Iterator[Case]:
    """Every use of the gemm kernels."""
    x, y, narrow = draws.image(WIDE), draws.image(2 * WIDE), draws.image(NARROW)
    w, v = draws.matrix(2 * WIDE, WIDE, WIDE), draws.vectors(4, 2 * WIDE)
    small, bits = draws.image(2 * WIDE, SIZE // 2), pack_signs(draws.image(2 * WIDE))
    odd, odd_x = draws.image(2 * WIDE, 3), draws.image(WIDE, 5)
    uses: dict[str, tuple[Any, ...]] = {
        "sums": (conv.conv_sums, conv.conv_sums_reference, (x, w)),
        "sums of a narrow one": (
            conv.conv_sums,
            conv.conv_sums_reference,
            (narrow, draws.matrix(NARROW, NARROW, NARROW)),
        ),
        "norm": (conv.conv_norm, conv.conv_norm_reference, (x, w, v)),
        "residual": (conv.conv_norm_relu, conv.conv_norm_relu_reference, (x, w, v, y)),
        "skip": (
            gradients.skip_gradient,
            gradients.skip_gradient_reference,
            (x, w.t().contiguous(), y),
        ),
        "skip, gated": (
            gradients.skip_gradient_gated,
            gradients.skip_gradient_gated_reference,
            (x, w.t().contiguous(), y, bits),
        ),
        "strided skip": (
            gradients.skip_gradient,
            gradients.skip_gradient_reference,
            (x, w.t().contiguous(), small),
        ),
        "odd strided skip": (
            gradients.skip_gradient,
            gradients.skip_gradient_reference,
            (odd_x, w.t().contiguous(), odd),
        ),
        "strided skip, gated": (
            gradients.skip_gradient_gated,
            gradients.skip_gradient_gated_reference,
            (x, w.t().contiguous(), small, bits),
        ),
    }
    q, const = draws.matrix(WIDE, WIDE, WIDE), draws.vectors(1, WIDE + 1)[0].abs()
    back = (y, w, x, q, const)
    gate = (draws.image(WIDE), draws.vectors(4, WIDE))
    uses["input"] = (gradients.input_gradient, gradients.input_gradient_reference, back)
    uses["input, gated"] = (
        gradients.input_gradient_gated,
        gradients.input_gradient_gated_reference,
        (*back, *gate),
    )
    for name, (operation, reference, operands) in uses.items():
        yield Case(name, operation, reference, operands)


def other_cases(draws: Draws) -> Iterator[Case]:
    """The operations that are no products of pixels and weights."""
    x, narrow = draws.image(WIDE), draws.image(NARROW)
    w, m = draws.matrix(2 * WIDE, WIDE, WIDE), x.numel() // WIDE
    uses: dict[str, tuple[Any, ...]] = {
        "gram": (fold.gram_matrix, fold.gram_matrix_reference, (x,)),
        "narrow gram": (fold.gram_matrix, fold.gram_matrix_reference, (narrow,)),
        "normed gram": (
            fold.gram_matrix_of_input,
            fold.gram_matrix_of_input_reference,
            (x, draws.vectors(4, WIDE), 1),
        ),
        "narrow normed gram": (
            fold.gram_matrix_of_input,
            fold.gram_matrix_of_input_reference,
            (narrow, draws.vectors(4, NARROW), 1),
        ),
        "strided gram": (
            fold.gram_matrix_of_input,
            fold.gram_matrix_of_input_reference,
            (x, None, 2),
        ),
        "odd strided gram": (
            fold.gram_matrix_of_input,
            fold.gram_matrix_of_input_reference,
            (draws.image(WIDE, 5), None, 2),
        ),
        "mask": (
            gradients.mask_gradient,
            gradients.mask_gradient_reference,
            (x, pack_signs(draws.image(WIDE))),
        ),
    }
    spread = draws.image(WIDE, 1).expand(-1, -1, SIZE, SIZE)
    uses["spread mask"] = (*uses["mask"][:2], (spread, pack_signs(draws.image(WIDE))))
    gram, sums = fold.gram_matrix_reference(x)
    uses["covariance"] = (fold.fold_covariance, fold.fold_covariance_reference, (gram, sums, w, m))
    t, v = draws.vectors(2 * WIDE, WIDE), draws.vectors(4, 2 * WIDE)
    raw, s = draws.vectors(2 * WIDE, WIDE), draws.vectors(1, 2 * WIDE)[0]
    uses["gradient"] = (
        fold.fold_gradient,
        fold.fold_gradient_reference,
        (raw, s, [sums, w, t], v, m, torch.float32),
    )
    uses["input"] = (fold.fold_input, fold.fold_input_reference, (w, draws.vectors(5, 2 * WIDE)))
    for name, (operation, reference, operands) in uses.items():
        yield Case(name, operation, reference, operands)
