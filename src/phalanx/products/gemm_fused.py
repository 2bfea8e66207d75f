"""GEMMs with an epilogue, as three kernels: one program per tile, persistent by rows, and TMA.

All compute out [M, N] = epilogue(a [M, K] @ b [K, N]); with TRANS, b is [N, K]. The flags are those
of epilogue_fused. M may be any number, N and K are multiples of the tile's.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

from typing import Any

import triton
import triton.language as tl

from phalanx.kernels.norm_passes_fused import sum_rows_by_thread
from phalanx.products.epilogue_fused import (
    apply_affine,
    apply_gate,
    find_words,
    load_added,
    load_affine,
    load_bytes,
    load_gate,
    pack_words,
    second_summand,
    store_bytes,
    store_sums,
    unpack_bytes,
    unpack_words,
)


def _describe_flags(info: Any) -> str:
    """A name that distinguishes the uses of a kernel in a profile."""
    flags = {key: info.constants.get(key) for key in ("PRE", "AFFINE", "ADD", "ACT", "SUMS")}
    return "_".join(f"{key.lower()}{int(value or 0)}" for key, value in flags.items())


@triton.jit
def _multiply(acc, a, b, m, n, M, N, K, TRANS: tl.constexpr, BK: tl.constexpr):
    """acc + a @ b for the rows m and the columns n."""
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
        if TRANS:
            right = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
        else:
            right = tl.load(b + k[:, None] * N + n[None, :])
        acc = tl.dot(left, right, acc)
    return acc


@triton.jit(repr=lambda info: "gemm_" + _describe_flags(info), do_not_specialize=["H", "W"])
def gemm(
    a, b, a2, b2, beta, out, v, add, gate, gv, bits, s, M, N, K, K2, H, W,
    TRANS: tl.constexpr, PRE: tl.constexpr, AFFINE: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program per tile; the loads of the epilogue are issued before the product."""
    blocks = tl.cdiv(N, BN)
    row, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    ok = (m < M)[:, None]
    added = load_added(add, m, n, M, N, H, W, ADD)
    gates = load_gate(gate, m, n, M, N, ACT)
    packed = load_bytes(bits, m, M, N, column, ACT, BM, BN)

    acc = tl.zeros((BM, BN), tl.float32)
    if PRE:
        acc = _multiply(acc, a2, b2, m, n, M, N, K2, False, BK) * tl.load(beta)
    acc = _multiply(acc, a, b, m, n, M, N, K, TRANS, BK)

    scale, shift = load_affine(v, n, N, AFFINE)
    acc = apply_affine(acc, scale, shift, added, AFFINE, ADD)
    gate_scale, gate_shift = load_affine(gv, n, N, 2 if ACT == 4 else 0)
    kept = unpack_bytes(packed, ACT, BM, BN)
    acc = apply_gate(acc, gates, gate_scale, gate_shift, kept, ACT)
    result = acc.to(out.dtype.element_ty)
    tl.store(out + m[:, None] * N + n[None, :], result, mask=ok)
    store_bytes(bits, result, m, M, N, column, ACT, BM, BN)
    store_sums(s, tl.where(ok, acc, 0.0), gates, row, tl.cdiv(M, BM), n, N, SUMS)


