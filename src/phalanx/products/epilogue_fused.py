"""The epilogue of the GEMM kernels, as jit functions: what is done to a result before the store.

The flags of all GEMM kernels, in the order they take effect:

PRE     1: beta * (a2 @ b2) is added to a @ b
AFFINE  1: row 0 of v is added; 2: scale and shift of a norm, rows 2 and 3 of v
ADD     1: a tensor of the result's shape is added; 2: one of a quarter of the pixels, to even ones
ACT     1: ReLU, whose mask is stored in bits; 3: masked by bits;
        4: zero where gate, normalised with gv, is not positive
SUMS    1: sums of the result's columns; 2: also of result * gate; 3: also of its squares
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: PLR0913, PLR0917, SIM108  (kernels take pointers and sizes one by one)
# A jit function has one return: code after a return is compiled even if it is never reached.

import triton
import triton.language as tl

from phalanx.kernels.norm_passes_fused import unpack_signs


@triton.jit
def load_added(add, m, n, M, N, H, W, ADD: tl.constexpr):
    """The addend of the pixels m: the same pixels, or for even ones those of a half-size image."""
    if ADD == 0:
        added = 0.0
    elif ADD == 1:
        added = tl.load(add + m[:, None] * N + n[None, :], mask=(m < M)[:, None], other=0.0)
    else:
        image, h, w = m // (H * W), (m // W) % H, m % W
        even = (m < M) & (h % 2 == 0) & (w % 2 == 0)
        source = (image * ((H + 1) // 2) + h // 2) * ((W + 1) // 2) + w // 2
        added = tl.load(add + source[:, None] * N + n[None, :], mask=even[:, None], other=0.0)
    return added


@triton.jit
def load_gate(gate, m, n, M, N, ACT: tl.constexpr):
    """The values whose norm decides what passes the gate; 0.0 if unused."""
    if ACT == 4:
        gates = tl.load(gate + m[:, None] * N + n[None, :], mask=(m < M)[:, None], other=0.0)
    else:
        gates = 0.0
    return gates


@triton.jit
def load_affine(v, n, N, AFFINE: tl.constexpr):
    """Scale and shift of the columns n; 0.0 where unused."""
    if AFFINE == 0:
        scale, shift = 0.0, 0.0
    elif AFFINE == 1:
        scale, shift = 0.0, tl.load(v + n)[None, :]
    else:
        scale, shift = tl.load(v + 2 * N + n)[None, :], tl.load(v + 3 * N + n)[None, :]
    return scale, shift


@triton.jit
def apply_affine(acc, scale, shift, added, AFFINE: tl.constexpr, ADD: tl.constexpr):
    """acc with scale, shift and addend applied."""
    if AFFINE == 1:
        acc += shift
    if AFFINE == 2:
        acc = acc * scale + shift
    if ADD > 0:
        acc += added.to(tl.float32)
    return acc


@triton.jit
def apply_gate(acc, gates, scale, shift, kept, ACT: tl.constexpr):
    """acc after ReLU or mask; kept: bits as 0 and 1."""
    if ACT == 1:
        acc = tl.maximum(acc, 0.0)
    if ACT == 3:
        acc = tl.where(kept > 0, acc, 0.0)
    if ACT == 4:
        acc = tl.where(gates.to(tl.float32) * scale + shift > 0, acc, 0.0)
    return acc


@triton.jit
def second_summand(acc, gates, SUMS: tl.constexpr):
    """The summand of the second row of sums."""
    if SUMS == 2:
        second = acc * gates.to(tl.float32)
    else:
        second = acc * acc
    return second


@triton.jit
def store_sums(s, acc, gates, row, rows, n, N, SUMS: tl.constexpr):
    """Store one of `rows` rows of partial sums: a tile's, whose acc is zero beyond row M."""
    if SUMS > 0:
        tl.store(s + row * N + n, tl.sum(acc, 0))
    if SUMS > 1:
        tl.store(s + (rows + row) * N + n, tl.sum(second_summand(acc, gates, SUMS), 0))


@triton.jit
def _pack_bits(kept, BM: tl.constexpr, BN: tl.constexpr):
    """Bits as phalanx.kernels.batch_norm.pack_signs lays them out."""
    kept = tl.reshape(kept.to(tl.int32), (BM, BN // 64, 8, 8))
    kept = tl.sum(kept << tl.arange(0, 8)[None, None, :, None], 2)
    return tl.reshape(kept, (BM, BN // 8)).to(tl.uint8)


@triton.jit
def load_bytes(bits, m, M, N, column, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The packed bits of a tile: BN columns from column * BN on."""
    if ACT == 3:
        byte = m[:, None] * (N // 8) + (column * (BN // 8) + tl.arange(0, BN // 8))[None, :]
        packed = tl.load(bits + byte, mask=(m < M)[:, None], other=0)
    else:
        packed = 0.0
    return packed


@triton.jit
def unpack_bytes(packed, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Packed bits as 0 and 1; 0.0 if unused."""
    if ACT == 3:
        kept = unpack_signs(packed, BM, BN)
    else:
        kept = 0.0
    return kept


@triton.jit
def store_bytes(
    bits, result, m, M, N, column, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Store the ReLU mask of a tile."""
    if ACT == 1:
        byte = m[:, None] * (N // 8) + (column * (BN // 8) + tl.arange(0, BN // 8))[None, :]
        tl.store(bits + byte, _pack_bits(result > 0, BM, BN), mask=(m < M)[:, None])


@triton.jit
def pack_words(kept, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    """_pack_bits with 64 columns in one 64-bit word.

    ROWS: sum first over the eight bits of a byte, which one thread of an accumulator holds; else
    first over the eight bytes, for a layout where a thread holds eight adjacent columns, as loaded.
    """
    kept = tl.reshape(kept.to(tl.int64), (BM, BN // 64, 8, 8))
    places = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 8)[None, :]
    kept = kept << places[None, None, :, :]
    return tl.sum(tl.sum(kept, 2), 2) if ROWS else tl.sum(tl.sum(kept, 3), 2)


@triton.jit
def unpack_words(words, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The bits packed by pack_words, as 0 and 1; 0.0 if unused."""
    if ACT == 3:
        places = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 8)[None, :]
        kept = (words[:, :, None, None] >> places[None, None, :, :]) & 1
        kept = tl.reshape(kept.to(tl.int32), (BM, BN))
    else:
        kept = 0.0
    return kept


@triton.jit
def find_words(bits, m, N, column, BN: tl.constexpr):
    """Pointers to the packed bits of a tile, 64 to a word."""
    words = column * (BN // 64) + tl.arange(0, BN // 64)
    return bits.to(tl.pointer_type(tl.int64)) + m[:, None] * (N // 64) + words[None, :]
