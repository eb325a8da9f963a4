"""The Triton kernels of `passes.kernels.split_attention`, which says how they compute and what they launch for what.

Code that runs once takes as long as it is long: a short attention's kernel is over before the instructions of another
part of it would have come from memory. So what nearly no tile needs is in branches of its own, up to what they write.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOW = tl.constexpr(2.0**-11)  # weight of the low plane
HIGH_ENOUGH = tl.constexpr(2.0**50)  # max|q| and max|k| stay below
LEAST_SCORE = tl.constexpr(127 - 40)  # biased exponent: nothing smaller than 2^-40 is scaled up all the way
LEAST_VALUE = tl.constexpr(127 - 98)  # the same for v, so that the inverse scale is a normal number


@triton.jit
def _bits(x):
    """|x| as its bits: as integers they are in the order of the magnitudes, and NaN is above all of them."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _magnitude(bits):
    """What has these bits, with Inf for NaN, which a maximum would lose."""
    return tl.minimum(bits, 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scales(largest, LEAST: tl.constexpr):
    """(s, 1/s): the power of two that brings `largest` into [2^14, 2^15), or less where it is below 2^(LEAST-127)."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, LEAST)
    scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _split(y):
    """Two fp16 parts: y = hi + lo * 2^-11 to 22 bits; |y| is below 2^15."""
    hi = y.to(tl.float16)
    return hi, ((y - hi.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def _split_whole(x):
    """(high, low, inverse scale, largest magnitude) of a block of queries or keys."""
    largest = _magnitude(tl.max(tl.max(_bits(x), 1), 0))
    scale, inverse = _scales(largest, LEAST_SCORE)
    hi, lo = _split(x * scale)
    return hi, lo, inverse, largest


@triton.jit
def _split_columns(values, N: tl.constexpr):
    """(high, low, inverse scales with the weights' 2^-14, 1 if the planes hold all) of a block of N values."""
    bits = _bits(values)
    largest = _magnitude(tl.max(bits, 0))
    least = (largest * 2.0**-28).to(tl.int32, bitcast=True)  # one less than what is small, so that 0 is not
    small = tl.sum(((bits - 1).to(tl.uint32) < (least - 1).to(tl.uint32)[None, :]).to(tl.int32), 0)
    held = (largest >= 2.0**-98) & (largest < float("inf")) & (small * 64 <= N)
    all_held = tl.min((held | (largest == 0)).to(tl.int32), 0)
    scale, inverse = _scales(largest, LEAST_VALUE)
    hi, lo = _split(values * scale[None, :])
    # 0 for a column of zeros, whose sums are 0 whatever they are multiplied by: it counts for nothing in _lost.
    return hi, lo, tl.where(largest == 0, 0.0, inverse * 2.0**-14), all_held


@triton.jit
def split_keys_and_values(
    k, v, planes, bound, k_inverse, v_inverse, heads, kv_len, head_dim, blocks, plane,
    skb, skh, skn, skd, svb, svh, svn, svd,
    N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Writes the planes of one block of keys and values of one head. Grid: heads of the batch * blocks.

    planes: fp16 [4, batch * heads, blocks * N, D], k's high and low ones and v's, padded with zeros; plane: elements of
    one. bound, k_inverse: fp32 [batch * heads, blocks]; v_inverse: [batch * heads, blocks, D], with the weights' 2^-14.
    bound is the largest |k|, Inf where the planes do not hold the block.
    """
    at = tl.program_id(0).to(tl.int64)
    head = at // blocks
    block = at % blocks
    rows = block * N + tl.arange(0, N)
    cols = tl.arange(0, D)
    mask = (rows < kv_len)[:, None] & (cols < head_dim)[None, :]
    k += (head // heads) * skb + (head % heads) * skh
    v += (head // heads) * svb + (head % heads) * svh
    keys = tl.load(k + rows[:, None] * skn + cols[None, :] * skd, mask=mask, other=0.0)
    values = tl.load(v + rows[:, None] * svn + cols[None, :] * svd, mask=mask, other=0.0)
    planes += at * N * D + tl.arange(0, N)[:, None] * D + cols[None, :]

    hi, lo, inverse, k_largest = _split_whole(keys)
    tl.store(planes, hi)
    tl.store(planes + plane, lo)
    tl.store(k_inverse + at, inverse)
    hi, lo, inverse, all_held = _split_columns(values, N)
    tl.store(planes + 2 * plane, hi)
    tl.store(planes + 3 * plane, lo)
    tl.store(v_inverse + at * D + cols, inverse)
    tl.store(bound + at, tl.where(all_held == 1, k_largest, float("inf")))


@triton.jit
def _visible(rows, keys, kv_len, CAUSAL: tl.constexpr):
    visible = (keys < kv_len)[None, :]
    if CAUSAL:
        visible = visible & (keys[None, :] <= rows[:, None])
    return visible


@triton.jit
def _rescaled(m, top, HAS_BIAS: tl.constexpr):
    """(maximum, what to subtract, what to multiply earlier sums by) of rows with scores up to `top` in this block."""
    m_new = tl.maximum(m, top)
    shift = m_new
    if HAS_BIAS:  # a row of which nothing is visible so far: its weights are 0, not exp2(-inf + inf)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, shift, tl.exp2(m - shift)


@triton.jit
def _lost(acc, v_most, kv_len):
    """1 if, in some row, what weights below 2^-28 have lost may show in every column that has values at all.

    v_most: the largest inverse scale of each column, with the weights' 2^-14: its largest |v| is below 2^29 of that.
    """
    seen = v_most * (kv_len * 8.0)  # 2^24 * 2^-50 * kv_len * max|v|
    tiny = (tl.abs(acc) < seen[None, :]) | (seen == 0)[None, :]
    rows = tl.max(tl.min(tiny.to(tl.int32), 1), 0)
    return tl.where(tl.max(seen, 0) > 0, rows, 0)


@triton.jit
def _blocks(
    acc, total, m, v_most, q_hi, q_lo, q_factor, planes, plane, k_inverse, v_inverse, bias, stride_bias_n,
    first, last, rows, q_len, kv_len,
    N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Blocks [first, last) from the planes. MASK: some of their keys are invisible, or past the end."""
    cols = tl.arange(0, D)
    inside = tl.arange(0, N)[:, None] * D + cols[None, :]
    for block in range(first, last):
        keys = block * N + tl.arange(0, N)
        at = planes + block * (N * D) + inside
        k_hi = tl.load(at)
        k_lo = tl.load(at + plane)
        s = tl.dot(q_lo, tl.trans(k_hi))
        s = tl.dot(q_hi, tl.trans(k_lo), s)
        s = tl.dot(q_hi, tl.trans(k_hi), s * LOW)
        factor = q_factor * tl.load(k_inverse + block)
        if HAS_BIAS:
            there = (rows < q_len)[:, None] & (keys < kv_len)[None, :]
            added = tl.load(bias + keys[None, :].to(tl.int64) * stride_bias_n, mask=there, other=0.0)
            s = (s * factor + added) * LOG2E
            factor = 1.0
        else:
            factor *= LOG2E
        if MASK:
            s = tl.where(_visible(rows, keys, kv_len, CAUSAL), s, float("-inf"))
        m, shift, alpha = _rescaled(m, tl.max(s, 1) * factor, HAS_BIAS)
        p = tl.exp2(s * factor - shift[:, None])
        total = total * alpha + tl.sum(p, 1)
        p_hi, p_lo = _split(p * 16384.0)
        v_hi = tl.load(at + 2 * plane)
        v_lo = tl.load(at + 3 * plane)
        o = tl.dot(p_lo, v_hi)
        o = tl.dot(p_hi, v_lo, o)
        o = tl.dot(p_hi, v_hi, o * LOW)
        inverse = tl.load(v_inverse + block * D + cols)
        acc = acc * alpha[:, None] + o * inverse[None, :]
        v_most = tl.maximum(v_most, inverse)
    return acc, total, m, v_most


@triton.jit
def _exact(
    acc, total, m, q, k, v, bias, stride_bias_n, last, rows, q_len, kv_len, head_dim, scale,
    sqm, sqd, skn, skd, svn, svd,
    M: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Keys [0, last) in IEEE fp32, 16 at a time: the operands of fp32 instructions come from registers."""
    cols = tl.arange(0, D)
    for start in range(0, last, 16):
        keys = start + tl.arange(0, 16).to(tl.int64)  # rows may lie 2^31 elements apart and more
        s = tl.zeros((M, 16), dtype=tl.float32)
        for d in range(0, head_dim, 16):
            part = d + tl.arange(0, 16)
            there = (rows < q_len)[:, None] & (part < head_dim)[None, :]
            q_part = tl.load(q + rows[:, None] * sqm + part[None, :] * sqd, mask=there, other=0.0)
            there = (keys < kv_len)[None, :] & (part < head_dim)[:, None]
            k_part = tl.load(k + keys[None, :] * skn + part[:, None] * skd, mask=there, other=0.0)
            s = tl.dot(q_part, k_part, s, input_precision="ieee")
        s *= scale
        if HAS_BIAS:
            there = (rows < q_len)[:, None] & (keys < kv_len)[None, :]
            s += tl.load(bias + keys[None, :] * stride_bias_n, mask=there, other=0.0)
        s = tl.where(_visible(rows, keys, kv_len, CAUSAL), s * LOG2E, float("-inf"))
        m, shift, alpha = _rescaled(m, tl.max(s, 1), HAS_BIAS)
        p = tl.exp2(s - shift[:, None])
        total = total * alpha + tl.sum(p, 1)
        there = (keys < kv_len)[:, None] & (cols < head_dim)[None, :]
        values = tl.load(v + keys[:, None] * svn + cols[None, :] * svd, mask=there, other=0.0)
        acc = tl.dot(p, values, acc * alpha[:, None], input_precision="ieee")
    return acc, total, m


@triton.jit
def _exactly(
    q, k, v, bias, stride_bias_n, last, rows, q_len, kv_len, head_dim, scale, sqm, sqd, skn, skd, svn, svd,
    M: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The tile's result from keys [0, last) in IEEE fp32."""
    acc = tl.zeros((M, D), dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    m = tl.full((M,), float("-inf"), dtype=tl.float32)
    acc, total, m = _exact(
        acc, total, m, q, k, v, bias, stride_bias_n, last, rows, q_len, kv_len, head_dim, scale,
        sqm, sqd, skn, skd, svn, svd, M, D, CAUSAL, HAS_BIAS,
    )  # fmt: skip
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _plain_planes(x):
    """(hi, lo, scale) of each row of x [M, L], and whether they are what `passes.split_products.split` makes of it:
    where no row has elements below 2^-28 of its largest, as nearly every row there is. int16, fp32 and a bool.
    """
    magnitude = tl.abs(x)
    largest = tl.max(_bits(x), 1)
    top = largest.to(tl.float32, bitcast=True)
    least = tl.min(tl.where(magnitude == 0, float("inf"), magnitude), 1)
    plain = ((top >= 2.0**-46) & (top < 2.0**75) & (least >= top * 2.0**-28)) | (largest == 0)
    scale = _row_scales(largest)
    hi, lo = _split(x * scale[:, None])
    every = tl.min(plain.to(tl.int32), 0) == 1
    return hi.to(tl.int16, bitcast=True), lo.to(tl.int16, bitcast=True), scale, every


@triton.jit
def _row_scales(largest):
    """The power of two that brings what has these bits into [2^14, 2^15); 1 for 0."""
    rebased = ((134 << 23) - (largest & 0x7F800000)) + (134 << 23)
    return tl.where(largest == 0, 0x3F800000, rebased).to(tl.float32, bitcast=True)


@triton.jit
def _mixed_planes(x):
    """(hi, lo, scale) of each row of any x [M, L], as `passes.split_products.split` makes them: int16 and fp32."""
    magnitude = tl.abs(x)
    largest = tl.max(_bits(x), 1)
    top = largest.to(tl.float32, bitcast=True)
    small = tl.sum(((magnitude < (top * 2.0**-28)[:, None]) & (magnitude != 0)).to(tl.int32), 1)
    held = ((top >= 2.0**-46) & (top < 2.0**75) & (small * 64 <= x.shape[1])) | (largest == 0)
    scale = tl.where(held, _row_scales(largest), 0.0)
    hi, lo = _split(x * tl.where(held, scale, 1.0)[:, None])
    high = hi.to(tl.int16, bitcast=True).to(tl.int32)
    low = lo.to(tl.int16, bitcast=True).to(tl.int32)
    raw = x.to(tl.int32, bitcast=True)
    # What is not zero must not become it: Inf times it is Inf.
    low = tl.where((((high | low) & 0x7FFF) == 0) & (magnitude != 0), ((raw >> 16) & 0x8000) | 1, low)
    return tl.where(held[:, None], high, raw >> 16).to(tl.int16), tl.where(held[:, None], low, raw).to(tl.int16), scale


@triton.jit
def _store_planes(hi, lo, scales, out, out_lo, out_scale, rows, q_len, mask):
    tl.store(out, hi, mask=mask)
    tl.store(out_lo, lo, mask=mask)
    tl.store(out_scale, scales, mask=rows < q_len)


@triton.jit
def _conclude(
    acc, total, exact, q, k, v, bias, stride_bias_n, last, rows, q_len, kv_len, head_dim, scale,
    sqm, sqd, skn, skd, svn, svd, out, out_lo, out_scale, mask,
    M: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write a tile of which the planes gave these sums; exact: not 0 where it has to be computed anew in IEEE fp32."""
    # A row of which nothing is visible is 0, as torch's efficient attention has it.
    result = acc * (1.0 / tl.where(total == 0, 1.0, total))[:, None]
    usual = exact == 0
    if SPLIT:
        hi, lo, scales, plain = _plain_planes(result)
        usual = usual & plain
    if usual:
        if SPLIT:
            _store_planes(hi, lo, scales, out, out_lo, out_scale, rows, q_len, mask)
        else:
            tl.store(out, result, mask=mask)
    else:
        if exact != 0:
            result = _exactly(
                q, k, v, bias, stride_bias_n, last, rows, q_len, kv_len, head_dim, scale,
                sqm, sqd, skn, skd, svn, svd, M, D, CAUSAL, HAS_BIAS,
            )  # fmt: skip
        if SPLIT:
            hi, lo, scales = _mixed_planes(result)
            _store_planes(hi, lo, scales, out, out_lo, out_scale, rows, q_len, mask)
        else:
            tl.store(out, result, mask=mask)


@triton.jit
def split_attention(
    q, k, v, bias, out, out_lo, out_scale, planes, bound, k_inverse, v_inverse,
    heads, q_len, kv_len, head_dim, blocks, plane, scale, limit,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sbb, sbh, sbm, sbn, sob, soh, som,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The output of one tile of M queries of one head. Grid: heads of the batch * tiles.

    limit: what max|q| * max|k| may be. EVEN: every key of every block is there and visible. SPLIT: out and out_lo are
    int16 planes, out_scale is fp32 [batch, q_len, heads]; head_dim is D.
    """
    tiles = tl.cdiv(q_len, M)
    tile = tl.program_id(0) % tiles
    if CAUSAL:  # the longest ones first
        tile = tiles - 1 - tile
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads
    within = head % heads
    rows = tile * M + tl.arange(0, M).to(tl.int64)
    cols = tl.arange(0, D)
    mask = (rows < q_len)[:, None] & (cols < head_dim)[None, :]
    q += batch * sqb + within * sqh
    x = tl.load(q + rows[:, None] * sqm + cols[None, :] * sqd, mask=mask, other=0.0)
    q_hi, q_lo, q_inverse, q_largest = _split_whole(x)
    if HAS_BIAS:
        bias += batch * sbb + within * sbh + rows[:, None] * sbm
    last = tl.cdiv(kv_len, N)
    full = kv_len // N  # blocks whose every key is there and visible to all M queries
    if CAUSAL:
        last = min(last, tl.cdiv(tile * M + M, N))
        full = min(full, (tile * M + 1) // N)
    bound += head * blocks
    worst = 0.0
    for at in range(0, last, 64):
        which = at + tl.arange(0, 64)
        worst = tl.maximum(worst, tl.max(tl.load(bound + which, mask=which < last, other=0.0), 0))

    acc = tl.zeros((M, D), dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    m = tl.full((M,), float("-inf"), dtype=tl.float32)
    exact = 1
    if (q_largest < HIGH_ENOUGH) & (worst < HIGH_ENOUGH) & (q_largest * worst <= limit):
        planes += head * blocks * (N * D)
        k_inverse += head * blocks
        v_inverse += head * blocks * D
        v_most = tl.zeros((D,), dtype=tl.float32)
        acc, total, m, v_most = _blocks(
            acc, total, m, v_most, q_hi, q_lo, q_inverse * scale, planes, plane, k_inverse, v_inverse, bias, sbn,
            0, full, rows, q_len, kv_len, N, D, CAUSAL, HAS_BIAS, False,
        )  # fmt: skip
        if not EVEN:
            acc, total, m, v_most = _blocks(
                acc, total, m, v_most, q_hi, q_lo, q_inverse * scale, planes, plane, k_inverse, v_inverse, bias, sbn,
                full, last, rows, q_len, kv_len, N, D, CAUSAL, HAS_BIAS, True,
            )  # fmt: skip
        # A row past the end, or of which nothing is visible, has lost nothing.
        exact = _lost(tl.where(((rows < q_len) & (total > 0))[:, None], acc, float("inf")), v_most, kv_len)
    at = batch * sob + within * soh + rows[:, None] * som + cols[None, :]
    _conclude(
        acc, total, exact, q, k + batch * skb + within * skh, v + batch * svb + within * svh, bias, sbn,
        min(last * N, kv_len), rows, q_len, kv_len, head_dim, scale, sqm, sqd, skn, skd, svn, svd,
        out + at, out_lo + at, out_scale + (batch * q_len + rows) * heads + within, mask,
        M, D, CAUSAL, HAS_BIAS, SPLIT,
    )  # fmt: skip


@triton.jit
def split_attention_at_once(
    q, k, v, bias, out, out_lo, out_scale, heads, q_len, kv_len, head_dim, scale, limit,
    sqb, sqh, sqm, sqd, skb, skh, skn, skd, svb, svh, svn, svd, sbb, sbh, sbm, sbn, sob, soh, som,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """`split_attention` where there are at most N keys: a tile splits them and the values itself, and all scores of a
    query are there at once. Grid: heads of the batch * tiles.
    """
    tiles = tl.cdiv(q_len, M)
    tile = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads
    within = head % heads
    rows = tile * M + tl.arange(0, M).to(tl.int64)
    keys = tl.arange(0, N).to(tl.int64)  # rows may lie 2^31 elements apart and more
    cols = tl.arange(0, D)
    mask = (rows < q_len)[:, None] & (cols < head_dim)[None, :]
    last = kv_len  # nothing of what no query of the tile sees, or a NaN there would come back as 0 * NaN
    if CAUSAL:
        last = min(last, tile * M + M)
    there = (keys < last)[:, None] & (cols < head_dim)[None, :]
    q += batch * sqb + within * sqh
    k += batch * skb + within * skh
    v += batch * svb + within * svh
    x = tl.load(q + rows[:, None] * sqm + cols[None, :] * sqd, mask=mask, other=0.0)
    own_keys = tl.load(k + keys[:, None] * skn + cols[None, :] * skd, mask=there, other=0.0)
    values = tl.load(v + keys[:, None] * svn + cols[None, :] * svd, mask=there, other=0.0)
    q_hi, q_lo, q_inverse, q_largest = _split_whole(x)
    k_hi, k_lo, k_inverse, k_largest = _split_whole(own_keys)
    v_hi, v_lo, inverse, held = _split_columns(values, N)
    s = tl.dot(q_lo, tl.trans(k_hi))
    s = tl.dot(q_hi, tl.trans(k_lo), s)
    s = tl.dot(q_hi, tl.trans(k_hi), s * LOW)
    factor = q_inverse * scale * k_inverse
    if HAS_BIAS:
        bias += batch * sbb + within * sbh + rows[:, None] * sbm
        seen = (rows < q_len)[:, None] & (keys < kv_len)[None, :]
        added = tl.load(bias + keys[None, :] * sbn, mask=seen, other=0.0)
        s = (s * factor + added) * LOG2E
        factor = 1.0
    else:
        factor *= LOG2E
    s = tl.where(_visible(rows, keys, kv_len, CAUSAL), s, float("-inf"))
    shift = tl.max(s, 1) * factor
    if HAS_BIAS:  # a row of which nothing is visible: its weights are 0, not exp2(-inf + inf)
        shift = tl.where(shift == float("-inf"), 0.0, shift)
    p = tl.exp2(s * factor - shift[:, None])
    total = tl.sum(p, 1)
    p_hi, p_lo = _split(p * 16384.0)
    o = tl.dot(p_lo, v_hi)
    o = tl.dot(p_hi, v_lo, o)
    o = tl.dot(p_hi, v_hi, o * LOW)
    acc = o * inverse[None, :]
    # A row past the end, or of which nothing is visible, has lost nothing.
    exact = _lost(tl.where(((rows < q_len) & (total > 0))[:, None], acc, float("inf")), inverse, kv_len)
    inside = (q_largest < HIGH_ENOUGH) & (k_largest < HIGH_ENOUGH) & (q_largest * k_largest <= limit) & (held == 1)
    at = batch * sob + within * soh + rows[:, None] * som + cols[None, :]
    _conclude(
        acc, total, tl.where(inside, exact, 1), q, k, v, bias, sbn,
        last, rows, q_len, kv_len, head_dim, scale, sqm, sqd, skn, skd, svn, svd,
        out + at, out_lo + at, out_scale + (batch * q_len + rows) * heads + within, mask,
        M, D, CAUSAL, HAS_BIAS, SPLIT,
    )  # fmt: skip
