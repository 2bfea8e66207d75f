"""Triton kernels that take two neighbours of a ResNet-50 step together, where a block ends.

What one block writes last is the widest tensor of the step, and the next kernel reads it again:
forward, the first convolution of the block above; backward, the weight gradient of the last
convolution of the block below. Here the reader works on the tile that the writer still holds:

    pair_rows, pair_walk: out = ReLU(norm(a b^T) + residual), after = out w^T, sums of after
    skip_raw:             out = (a b + skip) where bits say so, its sums, raw = out^T x
    skip_walk:            the same out and sums, after = out w

Where skip_walk runs, the gradient g of a block's output comes with p = g (scale W), the larger part
of dx = p + x Q + const (see step_kernels.py), so that g is not read again for it.

Layouts, vectors, bits and tiles are those of step_kernels.py, and so are the results, rounding
included: the second product takes `out` as it is stored.
"""
# ruff: noqa: PLR0913, PLR0917  (kernels take pointers and sizes one by one)

from typing import Any

import triton
import triton.language as tl
from step_kernels import (
    EVEN_PIXELS,
    INPUT_TILES,
    MOST_ROWS,
    PLAIN,
    SHARED_MEMORY,
    Launch,
    add_own_rows,
    add_rows,
    describe,
    flat,
    floats,
    launcher,
    load_added,
    make_tiles,
    new_image,
    pack_bits,
    shorten,
    unpack_bits,
)
from torch import Tensor

# The last column is how many blocks of rows are under way.
PAIR_ROWS_TILES = make_tiles(
    "BM FETCH OCCUPANCY",
    *((64, 1, 1, 4, 3), (64, 0, 2, 4, 3), (64, 1, 1, 4, 4), (64, 0, 2, 4, 2), (128, 0, 1, 8, 3)),
    *((128, 1, 1, 8, 2),),
)
# OCCUPANCY 0: a program for every block of rows. The last column: blocks of columns under way.
PAIR_WALK_TILES = make_tiles(
    "BM BN OCCUPANCY",
    *((64, 64, 0, 4, 2), (128, 64, 0, 8, 2), (128, 64, 0, 8, 3), (64, 64, 0, 4, 3)),
    *((64, 64, 2, 4, 2), (128, 64, 1, 8, 2), (128, 64, 1, 8, 3), (128, 128, 0, 8, 2)),
)
SKIP_RAW_TILES = make_tiles(
    "BM FETCH OCCUPANCY",
    *((64, 1, 1, 4, 3), (64, 0, 2, 4, 3), (64, 1, 2, 4, 2), (64, 1, 1, 4, 4), (64, 0, 2, 4, 2)),
    *((128, 0, 1, 8, 3), (128, 1, 1, 8, 2)),
)
SKIP_WALK_TILES = make_tiles(
    "BM BN", (64, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)
)
WIDEST_AFTER = 256  # columns of the second product, whose sums stay in registers


