"""Triton kernels of an EfficientNet step: norm with SiLU, squeeze-excite, noise and update.

Images are [M, C] rows with C contiguous (channels_last) and C a multiple of eight, handed over as
C // 8 so that loads stay 16 bytes wide. Vectors of a norm lie in rows of one buffer: forward v is
mean, rstd, scale, shift; backward u is a, b, c, where the gradient of the norm's input is
a * gradient + b * input + c. Tables of sums by image are [3, SPLIT, N, C].

No pass over an image is needed for the sums of the norm before a squeeze-excite: with its gradient
g = (d * gate + dmean) * silu'(z), they follow from sums by image of d * silu', d * silu' * x (from
backward's pass for the gate) and of silu', silu' * x (from forward's pass for the mean).
"""
# ruff: noqa: PLR0913, PLR0917, SIM108  (kernels take sizes one by one)

import triton
import triton.language as tl
from depthwise_kernels import sigmoid

STATISTICS, SILU, KEEP, GATE, ADD = (tl.constexpr(i) for i in range(5))


@triton.jit
def silu_parts(x, scale, shift):
    """silu(z) and its derivative, where z is the normalised x."""
    z = x * scale + shift
    p = sigmoid(z)
    return z * p, p * (1 + z * (1 - p))


@triton.jit
def load_affine(v, c, C, okc):
    """A norm's scale and shift."""
    scale = tl.load(v + 2 * C + c, mask=okc, other=0.0)[None, :]
    return scale, tl.load(v + 3 * C + c, mask=okc, other=0.0)[None, :]