@triton.jit(repr=lambda info: "rows_" + _describe_flags(info), do_not_specialize=["H", "W"])
def gemm_rows(
    a, b, a2, b2, beta, out, v, add, gate, gv, bits, s, M, N, P, H, W,
    TRANS: tl.constexpr, PRE: tl.constexpr, AFFINE: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, SUMS: tl.constexpr, K: tl.constexpr, K2: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Persistent programs keep their columns of b and loop over every P-th block of rows.

    All loads of a block of rows are issued DEPTH - 1 blocks ahead. K and K2 are powers of two.
    The partial sums have P rows.
    """
    blocks = tl.cdiv(N, BN)
    column, first = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    n, k = column * BN + tl.arange(0, BN), tl.arange(0, K)
    if TRANS:
        right = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    else:
        right = tl.load(b + k[:, None] * N + n[None, :])
    if PRE:
        k2 = tl.arange(0, K2)
        right2, factor = tl.load(b2 + k2[:, None] * N + n[None, :]), tl.load(beta)
    scale, shift = load_affine(v, n, N, AFFINE)
    gate_scale, gate_shift = load_affine(gv, n, N, 2 if ACT == 4 else 0)
    total, second = tl.zeros((WARPS, 8, BN), tl.float32), tl.zeros((WARPS, 8, BN), tl.float32)
    for row in tl.range(first, tl.cdiv(M, BM), P, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        ok = (m < M)[:, None]
        added = load_added(add, m, n, M, N, H, W, ADD)
        gates = load_gate(gate, m, n, M, N, ACT)
        packed = load_bytes(bits, m, M, N, column, ACT, BM, BN)
        left = tl.load(a + m[:, None] * K + k[None, :], mask=ok, other=0.0)
        if PRE:
            left2 = tl.load(a2 + m[:, None] * K2 + k2[None, :], mask=ok, other=0.0)
            acc = tl.dot(left, right, tl.dot(left2, right2) * factor)
        else:
            acc = tl.dot(left, right)
        acc = apply_affine(acc, scale, shift, added, AFFINE, ADD)
        kept = unpack_bytes(packed, ACT, BM, BN)
        acc = apply_gate(acc, gates, gate_scale, gate_shift, kept, ACT)
        result = acc.to(out.dtype.element_ty)
        tl.store(out + m[:, None] * N + n[None, :], result, mask=ok)
        store_bytes(bits, result, m, M, N, column, ACT, BM, BN)
        if (SUMS > 0) and (AFFINE > 0):  # otherwise rows beyond M are zero
            acc = tl.where(ok, acc, 0.0)
        if SUMS > 0:
            total += sum_rows_by_thread(acc, BM, BN, WARPS)
        if SUMS > 1:
            second += sum_rows_by_thread(second_summand(acc, gates, SUMS), BM, BN, WARPS)
    if SUMS > 0:
        tl.store(s + first * N + n, tl.sum(tl.sum(total, 1), 0))
    if SUMS > 1:
        tl.store(s + (P + first) * N + n, tl.sum(tl.sum(second, 1), 0))


@triton.jit
def _multiply_tma(acc, a, b, top, side, K, TRANS: tl.constexpr, BK: tl.constexpr):
    """acc + a @ b for one tile; a and b are tensor descriptors."""
    for k0 in range(0, K, BK):
        right = tl.trans(b.load([side, k0])) if TRANS else b.load([k0, side])
        acc = tl.dot(a.load([top, k0]), right, acc)
    return acc


@triton.jit(repr=lambda info: "tma_" + _describe_flags(info), do_not_specialize=["H", "W"])
def gemm_tma(
    a, b, a2, b2, beta, out, v, add, gate, gv, bits, s, M, N, K, K2, P, H, W,
    TRANS: tl.constexpr, PRE: tl.constexpr, AFFINE: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
    FLAT: tl.constexpr,
):  # fmt: skip
    """P programs loop over the tiles; a, b, a2 and b2 are tensor descriptors.

    For products of many channels, whose weights do not fit on chip: TMA loads both operands and,
    with FLAT, those of the next tile during the epilogue of this one. EARLY: the loads of the
    epilogue are issued before the product, where registers allow.
    """
    blocks = tl.cdiv(N, BN)
    late = tl.program_id(0) - P  # the epilogue recomputes its tile: a shared index takes registers
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * blocks, P, flatten=FLAT):
        top, side = (tile // blocks) * BM, (tile % blocks) * BN
        if EARLY:
            m0, n0 = top + tl.arange(0, BM), side + tl.arange(0, BN)
            added = load_added(add, m0, n0, M, N, H, W, ADD)
            gates = load_gate(gate, m0, n0, M, N, ACT)
        acc = tl.zeros((BM, BN), tl.float32)
        if PRE:
            acc = _multiply_tma(acc, a2, b2, top, side, K2, False, BK) * tl.load(beta)
        acc = _multiply_tma(acc, a, b, top, side, K, TRANS, BK)
        late += P
        row, column = late // blocks, late % blocks
        m, n = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        ok = (m < M)[:, None]
        if (ACT == 1) | (ACT == 3):
            word = find_words(bits, m, N, column, BN)
        packed = tl.load(word, mask=ok, other=0) if ACT == 3 else 0.0
        if not EARLY:
            added = load_added(add, m, n, M, N, H, W, ADD)
            gates = load_gate(gate, m, n, M, N, ACT)
        scale, shift = load_affine(v, n, N, AFFINE)
        acc = apply_affine(acc, scale, shift, added, AFFINE, ADD)
        gate_scale, gate_shift = load_affine(gv, n, N, 2 if ACT == 4 else 0)
        kept = unpack_words(packed, ACT, BM, BN)
        acc = apply_gate(acc, gates, gate_scale, gate_shift, kept, ACT)
        result = acc.to(out.dtype.element_ty)
        tl.store(out + m[:, None] * N + n[None, :], result, mask=ok)
        if ACT == 1:
            tl.store(word, pack_words(result > 0, BM, BN, EARLY and not FLAT), mask=ok)
        store_sums(s, tl.where(ok, acc, 0.0), gates, row, tl.cdiv(M, BM), n, N, SUMS)