@triton.jit
def close_columns(
    acc, added, v, out, bits, m, M, column,
    N: tl.constexpr, BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Norm, residual and ReLU of the columns from `column` on: stored, and returned as stored."""
    n, ok = column + tl.arange(0, BN), (m < M)[:, None]
    if M > 0:  # always; a load under a condition is not fetched ahead, which would take registers
        acc = acc * tl.load(v + 2 * N + n)[None, :] + tl.load(v + 3 * N + n)[None, :]
    result = tl.maximum(acc + added.to(tl.float32), 0.0).to(out.dtype.element_ty)
    tl.store(out + m[:, None] * N + n[None, :], result, mask=ok)
    if BITS:
        byte = m[:, None] * (N // 8) + (column // 8 + tl.arange(0, BN // 8))[None, :]
        tl.store(bits + byte, pack_bits(result > 0, BM, BN), mask=ok)
    return result


@triton.jit
def load_columns(b, N: tl.constexpr, K: tl.constexpr, PART: tl.constexpr, TRANS: tl.constexpr):
    """Part PART of four of the columns of b [K, N], where TRANS b is [N, K]."""
    n, k = PART * (N // 4) + tl.arange(0, N // 4), tl.arange(0, K)
    if TRANS:
        return tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    return tl.load(b + k[:, None] * N + n[None, :])


@triton.jit
def load_rows(w, N: tl.constexpr, L: tl.constexpr, PART: tl.constexpr):
    """Part PART of four of the rows of w^T, where w is [L, N]."""
    n, j = PART * (N // 4) + tl.arange(0, N // 4), tl.arange(0, L)
    return tl.trans(tl.load(w + j[:, None] * N + n[None, :]))


@triton.jit
def load_quarter(place, ok, M, FETCH: tl.constexpr):
    """A masked load; without FETCH under a condition that always holds, as in close_columns."""
    if FETCH:
        value = tl.load(place, mask=ok, other=0.0)
    else:
        value = tl.zeros(place.shape, place.dtype.element_ty)
        if M > 0:
            value = tl.load(place, mask=ok, other=0.0)
    return value


@triton.jit
def pair_rows(
    a, b, out, v, add, bits, w, after, s, M, P,
    N: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BITS: tl.constexpr,
    BM: tl.constexpr, FETCH: tl.constexpr, DEPTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The pair by programs that keep all of b [N, K] and w [L, N] and walk over every P-th block.

    In quarters of the columns, for want of registers. FETCH: the residual is fetched a block ahead,
    like the rows; else when it is needed, so that two programs fit on a multiprocessor. The partial
    sums have P rows.
    """
    BN: tl.constexpr = N // 4
    first, n, k, j = tl.program_id(0), tl.arange(0, BN), tl.arange(0, K), tl.arange(0, L)
    b0, b1 = load_columns(b, N, K, 0, True), load_columns(b, N, K, 1, True)
    b2, b3 = load_columns(b, N, K, 2, True), load_columns(b, N, K, 3, True)
    w0, w1 = load_rows(w, N, L, 0), load_rows(w, N, L, 1)
    w2, w3 = load_rows(w, N, L, 2), load_rows(w, N, L, 3)
    total, second = tl.zeros((WARPS, 8, L), tl.float32), tl.zeros((WARPS, 8, L), tl.float32)
    for row in tl.range(first, tl.cdiv(M, BM), P, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        ok, o = (m < M)[:, None], m[:, None] * N + n[None, :]
        rows = tl.load(a + m[:, None] * K + k[None, :], mask=ok, other=0.0)
        add0 = load_quarter(add + o, ok, M, FETCH)
        add1 = load_quarter(add + o + BN, ok, M, FETCH)
        add2 = load_quarter(add + o + 2 * BN, ok, M, FETCH)
        add3 = load_quarter(add + o + 3 * BN, ok, M, FETCH)
        acc = tl.dot(rows, b0)
        part = close_columns(acc, add0, v, out, bits, m, M, 0, N, BITS, BM, BN)
        acc2 = tl.dot(part, w0)
        acc = tl.dot(rows, b1)
        part = close_columns(acc, add1, v, out, bits, m, M, BN, N, BITS, BM, BN)
        acc2 = tl.dot(part, w1, acc2)
        acc = tl.dot(rows, b2)
        part = close_columns(acc, add2, v, out, bits, m, M, 2 * BN, N, BITS, BM, BN)
        acc2 = tl.dot(part, w2, acc2)
        acc = tl.dot(rows, b3)
        part = close_columns(acc, add3, v, out, bits, m, M, 3 * BN, N, BITS, BM, BN)
        acc2 = tl.dot(part, w3, acc2)
        place = after + m[:, None] * L + j[None, :]
        tl.store(place, acc2.to(after.dtype.element_ty), mask=ok)
        acc2 = tl.where(ok, acc2, 0.0)
        total += add_own_rows(acc2, BM, L, WARPS)
        second += add_own_rows(acc2 * acc2, BM, L, WARPS)
    tl.store(s + first * L + j, tl.sum(tl.sum(total, 1), 0))
    tl.store(s + (P + first) * L + j, tl.sum(tl.sum(second, 1), 0))


@triton.jit
def pair_walk(
    a, b, out, v, add, bits, w, after, s, M, P,
    N: tl.constexpr, K: tl.constexpr, L: tl.constexpr, BITS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The pair for weights that fit nowhere: a block of rows walks over the columns of `out`.

    a, b, add and w are descriptors. The partial sums have a row for every block of rows.
    """
    blocks = tl.cdiv(M, BM)
    for row in tl.range(tl.program_id(0), blocks, P):
        top = row * BM
        m, j = top + tl.arange(0, BM), tl.arange(0, L)
        ok = (m < M)[:, None]
        rows, acc2 = a.load([top, 0]), tl.zeros((BM, L), tl.float32)
        for column in range(0, N, BN):
            added = add.load([top, column])
            acc = tl.dot(rows, tl.trans(b.load([column, 0])))
            result = close_columns(acc, added, v, out, bits, m, M, column, N, BITS, BM, BN)
            acc2 = tl.dot(result, tl.trans(w.load([0, column])), acc2)
        place = after + m[:, None] * L + j[None, :]
        tl.store(place, acc2.to(after.dtype.element_ty), mask=ok)
        acc2 = tl.where(ok, acc2, 0.0)
        tl.store(s + row * L + j, tl.sum(acc2, 0))
        tl.store(s + (blocks + row) * L + j, tl.sum(acc2 * acc2, 0))


@triton.jit
def skip_columns(
    rows, b, add, bits, out, s, m, M, row, H, W,
    N: tl.constexpr, ADD: tl.constexpr, BM: tl.constexpr, FETCH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Part PART of four of skip_raw's `out`: stored with its sums, and returned as stored."""
    BN: tl.constexpr = N // 4
    n, ok = PART * BN + tl.arange(0, BN), (m < M)[:, None]
    byte = m[:, None] * (N // 8) + (PART * (BN // 8) + tl.arange(0, BN // 8))[None, :]
    if FETCH:
        added = load_added(add, m, n, M, N, H, W, ADD)
    else:
        added = tl.zeros((BM, BN), add.dtype.element_ty)
        if M > 0:  # as in close_columns
            added = load_added(add, m, n, M, N, H, W, ADD)
    packed = tl.load(bits + byte, mask=ok, other=0)
    acc = tl.dot(rows, b) + added.to(tl.float32)
    acc = tl.where(unpack_bits(packed, BM, BN) > 0, acc, 0.0)
    tl.store(s + row * N + n, tl.sum(acc, 0))
    result = acc.to(out.dtype.element_ty)
    tl.store(out + m[:, None] * N + n[None, :], result, mask=ok)
    return result


@triton.jit(do_not_specialize=["H", "W"])
def skip_raw(
    a, b, out, add, bits, s, x, raw, M, P, H, W,
    N: tl.constexpr, K: tl.constexpr, L: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, FETCH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out = a b [K, N] + add where bits say so, its sums, and raw [P, N, L] = out^T x.

    By programs that keep b and walk over every P-th block of rows, in quarters of the columns. The
    sums have a row for every block of rows. ADD as in `gemm`, FETCH as in pair_rows.
    """
    first, n = tl.program_id(0), tl.arange(0, N // 4)
    k, j = tl.arange(0, K), tl.arange(0, L)
    b0, b1 = load_columns(b, N, K, 0, False), load_columns(b, N, K, 1, False)
    b2, b3 = load_columns(b, N, K, 2, False), load_columns(b, N, K, 3, False)
    raw0, raw1 = tl.zeros((N // 4, L), tl.float32), tl.zeros((N // 4, L), tl.float32)
    raw2, raw3 = tl.zeros((N // 4, L), tl.float32), tl.zeros((N // 4, L), tl.float32)
    for row in tl.range(first, tl.cdiv(M, BM), P, num_stages=DEPTH):
        m = row * BM + tl.arange(0, BM)
        ok = (m < M)[:, None]
        rows = tl.load(a + m[:, None] * K + k[None, :], mask=ok, other=0.0)
        own = tl.load(x + m[:, None] * L + j[None, :], mask=ok, other=0.0)
        part = skip_columns(rows, b0, add, bits, out, s, m, M, row, H, W, N, ADD, BM, FETCH, 0)
        raw0 = tl.dot(tl.trans(part), own, raw0)
        part = skip_columns(rows, b1, add, bits, out, s, m, M, row, H, W, N, ADD, BM, FETCH, 1)
        raw1 = tl.dot(tl.trans(part), own, raw1)
        part = skip_columns(rows, b2, add, bits, out, s, m, M, row, H, W, N, ADD, BM, FETCH, 2)
        raw2 = tl.dot(tl.trans(part), own, raw2)
        part = skip_columns(rows, b3, add, bits, out, s, m, M, row, H, W, N, ADD, BM, FETCH, 3)
        raw3 = tl.dot(tl.trans(part), own, raw3)
    place = raw + (first * N + n)[:, None] * L + j[None, :]
    tl.store(place, raw0)
    tl.store(place + N // 4 * L, raw1)
    tl.store(place + N // 2 * L, raw2)
    tl.store(place + 3 * N // 4 * L, raw3)


@triton.jit(do_not_specialize=["H", "W"])
def skip_walk(
    a, b, out, add, bits, s, w, after, M, H, W,
    N: tl.constexpr, K: tl.constexpr, L: tl.constexpr, ADD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out = a b [K, N] + add where bits say so, with its sums, and after = out w [N, L].

    A block of rows walks over the columns of `out`; a, b and w are descriptors. ADD as in `gemm`.
    """
    row = tl.program_id(0)
    top = row * BM
    m, j = top + tl.arange(0, BM), tl.arange(0, L)
    ok, rows, acc2 = (m < M)[:, None], a.load([top, 0]), tl.zeros((BM, L), tl.float32)
    for column in tl.range(0, N, BN, num_stages=DEPTH):
        n = column + tl.arange(0, BN)
        byte = m[:, None] * (N // 8) + (column // 8 + tl.arange(0, BN // 8))[None, :]
        added = load_added(add, m, n, M, N, H, W, ADD)
        packed = tl.load(bits + byte, mask=ok, other=0)
        acc = tl.dot(rows, b.load([0, column])) + added.to(tl.float32)
        acc = tl.where(unpack_bits(packed, BM, BN) > 0, acc, 0.0)
        tl.store(s + row * N + n, tl.sum(acc, 0))
        result = acc.to(out.dtype.element_ty)
        tl.store(out + m[:, None] * N + n[None, :], result, mask=ok)
        acc2 = tl.dot(result, w.load([column, 0]), acc2)
    place = after + m[:, None] * L + j[None, :]
    tl.store(place, acc2.to(after.dtype.element_ty), mask=ok)


@triton.jit
def fold_input_rows(w, u, q, v, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """fold_input with its scale and const as a scale and a shift: rows 2 and 3 of v [4, K]."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BK + tl.arange(0, BK)
    largest = tl.zeros((BN,), tl.float32)
    for n0 in range(0, N, BN):
        largest = tl.maximum(largest, tl.abs(tl.load(u + 3 * N + n0 + tl.arange(0, BN))))
    top = tl.maximum(tl.max(largest, 0), 1e-30)
    acc, total = tl.zeros((BK, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for n0 in range(0, N, BN):
        n = n0 + tl.arange(0, BN)
        left = tl.load(w + n[:, None] * K + k[None, :]).to(tl.float32)
        right = tl.load(w + n[:, None] * K + j[None, :]).to(tl.float32)
        total += tl.sum(left * tl.load(u + 4 * N + n)[:, None], 0)
        left = left * (tl.load(u + 3 * N + n) / top)[:, None]
        acc = tl.dot(tl.trans(left), right, acc, input_precision="tf32")
    tl.store(q + k[:, None] * K + j[None, :], acc.to(q.dtype.element_ty))
    first = (k < K) & (tl.program_id(1) == 0)
    tl.store(v + 2 * K + k, tl.zeros((BK,), tl.float32) + top, mask=first)
    tl.store(v + 3 * K + k, total, mask=first)


# --- the kernels as functions of images ---


def run_allowed(key: str, launches: list[Launch]) -> Launch:
    """Run the fastest of several ways that no check found wrong; fails where none is left."""
    allowed = [x for x in launches if launcher.forced or x.ban_key not in launcher.banned]
    if not allowed:
        raise RuntimeError(f"no way is left for {key}")
    return launcher.run_fastest(key, allowed)


def pair_fits(k: int, n: int, after: int) -> bool:
    """Whether a last convolution k -> n and a first one n -> after can be a pair."""
    return k <= 256 and after <= WIDEST_AFTER and n % 128 == 0 and k & (k - 1) == 0


def pair(
    a: Tensor, b: Tensor, v: Tensor, add: Tensor, bits: Tensor | None, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """ReLU(norm(a b^T) + add), its product with w^T, and the latter's partial sums [2, G, L]."""
    count, k, high, wide = a.shape
    n, after_channels, m = b.shape[0], w.shape[0], count * high * wide
    out = new_image(count, n, high, wide, a)
    after = new_image(count, after_channels, high, wide, a)
    s = floats(2 * max(triton.cdiv(m, 64), MOST_ROWS) * after_channels, like=a)
    tensors = (a, b, out, v, add, bits, w, after, s)
    flags = {"N": n, "K": k, "L": after_channels, "BITS": bits is not None}
    launches = pair_rows_launches(tensors, m, flags) + pair_walk_launches(tensors, m, flags)
    used = run_allowed(f"pair {m} {flags}", launches)
    rows = used.args[10] if used.kernel is pair_rows else triton.cdiv(m, used.tile["BM"])
    return out, after, shorten(s[: 2 * rows * after_channels].view(2, rows, after_channels))


def count_walkers(m: int, tile: dict[str, int], occupancy: int = 1) -> int:
    """Programs that share the blocks of rows."""
    return min(occupancy * launcher.multiprocessors, triton.cdiv(m, tile["BM"]))


def pair_rows_launches(tensors: tuple, m: int, flags: dict[str, int]) -> list[Launch]:
    """Ways to launch pair_rows that fit into shared memory."""
    n, k, columns = flags["N"], flags["K"], flags["L"]
    launches = []
    for t in PAIR_ROWS_TILES:
        bm, depth = t["BM"], t["num_stages"]
        values = n * (k + columns) + bm * (k * depth + max(n // 4, columns))
        values += bm * n * (depth - 1) * t["FETCH"]
        occupancy = min(t["OCCUPANCY"], SHARED_MEMORY // (2 * values))
        if not occupancy:
            continue
        walkers = count_walkers(m, t, occupancy)
        own = {"BM": bm, "FETCH": t["FETCH"], "DEPTH": depth, "WARPS": t["num_warps"]}
        own |= {"num_warps": t["num_warps"], "num_stages": depth}
        args = (*tensors, m, walkers)
        launches.append(Launch(pair_rows, (walkers,), args, flags, t, {**flags, **own}))
    return launches


def pair_walk_launches(tensors: tuple, m: int, flags: dict[str, int]) -> list[Launch]:
    """Ways to launch pair_walk that fit into shared memory and registers."""
    a, b, out, v, add, bits, w, after, s = tensors
    k, columns = flags["K"], flags["L"]
    launches = []
    for t in PAIR_WALK_TILES:
        bm, bn, depth = t["BM"], t["BN"], t["num_stages"]
        values = bm * k + depth * bn * (k + columns + bm)
        if 2 * values + 1024 > SHARED_MEMORY:
            continue
        walking = t["OCCUPANCY"] > 0
        programs = count_walkers(m, t, t["OCCUPANCY"]) if walking else triton.cdiv(m, bm)
        factors = (describe(flat(a), bm, k), describe(b, bn, k), out, v)
        factors = (*factors, describe(flat(add), bm, bn), bits, describe(w, columns, bn))
        own = {key: value for key, value in t.items() if key != "OCCUPANCY"}
        args = (*factors, after, s, m, programs)
        launches.append(Launch(pair_walk, (programs,), args, flags, t, {**flags, **own}))
    return launches


def skip_fits(k: int, n: int, columns: int) -> bool:
    """Whether a skip product k -> n can take along a weight gradient [n, columns]."""
    return k <= 128 and n <= 256 and columns <= 64


def skip_with_raw(
    a: Tensor, b: Tensor, add: Tensor, bits: Tensor, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """a b + add where bits say so, its partial sums [1, G, N], and its product out^T x [N, L]."""
    count, k, high, wide = a.shape
    n, columns, m = b.shape[1], x.shape[1], count * high * wide
    out = new_image(count, n, high, wide, a)
    adding = PLAIN if add.shape == out.shape else EVEN_PIXELS
    flags = {"N": n, "K": k, "L": columns, "ADD": adding}
    s = floats(triton.cdiv(m, 64) * n, like=a)  # as many as any tile needs
    raw = floats(2 * launcher.multiprocessors * n * columns, like=a)
    launches = []
    for t in SKIP_RAW_TILES:
        bm, depth = t["BM"], t["num_stages"]
        values = n * k + bm * (k + columns) * depth + bm * n // 2
        values += bm * n * (depth - 1) * t["FETCH"]
        occupancy = min(t["OCCUPANCY"], SHARED_MEMORY // (2 * values))
        if not occupancy:
            continue
        walkers = count_walkers(m, t, occupancy)
        own = {"BM": bm, "FETCH": t["FETCH"], "DEPTH": depth}
        own |= {"num_warps": t["num_warps"], "num_stages": depth}
        args = (a, b, out, add, bits, s, x, raw, m, walkers, high, wide)
        launches.append(Launch(skip_raw, (walkers,), args, flags, t, {**flags, **own}))
    used = run_allowed(f"skip with raw {m} {flags}", launches)
    rows, walkers = triton.cdiv(m, used.tile["BM"]), used.args[9]
    raw = add_rows(raw[: walkers * n * columns].view(1, walkers, n * columns), 1)
    return out, shorten(s[: rows * n].view(1, rows, n)), raw.view(n, columns)


def input_fits(k: int, n: int, columns: int) -> bool:
    """Whether a skip product k -> n can take along the product with the weight [n, columns]."""
    return 128 <= k <= 256 and n % 128 == 0 and 128 <= columns <= WIDEST_AFTER


def skip_with_input(
    a: Tensor, b: Tensor, add: Tensor, bits: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """a b + add where bits say so, its partial sums [1, G, N], and its product with w [N, L]."""
    count, k, high, wide = a.shape
    (n, columns), m = w.shape, count * high * wide
    out = new_image(count, n, high, wide, a)
    after = new_image(count, columns, high, wide, a)
    adding = PLAIN if add.shape == out.shape else EVEN_PIXELS
    flags = {"N": n, "K": k, "L": columns, "ADD": adding}
    s = floats(triton.cdiv(m, 64) * n, like=a)  # as many as any tile needs
    launches = []
    for t in SKIP_WALK_TILES:
        bm, bn, depth = t["BM"], t["BN"], t["num_stages"]
        values = bm * k + depth * bn * (k + columns + bm)
        if 2 * values + 1024 > SHARED_MEMORY:
            continue
        factors = (describe(flat(a), bm, k), describe(b, k, bn), out, add, bits, s)
        args = (*factors, describe(w, bn, columns), after, m, high, wide)
        grid = (triton.cdiv(m, bm),)
        own = {**flags, **t, "DEPTH": depth}
        launches.append(Launch(skip_walk, grid, args, flags, t, own))
    used = run_allowed(f"skip with input {m} {flags}", launches)
    rows = triton.cdiv(m, used.tile["BM"])
    return out, shorten(s[: rows * n].view(1, rows, n)), after


def fold_input_affine(weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """fold_back_input's q [K, K], and its scale and const as a scale and a shift."""
    n, k = weight.shape
    q, v = weight.new_empty((k, k)), floats(4, k, like=u)
    grid: Any = lambda t: (k // t["BK"], k // t["BK"])  # noqa: E731
    launcher.run(fold_input_rows, grid, (weight, u, q, v, n, k), INPUT_TILES)
    return q, v