@triton.jit(do_not_specialize=["M", "PIXELS", "C8", "G"])
def reduce_rows(
    dy, x, v, keep, s, M, PIXELS, C8, G,
    KIND: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Partial sums s [2, G, C]. STATISTICS: x, x * x. SILU, KEEP: gradient, gradient * x."""
    C = C8 * 8
    c, g = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1)
    okc = c < C
    if KIND == SILU:
        scale, shift = load_affine(v, c, C, okc)
    total, product = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    for r in range(g * BM, M, G * BM):
        m = r + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
        value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
        if KIND == STATISTICS:
            d = value
        else:
            d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        if KIND == SILU:
            _, slope = silu_parts(value, scale, shift)
            d *= slope
        if KIND == KEEP:
            d *= tl.load(keep + m // PIXELS, mask=m < M, other=0.0)[:, None]
        total += d
        product += d * value
    tl.store(s + g * C + c, tl.sum(total, 0), mask=okc)
    tl.store(s + (G + g) * C + c, tl.sum(product, 0), mask=okc)


@triton.jit(do_not_specialize=["M", "PIXELS", "C8"])
def apply_rows(
    x, v, keep, gate, add, y, M, PIXELS, C8,
    KIND: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """SILU: silu(norm(x)). GATE: times gate. KEEP: norm(x) * keep. ADD: that + add."""
    C = C8 * 8
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    okc, n = c < C, m // PIXELS
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    scale, shift = load_affine(v, c, C, okc)
    if (KIND == SILU) | (KIND == GATE):
        value, _ = silu_parts(value, scale, shift)
    else:
        value = value * scale + shift
        value *= tl.load(keep + n, mask=m < M, other=0.0)[:, None]
    if KIND == GATE:
        value *= tl.load(gate + n[:, None] * C + c[None, :], mask=ok, other=0.0)
    if KIND == ADD:
        value += tl.load(add + o, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + o, value.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "PIXELS", "C8"])
def apply_rows_back(
    dy, x, v, u, keep, gate, dmean, dx, M, PIXELS, C8,
    KIND: tl.constexpr, HEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input. GATE with HEAD: there is dmean and no dy.

    STATISTICS: dy has been through SiLU.
    """
    C = C8 * 8
    m, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    okc, n = c < C, m // PIXELS
    o, ok = m[:, None] * C + c[None, :], (m < M)[:, None] & okc[None, :]
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    if HEAD:
        d = tl.load(dmean + n[:, None] * C + c[None, :], mask=ok, other=0.0)
    else:
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        if KIND == GATE:
            place = n[:, None] * C + c[None, :]
            d = d * tl.load(gate + place, mask=ok, other=0.0)
            d += tl.load(dmean + place, mask=ok, other=0.0)
    if KIND == KEEP:
        d *= tl.load(keep + n, mask=m < M, other=0.0)[:, None]
    if (KIND == SILU) | (KIND == GATE):
        scale, shift = load_affine(v, c, C, okc)
        _, slope = silu_parts(value, scale, shift)
        d *= slope
    d = d * tl.load(u + c, mask=okc, other=0.0)[None, :]
    d += value * tl.load(u + C + c, mask=okc, other=0.0)[None, :]
    d += tl.load(u + 2 * C + c, mask=okc, other=0.0)[None, :]
    tl.store(dx + o, d.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def image_terms(dy, x, o, ok, scale, shift, BACK: tl.constexpr):
    """What the pixels at o add to the three tables."""
    value = tl.load(x + o, mask=ok, other=0.0).to(tl.float32)
    act, slope = silu_parts(value, scale, shift)
    if BACK:
        d = tl.load(dy + o, mask=ok, other=0.0).to(tl.float32)
        act *= d
        slope *= d
    return act, slope, slope * value


@triton.jit(do_not_specialize=["N", "PIXELS", "C8", "SPLIT"])
def sum_images(
    dy, x, v, t, N, PIXELS, C8, SPLIT, BACK: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Tables of sums by image: silu(z), silu'(z), silu'(z) * x; BACK: each times dy."""
    C = C8 * 8
    unit, c = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    okc, rows = c < C, PIXELS // SPLIT
    first, last = unit * rows, (unit + 1) * rows
    s0, s1 = tl.zeros((BM, BC), tl.float32), tl.zeros((BM, BC), tl.float32)
    s2 = tl.zeros((BM, BC), tl.float32)
    scale, shift = load_affine(v, c, C, okc)
    whole = first + rows // BM * BM
    for r in range(first, whole, BM):
        o = (r + tl.arange(0, BM))[:, None] * C + c[None, :]
        t0, t1, t2 = image_terms(dy, x, o, okc[None, :], scale, shift, BACK)
        s0, s1, s2 = s0 + t0, s1 + t1, s2 + t2
    if whole < last:
        m = whole + tl.arange(0, BM)
        o, ok = m[:, None] * C + c[None, :], (m < last)[:, None] & okc[None, :]
        t0, t1, t2 = image_terms(dy, x, o, ok, scale, shift, BACK)
        s0 += tl.where(ok, t0, 0.0)
        s1 += tl.where(ok, t1, 0.0)
        s2 += tl.where(ok, t2, 0.0)
    place = ((unit % SPLIT) * N + unit // SPLIT) * C + c
    plane = SPLIT * N * C
    tl.store(t + place, tl.sum(s0, 0), mask=okc)
    tl.store(t + plane + place, tl.sum(s1, 0), mask=okc)
    tl.store(t + 2 * plane + place, tl.sum(s2, 0), mask=okc)


@triton.jit
def add_partials(s, c, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """The two sums of one norm from their partial rows."""
    first, second = tl.zeros((BG, BC), tl.float32), tl.zeros((BG, BC), tl.float32)
    for g0 in range(0, G, BG):
        g = g0 + tl.arange(0, BG)
        ok, place = (g < G)[:, None] & (c < C)[None, :], g[:, None] * C + c[None, :]
        first += tl.load(s + place, mask=ok, other=0.0)
        second += tl.load(s + G * C + place, mask=ok, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def store_back(v, u, dweight, dbias, c, okc, dbeta, product, M, C):
    """Backward vectors and gradients from the sums of the gradient and of gradient * x."""
    mean, rstd = tl.load(v + c, mask=okc, other=0.0), tl.load(v + C + c, mask=okc, other=0.0)
    scale = tl.load(v + 2 * C + c, mask=okc, other=0.0)
    dgamma = (product - mean * dbeta) * rstd
    slope = scale * rstd * dgamma / M
    tl.store(dweight + c, dgamma, mask=okc)
    tl.store(dbias + c, dbeta, mask=okc)
    tl.store(u + c, scale, mask=okc)
    tl.store(u + C + c, -slope, mask=okc)
    tl.store(u + 2 * C + c, slope * mean - scale * dbeta / M, mask=okc)


@triton.jit(do_not_specialize=["M", "C", "G"])
def finish_forward(
    s, weight, bias, running, v, M, C, G, eps, momentum, BG: tl.constexpr, BC: tl.constexpr
):
    """Forward vectors and running statistics from partial sums."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    okc = c < C
    total, square = add_partials(s, c, C, G, BG, BC)
    mean = total / M
    var = tl.maximum(square / M - mean * mean, 0.0)
    rstd = 1 / tl.sqrt(var + eps)
    scale = tl.load(weight + c, mask=okc, other=0.0) * rstd
    tl.store(v + c, mean, mask=okc)
    tl.store(v + C + c, rstd, mask=okc)
    tl.store(v + 2 * C + c, scale, mask=okc)
    tl.store(v + 3 * C + c, tl.load(bias + c, mask=okc, other=0.0) - mean * scale, mask=okc)
    old = tl.load(running + c, mask=okc, other=0.0)
    old_var = tl.load(running + C + c, mask=okc, other=0.0)
    tl.store(running + c, old + momentum * (mean - old), mask=okc)
    unbiased = var * (M / (M - 1))
    tl.store(running + C + c, old_var + momentum * (unbiased - old_var), mask=okc)


@triton.jit(do_not_specialize=["M", "C", "G"])
def finish_back(s, v, u, dweight, dbias, M, C, G, BG: tl.constexpr, BC: tl.constexpr):
    """Backward vectors and gradients from partial sums."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    dbeta, product = add_partials(s, c, C, G, BG, BC)
    store_back(v, u, dweight, dbias, c, c < C, dbeta, product, M, C)


@triton.jit(do_not_specialize=["R", "C"])
def sum_rows(p, out, R, C, BR: tl.constexpr, BC: tl.constexpr):
    """The sums of the columns of p [R, C]."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    total = tl.zeros((BR, BC), tl.float32)
    for r0 in range(0, R, BR):
        r = r0 + tl.arange(0, BR)
        ok = (r < R)[:, None] & (c < C)[None, :]
        total += tl.load(p + r[:, None] * C + c[None, :], mask=ok, other=0.0)
    tl.store(out + c, tl.sum(total, 0), mask=c < C)


# --- squeeze-excite ---


@triton.jit
def load_table(t, n, c, N, C, SPLIT: tl.constexpr):
    """One plane of a table for images n and channels c, its parts added up."""
    ok, place = (n < N)[:, None] & (c < C)[None, :], n[:, None] * C + c[None, :]
    value = tl.load(t + place, mask=ok, other=0.0)
    for part in tl.static_range(1, SPLIT):
        value += tl.load(t + part * N * C + place, mask=ok, other=0.0)
    return value


@triton.jit
def load_matrix(w, row, column, ROWS, COLUMNS):
    """A tile of a matrix as float32, zero beyond its edges."""
    ok = (row < ROWS)[:, None] & (column < COLUMNS)[None, :]
    value = tl.load(w + row[:, None] * COLUMNS + column[None, :], mask=ok, other=0.0)
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["N", "PIXELS", "R"])
def excite(
    t, w1, b1, w2, b2, mean, hidden, gate, N, PIXELS, C, R,
    SPLIT: tl.constexpr, RP: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """gate = sigmoid(w2 silu(w1 mean + b1) + b2) for BI images and BC channels."""
    n, r = tl.program_id(0) * BI + tl.arange(0, BI), tl.arange(0, RP)
    inner = tl.zeros((BI, RP), tl.float32)
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)
        value = load_table(t, n, k, N, C, SPLIT) / PIXELS
        if tl.program_id(1) == 0:
            ok = (n < N)[:, None] & (k < C)[None, :]
            tl.store(mean + n[:, None] * C + k[None, :], value, mask=ok)
        inner += tl.dot(value, tl.trans(load_matrix(w1, r, k, R, C)))
    inner += tl.load(b1 + r, mask=r < R, other=0.0)[None, :]
    if tl.program_id(1) == 0:
        ok = (n < N)[:, None] & (r < R)[None, :]
        tl.store(hidden + n[:, None] * R + r[None, :], inner, mask=ok)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    outer = tl.dot(inner * sigmoid(inner), tl.trans(load_matrix(w2, c, r, C, R)))
    outer += tl.load(b2 + c, mask=c < C, other=0.0)[None, :]
    ok = (n < N)[:, None] & (c < C)[None, :]
    tl.store(gate + n[:, None] * C + c[None, :], sigmoid(outer), mask=ok)


@triton.jit(do_not_specialize=["N", "PIXELS", "R"])
def excite_back(
    t, w1, w2, hidden, gate, dhidden, dmean, N, PIXELS, C, R,
    SPLIT: tl.constexpr, RP: tl.constexpr, BI: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradient of hidden, and dmean, a pixel's share of that of the mean."""
    n, r = tl.program_id(0) * BI + tl.arange(0, BI), tl.arange(0, RP)
    d = tl.zeros((BI, RP), tl.float32)
    for k0 in range(0, C, BK):
        k = k0 + tl.arange(0, BK)
        value = load_matrix(gate, n, k, N, C)
        value = load_table(t, n, k, N, C, SPLIT) * value * (1 - value)
        d += tl.dot(value, load_matrix(w2, k, r, C, R))
    inner = load_matrix(hidden, n, r, N, R)
    p = sigmoid(inner)
    d *= p * (1 + inner * (1 - p))
    if tl.program_id(1) == 0:
        ok = (n < N)[:, None] & (r < R)[None, :]
        tl.store(dhidden + n[:, None] * R + r[None, :], d, mask=ok)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = (n < N)[:, None] & (c < C)[None, :]
    share = tl.dot(d, load_matrix(w1, r, c, R, C)) / PIXELS
    tl.store(dmean + n[:, None] * C + c[None, :], share, mask=ok)


@triton.jit(do_not_specialize=["M", "N", "R"])
def excite_back_weights(
    t, forward, mean, hidden, gate, dhidden, dmean, dw1, db1, dw2, db2,
    v, u, dweight, dbias, M, N, C, R,
    SPLIT: tl.constexpr, EXCITE: tl.constexpr, RP: tl.constexpr, BI: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Weight gradients of a squeeze-excite and everything backward needs of the norm before it.

    Without EXCITE only the norm, whose gradient then is dmean * silu'(z): the head's.
    """
    c, r = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, RP)
    okc, plane = c < C, SPLIT * N * C
    d1, d2 = tl.zeros((BC, RP), tl.float32), tl.zeros((BC, RP), tl.float32)
    e1, e2 = tl.zeros((RP,), tl.float32), tl.zeros((BC,), tl.float32)
    total, product = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
    for n0 in range(0, N, BI):
        n = n0 + tl.arange(0, BI)
        share = load_matrix(dmean, n, c, N, C)
        total += tl.sum(share * load_table(forward + plane, n, c, N, C, SPLIT), 0)
        product += tl.sum(share * load_table(forward + 2 * plane, n, c, N, C, SPLIT), 0)
        if EXCITE:
            g = load_matrix(gate, n, c, N, C)
            total += tl.sum(g * load_table(t + plane, n, c, N, C, SPLIT), 0)
            product += tl.sum(g * load_table(t + 2 * plane, n, c, N, C, SPLIT), 0)
            outer = load_table(t, n, c, N, C, SPLIT) * g * (1 - g)
            inner, dinner = load_matrix(hidden, n, r, N, R), load_matrix(dhidden, n, r, N, R)
            d2 += tl.dot(tl.trans(outer), inner * sigmoid(inner))
            d1 += tl.dot(tl.trans(load_matrix(mean, n, c, N, C)), dinner)
            e2 += tl.sum(outer, 0)
            e1 += tl.sum(dinner, 0)
    store_back(v, u, dweight, dbias, c, okc, total, product, M, C)
    if EXCITE:
        ok = okc[:, None] & (r < R)[None, :]
        tl.store(dw1 + r[None, :] * C + c[:, None], d1, mask=ok)
        tl.store(dw2 + c[:, None] * R + r[None, :], d2, mask=ok)
        tl.store(db2 + c, e2, mask=okc)
        if tl.program_id(0) == 0:
            tl.store(db1 + r, e1, mask=r < R)


# --- noise and update ---


@triton.jit
def draw(step, rates, keep, drop, N, LAYERS, COUNT, rate, B: tl.constexpr):
    """Factors of drop-path keep [LAYERS, N] and of dropout drop [COUNT], from the step's number."""
    i, seed = tl.program_id(0) * B + tl.arange(0, B), tl.load(step)
    uniform = tl.rand(seed, i)
    path = i < LAYERS * N
    own = tl.load(rates + i // N, mask=path, other=0.0)
    tl.store(keep + i, tl.where(uniform < own, 0.0, 1 / (1 - own)), mask=path)
    j = i - LAYERS * N
    tl.store(drop + j, tl.where(uniform < rate, 0.0, 1 / (1 - rate)), mask=(j >= 0) & (j < COUNT))


@triton.jit
def update(p, m, sq, g, q, hyper, step, COUNT, DECAYED, RMS: tl.constexpr, B: tl.constexpr):
    """RMSprop with momentum, or SGD; the 16-bit copy; hyper is rate, 1 / loss scale, decay."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    ok = i < COUNT
    rate, unscale, decay = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    w = tl.load(p + i, mask=ok, other=0.0)
    d = tl.load(g + i, mask=ok, other=0.0) * unscale + tl.where(i < DECAYED, decay, 0.0) * w
    if RMS:
        square = tl.load(sq + i, mask=ok, other=0.0)
        square += 0.1 * (d * d - square)
        tl.store(sq + i, square, mask=ok)
        d /= tl.sqrt(square + 1e-3)
    d += 0.9 * tl.load(m + i, mask=ok, other=0.0)
    w -= rate * d
    tl.store(m + i, d, mask=ok)
    tl.store(p + i, w, mask=ok)
    tl.store(q + i, w.to(q.dtype.element_ty), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(step, tl.load(step) + 1)
