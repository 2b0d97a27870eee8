"""The Triton kernels: one attention kernel for every layout and length, and three small ones beside it.

    attend        dense, varlen and paged; prefill tiles, split decode, or both in one launch
    append        new keys and values into a paged cache: rotary, scale, 8-bit rounding
    merge         exact merge of partial results
    (the tables of block sizes are in tuning.yaml, everything about launching in launch.py)

Computes   out[i, h] = sum_j softmax_j(rule(scale * q[i, h] . k[j, h / G])) v[j, h / G]; SPEC.md's rules C-*.
Rows       The G query heads of one kv head are packed into rows: row r of a sequence is query r // G, head r % G. So decode
           fills matrix tiles (M is 16 at least), and a prefill tile loads K and V once for all G heads.
Tiles      BM rows by BN keys. Keys that no row of the tile sees are not visited; tiles that every row sees in full
           run without masks; only the diagonal, the window's edge and the last keys pay for them.
Schedule   A tile program owns BM rows of one kv head and walks all their keys. A split program owns a part of the keys
           (an "item"); which one is computed by every program for itself from the lengths on the device, so no host sync
           and no plan. The last item of a row block to arrive merges the parts, in the order of the keys: same bits always.
Memory     Offsets are 64-bit, but for pages whose cache 31 bits count in pieces of 16 bytes. Keys outside a sequence, or outside
           what its window sees, are never loaded (they may hold NaN), whatever the table says of them; entries past the last key
           are not read.
Numerics   Accumulates in float32. p = exp2(s * c - m * c) is one fused multiply-add an element, m the unscaled maximum. With
           |m * c| >= 2^24 the rounding of m * c could make exp2 overflow; such rows take a power of two near c instead, by
           which products are exact: logits that far apart leave one key anyway. float32 inputs use float32 arithmetic (IEEE).
Cost       Decode is bound by the bytes of K and V; prefill by the matrix units and exp2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


# ---- 8-bit floats, by arithmetic: for hardware without a conversion, and for stores on all of it


@triton.jit
def decode_fp8(x, KIND: tl.constexpr):
    """uint8 bit patterns to float32; exact."""
    x = x.to(tl.int32)
    sign = (x & 0x80) << 24
    body = x & 0x7F
    if KIND == "e4m3fn":
        y = (sign | (body << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: exponent bias 127 - 7
        return tl.where(body == 0x7F, float("nan"), y)
    elif KIND == "e5m2":
        y = (sign | (body << 21)).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^112
        y = tl.where(body == 0x7C, tl.where(sign == 0, float("inf"), float("-inf")), y)
        return tl.where(body > 0x7C, float("nan"), y)
    elif KIND == "e4m3fnuz":
        y = (sign | (body << 20)).to(tl.float32, bitcast=True) * 6.64613997892458e35  # 2^119
        return tl.where(x == 0x80, float("nan"), y)
    else:
        tl.static_assert(KIND == "e5m2fnuz")
        y = (sign | (body << 21)).to(tl.float32, bitcast=True) * 2.596148429267414e33  # 2^111
        return tl.where(x == 0x80, float("nan"), y)


@triton.jit
def encode_fp8(x, KIND: tl.constexpr):
    """float32 to uint8 bit patterns: round to nearest even, saturate, NaN stays NaN."""
    MANTISSA: tl.constexpr = 3 if (KIND == "e4m3fn" or KIND == "e4m3fnuz") else 2
    BIAS: tl.constexpr = 7 if KIND == "e4m3fn" else (15 if KIND == "e5m2" else (8 if KIND == "e4m3fnuz" else 16))
    LARGEST: tl.constexpr = 448.0 if KIND == "e4m3fn" else (240.0 if KIND == "e4m3fnuz" else 57344.0)
    UNSIGNED_ZERO: tl.constexpr = KIND == "e4m3fnuz" or KIND == "e5m2fnuz"
    SHIFT: tl.constexpr = 23 - MANTISSA
    EXPONENT_GAP: tl.constexpr = (127 - BIAS) << MANTISSA
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    UNITS: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)  # 1 / the smallest subnormal
    a = tl.minimum(tl.abs(x), LARGEST)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - EXPONENT_GAP
    tiny = ((a * UNITS + 8388608.0) - 8388608.0).to(tl.int32)  # adding 2^23 rounds to an integer, to nearest even
    code = tl.where(a < SMALLEST_NORMAL, tiny, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    if UNSIGNED_ZERO:
        sign = tl.where(code == 0, 0, sign)
        return tl.where(x != x, 0x80, code | sign).to(tl.uint8)
    else:
        return tl.where(x != x, 0x7F, code | sign).to(tl.uint8)


@triton.jit
def widened(x, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of K or V in the dtype that the matrix units take."""
    if FORMAT == "same":
        return x
    elif FORMAT == "native":
        return x.to(DTYPE)
    else:
        return decode_fp8(x, FORMAT).to(DTYPE)


@triton.jit
def narrow(x, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """float32 to the dtype of q, to nearest even; by hand for bfloat16 in the interpreter, which would cut the bits off."""
    if BY_HAND and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def negative(x, IEEE: tl.constexpr):
    """-x; through float32 where bfloat16 is the interpreter's, which takes its bits for a number."""
    if IEEE:
        return narrow(-x.to(tl.float32), x.dtype, True)
    else:
        return -x


@triton.jit
def product(a, b, acc, IEEE: tl.constexpr):
    """acc + a @ b in float32. IEEE: no TF32, and the only way that is right for bfloat16 in the interpreter."""
    if IEEE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def tanh(x):
    """Exact at both ends: no overflow for large |x|, a series where 1 - 2 / (e + 1) would cancel."""
    y = x * x
    series = x * (1.0 + y * (-0.3333333333 + y * (0.1333333333 + y * (-0.05396825397 + y * 0.02186948854))))
    return tl.where(y < 0.09, series, 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0))


# ---- rotary


@triton.jit
def rotated(x_ptr, x_at, dims, mask, position, cos, sin, cos_s, D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows x_ptr[x_at, dims] in float32, their first ROTARY dims turned by each row's position."""
    x = tl.load(x_ptr + x_at[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    HALF: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner = dims ^ 1
        angle = dims // 2
        negative = (dims % 2) == 0
    else:
        partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
        angle = tl.where(dims < HALF, dims, dims - HALF)
        negative = dims < HALF
    turns = dims < ROTARY
    m = mask & turns[None, :]
    y = tl.load(x_ptr + x_at[:, None] + partner[None, :], mask=m, other=0.0).to(tl.float32)
    at = tl.maximum(position, 0)[:, None] * cos_s + angle[None, :]
    c = tl.load(cos + at, mask=m, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=m, other=0.0).to(tl.float32)
    return x * c + tl.where(negative, -1.0, 1.0)[None, :] * y * s


# ---- addresses of keys


@triton.jit
def pages_of(table, n, cols, lo, hi, page_size, PAGE: tl.constexpr, ENDS: tl.constexpr):
    """Page ids of keys n + cols; one id if a tile lies in one page (PAGE -1). ENDS: what of keys outside lo .. hi: "masked", their
    entries are not read; "last", those past hi take the last key's, and none lies before lo; "none", there are none."""
    if PAGE == -1:
        at = n // page_size
        there = n < hi
    else:
        if PAGE > 0:
            at = n // PAGE + cols // PAGE
        else:
            at = (n + cols) // page_size
        there = (n + cols >= lo) & (n + cols < hi)
    if ENDS == "masked":
        return tl.load(table + at, mask=there, other=0)
    elif ENDS == "last":
        return tl.load(table + tl.minimum(at, (hi - 1) // page_size))
    else:
        return tl.load(table + at)


@triton.jit
def key_rows(base, pages, n, cols, page_stride, row_stride, page_size, PAGED: tl.constexpr, PAGE: tl.constexpr,
             WIDE: tl.constexpr, NEAR: tl.constexpr):
    """Pointers to the rows of keys n + cols; n is a multiple of BN. WIDE: offsets inside a tile need 64 bits too. NEAR: rows start at
    multiples of 16 bytes, of which 31 bits count all: 32-bit products, a third of the instructions."""
    if PAGED and PAGE != -1:
        if PAGE > 0:
            inside = cols % PAGE
        else:
            inside = (n + cols) % page_size
        if NEAR:
            UNIT: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
            pieces = pages.to(tl.int32) * (page_stride // UNIT).to(tl.int32) + inside * (row_stride // UNIT).to(tl.int32)
            return base + pieces.to(tl.int64) * UNIT
        else:
            return base + (pages.to(tl.int64) * page_stride + inside * row_stride)
    else:
        if PAGED:
            start = base + (pages.to(tl.int64) * page_stride + (n % page_size) * row_stride)
        else:
            start = base + n * row_stride
        if WIDE:
            return start + cols * row_stride
        else:
            return start + cols * row_stride.to(tl.int32)


# ---- the walk over keys


@triton.jit
def load_rows(row, inside, dims, D: tl.constexpr, PADDED: tl.constexpr, MASKS: tl.constexpr):
    """A tile of K or V; rows outside the keys at hand, and padded dims, are zero and are not read."""
    at = row[:, None] + dims[None, :]
    if MASKS != "never" and PADDED:
        return tl.load(at, mask=inside[:, None] & (dims[None, :] < D), other=0.0)
    elif MASKS != "never":
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif PADDED:
        return tl.load(at, mask=dims[None, :] < D, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def masked(s, j, row_lo, row_hi, LEFT: tl.constexpr):
    """Scores, -inf where row does not see key j."""
    ok = j[None, :] < row_hi[:, None]
    if LEFT:
        ok = ok & (j[None, :] >= row_lo[:, None])
    return tl.where(ok, s, float("-inf"))


@triton.jit
def step(
    acc, den, top, q, q2, k_row, v_row, k_desc, v_desc, k2_desc, k_first, k_at, k_col, v_col, pos, row_lo, row_hi, n, cols, lo, hi, edge, c,
    cap, slope, bias_row, bias_k, row_ok,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BD2: tl.constexpr, BDV: tl.constexpr, LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, FORMAT: tl.constexpr, V_IN_K: tl.constexpr, IEEE: tl.constexpr, DEFER: tl.constexpr,
    MASKS: tl.constexpr, BOXES: tl.constexpr,
):
    """One tile of keys: S = Q K^T, rules, online softmax, O += P V. MASKS: "never" for tiles that every row sees in full,
    "always", or "edges": scores are masked if `edge` is true. BOXES: descriptors have an axis of batch entries or pages, k_first, and rows
    of it from k_at on."""
    dims = tl.arange(0, BD)
    v_dims = tl.arange(0, BDV)
    j = n + cols
    inside = (j >= lo) & (j < hi)
    if k_desc is not None and BOXES:  # rows past the end read as zero
        k = tl.reshape(k_desc.load([k_first, k_at, k_col]), (cols.shape[0], BD))
    elif k_desc is not None and MASKS == "never":
        k = k_desc.load([k_first + n, k_col])
    else:
        k = widened(load_rows(k_row, inside, dims, D, BD > D, MASKS), FORMAT, q.dtype)
    s = product(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32), IEEE)
    if BD2 > 0:
        if k2_desc is not None and BOXES:
            k2 = tl.reshape(k2_desc.load([k_first, k_at, k_col + BD]), (cols.shape[0], BD2))
        else:
            k2 = widened(load_rows(k_row, inside, BD + tl.arange(0, BD2), D, BD + BD2 > D, MASKS), FORMAT, q.dtype)
        s = product(q2, tl.trans(k2), s, IEEE)

    if SOFTCAP or ALIBI or BIAS != "none":
        s = s * c
        if SOFTCAP:
            s = cap * tanh(s / cap)
        if ALIBI:
            s = s - slope[:, None] * tl.abs(pos[:, None] - j[None, :]).to(tl.float32)
        if BIAS != "none":
            if BIAS_ROWS:  # by 16 bytes, all of which are the row's
                TOGETHER: tl.constexpr = 128 // bias_row.dtype.element_ty.primitive_bitwidth
                b = tl.load(bias_row[:, None] + j[None, :], mask=row_ok[:, None] & (j // TOGETHER * TOGETHER < hi)[None, :], other=0)
            else:
                b = tl.load(bias_row[:, None] + j[None, :] * bias_k, mask=row_ok[:, None] & inside[None, :], other=0)
            if BIAS == "bool":
                s = tl.where(b != 0, s, float("-inf"))
            else:
                s = s + b.to(tl.float32)
    if MASKS == "always":
        s = masked(s, j, row_lo, row_hi, LEFT)
    elif MASKS == "edges":
        if edge:
            s = masked(s, j, row_lo, row_hi, LEFT)
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    if SOFTCAP or ALIBI or BIAS != "none":
        p = tl.exp2((s - base[:, None]) * LOG2E)
        shrink = tl.exp2((top - base) * LOG2E)
    else:  # see Numerics
        c2 = c * LOG2E
        factor = tl.where(tl.abs(base * c2) < 16777216.0, c2, tl.exp2(tl.floor(tl.log2(c2))))
        p = tl.exp2(tl.fma(s, tl.broadcast_to(factor[:, None], s.shape), tl.broadcast_to(-(base * factor)[:, None], s.shape)))
        shrink = tl.exp2((top - base) * factor)
    if DEFER:  # summed over keys once, at the end: saves an exchange between warps per tile
        den = den * shrink[:, None] + p
    else:
        den = den * shrink + tl.sum(p, 1)
    if V_IN_K:
        v = k
    else:
        if v_desc is not None and BOXES:
            v = tl.reshape(v_desc.load([k_first, k_at, v_col]), (cols.shape[0], BDV))
        elif v_desc is not None and MASKS == "never":
            v = v_desc.load([k_first + n, v_col])
        else:
            v = widened(load_rows(v_row, inside, v_dims, DV, BDV > DV, MASKS), FORMAT, q.dtype)
    acc = product(narrow(p, q.dtype, IEEE), v, acc * shrink[:, None], IEEE)
    return acc, den, new_top


@triton.jit
def walk(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, k2_desc, k_first, k_col, v_col, table, bias, alibi, cos, sin, q_s, q_h, k_page, k_s, v_page, v_s,
    bias_h, bias_q, bias_k, cos_s, page_size,
    c, cap, window_left, window_right, row0, kvh, len_q, len_k, lo, hi,
    G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BD2: tl.constexpr,
    BDV: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, NEAR: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr, V_IN_K: tl.constexpr, IEEE: tl.constexpr, DEFER: tl.constexpr, LOOPS: tl.constexpr,
    FLIP: tl.constexpr, DENSE: tl.constexpr,
):
    """Rows row0 .. row0 + BM of one kv head over keys lo .. hi. Pointers stand at the sequence (bias: at its batch entry),
    k_ptr and v_ptr at the kv head too. Returns acc, den, top: sum p v, sum p, and the largest logit."""
    rows = row0 + tl.arange(0, BM)
    cols = tl.arange(0, BN)
    i = rows // G
    head = kvh * G + rows % G
    row_ok = rows < len_q * G
    shift = len_k - len_q
    pos = i + shift

    dims = tl.arange(0, BD)
    q_at = i * q_s + head * q_h
    mask = row_ok[:, None] & (dims[None, :] < D)
    if ROTARY > 0:
        q = narrow(rotated(q_ptr, q_at, dims, mask, pos, cos, sin, cos_s, D, ROTARY, INTERLEAVED), q_ptr.dtype.element_ty, IEEE)
    else:
        q = tl.load(q_ptr + (q_at[:, None] + dims[None, :]), mask=mask, other=0.0)
    q2 = q
    if BD2 > 0:
        dims2 = BD + tl.arange(0, BD2)
        mask2 = row_ok[:, None] & (dims2[None, :] < D)
        if ROTARY > 0:
            q2 = narrow(rotated(q_ptr, q_at, dims2, mask2, pos, cos, sin, cos_s, D, ROTARY, INTERLEAVED), q_ptr.dtype.element_ty,
                        IEEE)
        else:
            q2 = tl.load(q_ptr + (q_at[:, None] + dims2[None, :]), mask=mask2, other=0.0)

    PLAIN: tl.constexpr = not (SOFTCAP or ALIBI or BIAS != "none")
    if PLAIN:  # the maximum is taken before scaling, which needs a positive scale: its sign goes into q
        if FLIP:  # a variant of its own: a q that is more than a load would be fed to wgmma from registers, tile by tile
            if c < 0:
                q = negative(q, IEEE)
                q2 = negative(q2, IEEE)
        c = tl.maximum(tl.abs(c), 1e-30)  # a scale of 0: every visible key weighs the same, -inf stays -inf
    slope = rows.to(tl.float32)
    if ALIBI:
        slope = tl.load(alibi + head, mask=row_ok, other=0.0)
    bias_row = i  # unused unless there is a bias
    if BIAS != "none":
        bias_row = bias + (head * bias_h + i * bias_q)

    # what the rows see, what all of them see
    first = row0 // G
    last = (tl.minimum(row0 + BM, len_q * G) - 1) // G
    row_hi = pos * 0 + hi
    row_lo = pos * 0 + lo
    full_lo = lo
    if RIGHT:
        row_hi = tl.minimum(row_hi, pos + (window_right + 1))
        full_hi = tl.minimum(hi, first + shift + window_right + 1)
        hi = tl.minimum(hi, last + shift + window_right + 1)
    else:
        full_hi = hi
    if LEFT:
        row_lo = tl.maximum(row_lo, pos - window_left)
        full_lo = tl.maximum(lo, last + shift - window_left)
        lo = tl.maximum(lo, first + shift - window_left)
    start = lo // BN * BN
    end = tl.maximum(hi, start)
    full_start = tl.cdiv(full_lo, BN) * BN  # tiles in full_start .. full_end need no mask
    full_end = full_hi // BN * BN
    if LOOPS == "two":
        if full_end <= full_start:
            full_start = start
            full_end = start

    acc = tl.zeros([BM, BDV], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    if DEFER:
        den = tl.zeros([BM, BN], tl.float32)
    else:
        den = tl.zeros([BM], tl.float32)

    # LOOPS "edges": one loop, and a branch around the masks. Where matrix instructions are asynchronous (wgmma), a branch between
    # them makes the assembler run them one by one; there, "two": full tiles have a loop of their own; or "always": one loop that
    # masks every tile, for short sequences, where draining the pipeline of loads between two loops would cost more. Which loop comes
    # first decides whether ptxas sees the accumulator copied between them; if so, it runs matrix instructions one by one.
    for part in tl.static_range(2):
        if (part == 0) == PAGED:
            if LOOPS == "two":
                first_n, last_n = full_start, full_end
            else:
                first_n, last_n = start, end
            pages = cols
            if PAGED:  # looked up one tile ahead, so that no load of keys waits for its page
                pages = pages_of(table, first_n, cols, lo, tl.minimum(hi, last_n), page_size, PAGE, "masked")
            for n in tl.range(first_n, last_n, BN):
                k_row = key_rows(k_ptr, pages, n, cols, k_page, k_s, page_size, PAGED, PAGE, WIDE, NEAR)
                v_row = key_rows(v_ptr, pages, n, cols, v_page, v_s, page_size, PAGED, PAGE, WIDE, NEAR)
                place = k_first
                k_at = n
                if PAGED and PAGE == -1:  # a tile lies in one page
                    place = pages.to(tl.int32)
                    k_at = n % page_size
                if PAGED and LOOPS == "two":  # the last tile looks its own up again
                    pages = pages_of(table, tl.minimum(n + BN, last_n - BN), cols, lo, hi, page_size, PAGE, "none")
                elif PAGED:
                    pages = pages_of(table, n + BN, cols, lo, hi, page_size, PAGE, "last")
                edge = (n < full_start) | (n >= full_end)
                acc, den, top = step(
                    acc, den, top, q, q2, k_row, v_row, k_desc, v_desc, k2_desc, place, k_at, k_col, v_col, pos, row_lo, row_hi, n, cols, lo,
                    hi, edge, c, cap, slope, bias_row, bias_k, row_ok,
                    D, DV, BD, BD2, BDV, LEFT, SOFTCAP, ALIBI, BIAS, BIAS_ROWS, FORMAT, V_IN_K, IEEE, DEFER,
                    "never" if LOOPS == "two" else LOOPS, DENSE or (PAGED and LOOPS == "two"))
        elif LOOPS == "two":
            before = (full_start - start) // BN
            tiles = before + (tl.maximum(end - full_end, 0) + BN - 1) // BN
            for t in tl.range(0, tiles, num_stages=1 if PAGED else 2):  # few; more stages only take shared memory and registers
                n = start + t * BN
                if t >= before:
                    n = full_end + (t - before) * BN
                if PAGED:
                    here = pages_of(table, n, cols, lo, hi, page_size, PAGE, "masked")
                else:
                    here = cols
                k_row = key_rows(k_ptr, here, n, cols, k_page, k_s, page_size, PAGED, PAGE, WIDE, NEAR)
                v_row = key_rows(v_ptr, here, n, cols, v_page, v_s, page_size, PAGED, PAGE, WIDE, NEAR)
                acc, den, top = step(
                    acc, den, top, q, q2, k_row, v_row, k_desc, v_desc, k2_desc, k_first, n, k_col, v_col, pos, row_lo, row_hi, n, cols, lo, hi,
                    True, c, cap, slope, bias_row, bias_k, row_ok,
                    D, DV, BD, BD2, BDV, LEFT, SOFTCAP, ALIBI, BIAS, BIAS_ROWS, FORMAT, V_IN_K, IEEE, DEFER, "always", DENSE)

    if DEFER:
        den = tl.sum(den, 1)
    if PLAIN:
        top = tl.where(top == float("-inf"), top, top * c)
    return acc, den, top


@triton.jit
def finish(acc, den, top, out, lse, sinks, v_factor, o_s, o_h, row0, kvh, len_q, heads_q, lse_rows, G: tl.constexpr, R: tl.constexpr,
           DV: tl.constexpr, BDV: tl.constexpr, BY_HAND: tl.constexpr, LSE_FORM: tl.constexpr):
    """Sink, division, stores. out stands at the sequence, lse at its first row: in form 0 heads are neighbours, else rows are,
    lse_rows of a head, and in form 2 a row that saw no key says +inf."""
    rows = row0 + tl.arange(0, R)
    dims = tl.arange(0, BDV)
    i = rows // G
    head = kvh * G + rows % G
    ok = rows < len_q * G
    alone = den == 0.0  # the row saw no key
    if sinks is not None:
        sink = tl.load(sinks + head, mask=ok, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(top, sink)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2((top - base) * LOG2E)
        acc = acc * shrink[:, None]
        den = den * shrink + tl.exp2((sink - base) * LOG2E)
        top = largest
    acc = acc * (v_factor / tl.where(den == 0.0, 1.0, den))[:, None]
    o_at = out + (i * o_s + head * o_h)[:, None] + dims[None, :]
    tl.store(o_at, narrow(acc, out.dtype.element_ty, BY_HAND), mask=ok[:, None] & (dims[None, :] < DV))
    if lse is not None:
        value = top + tl.log2(tl.where(den == 0.0, 1.0, den)) * LN2
        if sinks is not None:
            value = tl.where(alone, sink, value)
        else:
            value = tl.where(alone, float("inf") if LSE_FORM == 2 else float("-inf"), value)
        if LSE_FORM == 0:
            at = i * heads_q + head
        else:
            at = head * lse_rows.to(tl.int64) + i
        tl.store(lse + at, value, mask=ok)


@triton.jit
def tiles_a_part(tiles, total, budget, slots, merging):
    """Of so many tiles, where all pairs have `total`: as many parts as there are places, but no more than merging them is worth. Where c tiles
    are a part's, the parts take c and their merge by one program tiles / c * merging / 64, which together is least where c is the root of
    tiles * merging / 64."""
    even = tl.maximum(tl.cdiv(total, budget), tl.minimum(tl.cdiv(total, slots), 32))
    return tl.maximum(even, tl.sqrt(tiles.to(tl.float32) * merging.to(tl.float32) * 0.015625).to(tl.int32))


@triton.jit
def program(
    pid,
    q, k, v, k_desc, v_desc, k2_desc, out, lse, table, kv_lens, cu_q, cu_k, bias, alibi, sinks, k_scale, v_scale, cos, sin, parts, stats,
    counters,
    scale, softcap, v_factor, window_left, window_right,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h, table_b, bias_b, bias_h, bias_q, bias_k, alibi_b,
    ks_b, ks_h, vs_b, vs_h, cos_s, batch, heads_kv, len_q, len_k, page_size, programs, group, slots, budget, fixed_chunk,
    fixed_splits, stripe, before, lse_rows, merging,
    SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SKIP_TO: tl.constexpr, TAKE_TO: tl.constexpr, BB: tl.constexpr,
    SEARCH: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BD2: tl.constexpr, BDV: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr, NEAR: tl.constexpr, ALIKE: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr, V_IN_K: tl.constexpr,
    IEEE: tl.constexpr, DEFER: tl.constexpr, LOOPS: tl.constexpr, FLIP: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr, LSE_FORM: tl.constexpr,
):
    """One tile program or one split program. Of ragged sequences, tile programs skip those of SKIP_TO rows or fewer, and
    split programs take those of TAKE_TO rows or fewer (0: all)."""
    # 64 bits whatever the launcher made of small numbers (the interpreter makes int32 of them)
    q_b, q_s, q_h = q_b.to(tl.int64), q_s.to(tl.int64), q_h.to(tl.int64)
    k_b, k_s, k_h = k_b.to(tl.int64), k_s.to(tl.int64), k_h.to(tl.int64)
    v_b, v_s, v_h = v_b.to(tl.int64), v_s.to(tl.int64), v_h.to(tl.int64)
    if ALIKE:  # K and V have the same strides: one offset of a row serves both
        v_b, v_s, v_h = k_b, k_s, k_h
    o_b, o_s, o_h = o_b.to(tl.int64), o_s.to(tl.int64), o_h.to(tl.int64)
    table_b, cos_s = table_b.to(tl.int64), cos_s.to(tl.int64)
    bias_b, bias_h, bias_q, bias_k = bias_b.to(tl.int64), bias_h.to(tl.int64), bias_q.to(tl.int64), bias_k.to(tl.int64)

    # -- which rows, which keys
    start = 0  # item number of the sequence's first item
    pairs = 0  # row blocks x kv heads of the sequence
    splits = 1
    live = pid >= 0
    if SPLIT:
        if BB > 0:  # lengths differ: every program solves for the common chunk of keys, then finds its own item
            bs = tl.arange(0, BB)
            valid = bs < batch
            lq = tl.zeros([BB], tl.int32) + len_q
            if cu_q is not None:
                lq = (tl.load(cu_q + bs + 1, mask=valid, other=0) - tl.load(cu_q + bs, mask=valid, other=0)).to(tl.int32)
            lk = tl.zeros([BB], tl.int32) + len_k
            if kv_lens is not None:
                lk = tl.minimum(tl.maximum(tl.load(kv_lens + bs, mask=valid, other=0).to(tl.int32) + before * lq, 0), len_k)
            elif cu_k is not None:
                lk = (tl.load(cu_k + bs + 1, mask=valid, other=0) - tl.load(cu_k + bs, mask=valid, other=0)).to(tl.int32)
                if PAGED:
                    lk = tl.minimum(tl.maximum(lk, 0), len_k)
            row_count = tl.where(valid, lq * G, 0)
            if TAKE_TO > 0:
                row_count = tl.where(row_count <= TAKE_TO, row_count, 0)
            first_key = tl.zeros([BB], tl.int32)
            if LEFT:
                first_key = tl.maximum(lk - lq - window_left, 0) // BN * BN
            tiles = (tl.maximum(lk - first_key, 0) + BN - 1) // BN
            pair_counts = (row_count + BM - 1) // BM * heads_kv
            if fixed_chunk > 0:
                chunk = tl.zeros([BB], tl.int32) + fixed_chunk
            elif fixed_splits > 0:
                chunk = (tiles + fixed_splits - 1) // fixed_splits
            else:
                chunk = tiles_a_part(tiles, tl.sum(pair_counts * tiles), budget, slots, merging)
            chunk = tl.maximum(chunk, 1)
            counts = tl.maximum((tiles + chunk - 1) // chunk, 1)
            items = pair_counts * counts
            ends = tl.cumsum(items, 0)
            live = pid < tl.max(ends, 0)
            b = tl.sum((ends <= pid).to(tl.int32), 0)
            start = tl.max(tl.where(ends <= pid, ends, 0), 0)
            here = bs == b
            splits = tl.sum(tl.where(here, counts, 0), 0)
            pairs = tl.sum(tl.where(here, pair_counts, 0), 0)
            if cu_q is not None:
                len_q = tl.sum(tl.where(here, lq, 0), 0)
            len_k = tl.sum(tl.where(here, lk, 0), 0)
        else:  # equal lengths, or too many sequences to search: then unsplit
            if TAKE_TO > 0:
                pairs = heads_kv  # those that it takes are one block of rows
            else:
                pairs = (len_q * G + BM - 1) // BM * heads_kv
            if kv_lens is None and cu_k is None and cu_q is None:
                first_key = 0
                if LEFT:
                    first_key = tl.maximum(len_k - len_q - window_left, 0) // BN * BN
                tiles = (tl.maximum(len_k - first_key, 0) + BN - 1) // BN
                if fixed_chunk > 0:
                    chunk = fixed_chunk
                elif fixed_splits > 0:
                    chunk = tl.cdiv(tiles, fixed_splits)
                else:
                    chunk = tiles_a_part(tiles, batch * pairs * tiles, budget, slots, merging)
                splits = tl.maximum(tl.cdiv(tiles, tl.maximum(chunk, 1)), 1)
            pairs = tl.maximum(pairs, 1)
            b = pid // (pairs * splits)
            start = b * (pairs * splits)
            live = b < batch
        item = pid - start
        pairs = tl.maximum(pairs, 1)
        part = item // pairs
        pair = item % pairs
        block = pair // heads_kv
        kvh = pair % heads_kv
    else:
        part = 0
        pair = 0
        if cu_q is not None:  # row blocks of sequence b start at number cu_q[b] * G // BM + b; last ones first (causal: longest)
            kvh = pid % heads_kv
            number = programs // heads_kv - 1 - pid // heads_kv
            bs = tl.arange(0, SEARCH)
            b = 0
            for at in tl.range(0, batch, SEARCH):
                starts = tl.load(cu_q + at + bs, mask=at + bs < batch, other=0).to(tl.int32) * G // BM + at + bs
                b += tl.sum(((starts <= number) & (at + bs < batch)).to(tl.int32), 0)
            b = b - 1
            block = number - (tl.load(cu_q + b).to(tl.int32) * G // BM + b)
        else:  # `group` kv heads at a time (their keys share the L2 cache), last row blocks first
            blocks = (len_q * G + BM - 1) // BM
            strip = pid // (group * blocks)
            within = pid % (group * blocks)
            width = tl.minimum(group, batch * heads_kv - strip * group)
            both = strip * group + within % width
            block = blocks - 1 - within // width
            b = both // heads_kv
            kvh = both % heads_kv
    if live:
        if not SPLIT or BB == 0:
            if cu_q is not None:
                len_q = (tl.load(cu_q + b + 1) - tl.load(cu_q + b)).to(tl.int32)
            if kv_lens is not None:
                # len_k: what the table has room for
                len_k = tl.minimum(tl.maximum(tl.load(kv_lens + b).to(tl.int32) + before * len_q, 0), len_k)
            elif cu_k is not None:
                keys = (tl.load(cu_k + b + 1) - tl.load(cu_k + b)).to(tl.int32)
                if PAGED:
                    keys = tl.minimum(tl.maximum(keys, 0), len_k)
                len_k = keys
        row0 = block * BM
        mine = row0 < len_q * G
        if SKIP_TO > 0:
            mine = mine & (len_q * G > SKIP_TO)
        if TAKE_TO > 0:
            mine = mine & (len_q * G <= TAKE_TO)
        if mine:
            lo = len_k * 0
            hi = len_k
            if SPLIT:
                if splits > 1:
                    if LEFT:
                        lo = tl.maximum(len_k - len_q - window_left, 0) // BN * BN
                    tiles_b = (tl.maximum(len_k - lo, 0) + BN - 1) // BN
                    if fixed_chunk > 0:
                        mine_tiles = fixed_chunk
                    else:
                        mine_tiles = tl.cdiv(tiles_b, splits)  # even parts
                    lo = lo + part * mine_tiles * BN
                    hi = tl.minimum(lo + mine_tiles * BN, len_k)

            # -- pointers of this sequence and kv head
            wide = b.to(tl.int64)
            q_first = wide * 0
            if cu_q is not None:
                q_first = tl.load(cu_q + b).to(tl.int64)
                q = q + q_first * q_s
                out = out + q_first * o_s
            else:
                q = q + wide * q_b
                out = out + wide * o_b
                q_first = wide * len_q
            if lse is not None:
                if LSE_FORM == 0 or cu_q is None:
                    lse = lse + q_first * (heads_kv * G)
                else:
                    lse = lse + q_first
            k = k + kvh * k_h
            v = v + kvh * v_h
            k_row_first = 0
            if PAGED:
                table = table + wide * table_b
            elif cu_k is not None:
                k_first = tl.load(cu_k + b).to(tl.int64)
                k = k + k_first * k_s
                v = v + k_first * v_s
                k_row_first = k_first.to(tl.int32)
            else:
                k = k + wide * k_b
                v = v + wide * v_b
                k_row_first = b  # descriptors of dense keys have a batch axis
            if BIAS != "none":
                bias = bias + wide * bias_b
            if alibi is not None:
                alibi = alibi + b * alibi_b
            c = scale
            if k_scale is not None:
                c = c * tl.load(k_scale + b * ks_b + kvh * ks_h)
            if v_scale is not None:
                v_factor = v_factor * tl.load(v_scale + b * vs_b + kvh * vs_h)

            acc, den, top = walk(
                q, k, v, k_desc, v_desc, k2_desc, k_row_first, (kvh * k_h).to(tl.int32), (kvh * v_h).to(tl.int32), table, bias, alibi,
                cos, sin, q_s, q_h, k_b, k_s, v_b, v_s, bias_h, bias_q, bias_k, cos_s, page_size,
                c, softcap, window_left, window_right, row0, kvh, len_q, len_k, lo, hi,
                G, BM, BN, D, DV, BD, BD2, BDV, PAGED, PAGE, WIDE, NEAR, LEFT, RIGHT, SOFTCAP, alibi is not None, BIAS, BIAS_ROWS, ROTARY,
                INTERLEAVED,
                FORMAT, V_IN_K, IEEE, DEFER, LOOPS, FLIP, not PAGED and cu_k is None)

            if SPLIT:
                if splits > 1:
                    # -- store the part; the last to arrive merges all of them, in order
                    rows = tl.arange(0, BM)
                    dims = tl.arange(0, BDV)
                    ok = row0 + rows < len_q * G
                    slot = (pid.to(tl.int64) * BM + rows)
                    tl.store(parts + slot[:, None] * BDV + dims[None, :], acc, mask=ok[:, None])
                    tl.store(stats + slot * 2, top, mask=ok)
                    tl.store(stats + slot * 2 + 1, den, mask=ok)
                    tl.debug_barrier()  # all stores of this program before its arrival
                    arrived = tl.atomic_add(counters + start + pair, 1, sem="acq_rel", scope="gpu")
                    if arrived == splits - 1:
                        tl.debug_barrier()
                        tl.store(counters + start + pair, 0)  # ready for the next launch
                        for r in tl.range(0, BM, MERGE_ROWS):
                            if row0 + r < len_q * G:
                                mrows = r + tl.arange(0, MERGE_ROWS)
                                mok = row0 + mrows < len_q * G
                                macc = tl.zeros([MERGE_ROWS, BDV], tl.float32)
                                mden = tl.zeros([MERGE_ROWS], tl.float32)
                                mtop = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
                                for at in tl.range(0, splits, MERGE_PARTS):
                                    ps = at + tl.arange(0, MERGE_PARTS)
                                    there = (ps < splits)[:, None] & mok[None, :]
                                    from_slot = (start + ps * pairs + pair).to(tl.int64)[:, None] * BM + mrows[None, :]
                                    t = tl.load(stats + from_slot * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                                    d = tl.load(stats + from_slot * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                                    x = tl.load(parts + from_slot[:, :, None] * BDV + dims[None, None, :], mask=there[:, :,
                                                                                                                      None],
                                                                                                                      other=0.0,
                                                cache_modifier=".cg")
                                    new = tl.maximum(mtop, tl.max(t, 0))
                                    base = tl.where(new == float("-inf"), 0.0, new)
                                    w = tl.exp2((t - base[None, :]) * LOG2E)
                                    shrink = tl.exp2((mtop - base) * LOG2E)
                                    mden = mden * shrink + tl.sum(w * d, 0)
                                    macc = macc * shrink[:, None] + tl.sum(w[:, :, None] * x, 0)
                                    mtop = new
                                finish(macc, mden, mtop, out, lse, sinks, v_factor, o_s, o_h, row0 + r, kvh, len_q, heads_kv * G,
                                       lse_rows, G, MERGE_ROWS, DV, BDV, IEEE, LSE_FORM)
                else:
                    finish(acc, den, top, out, lse, sinks, v_factor, o_s, o_h, row0, kvh, len_q, heads_kv * G, lse_rows, G, BM,
                           DV, BDV, IEEE, LSE_FORM)
            else:
                finish(acc, den, top, out, lse, sinks, v_factor, o_s, o_h, row0, kvh, len_q, heads_kv * G, lse_rows, G, BM, DV, BDV,
                       IEEE, LSE_FORM)


@triton.jit
def attend(
    q, k, v, k_desc, v_desc, k2_desc, out, lse, table, kv_lens, cu_q, cu_k, bias, alibi, sinks, k_scale, v_scale, cos, sin, parts, stats,
    counters,
    scale, softcap, v_factor, window_left, window_right,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h, table_b, bias_b, bias_h, bias_q, bias_k, alibi_b,
    ks_b, ks_h, vs_b, vs_h, cos_s, batch, heads_kv, len_q, len_k, page_size, programs, group, slots, budget, fixed_chunk,
    fixed_splits, stripe, before, lse_rows, merging,
    MODE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT_BM: tl.constexpr, SPLIT_BN: tl.constexpr, BB: tl.constexpr,
    SEARCH: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BD2: tl.constexpr, BDV: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, SPLIT_PAGE: tl.constexpr, WIDE: tl.constexpr, NEAR: tl.constexpr,
    ALIKE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr,
    V_IN_K: tl.constexpr, IEEE: tl.constexpr, LOOPS: tl.constexpr, SPLIT_LOOPS: tl.constexpr, FLIP: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr, LSE_FORM: tl.constexpr,
):
    """MODE "tiles", "splits", or "both": `programs` tile programs, the rest split programs. The arguments up
    to window_right change from call to call; the others belong to the shapes and strides. Absent tensors are None.

    q_b, q_s, q_h ...: strides of batch entry (page), row and head. k_scale and v_scale have strides (batch, head). Over pages,
    cu_k may stand for kv_lens: only differences are read. before: 1 if kv_lens do not count a sequence's queries yet."""
    pid = tl.program_id(0)
    is_tile = MODE == "tiles"
    if MODE == "both":
        # Alternate between the two kinds, one program a multiprocessor at a time: decode streams keys while tiles compute.
        pairs = tl.minimum(programs, tl.num_programs(0) - programs) // stripe * stripe
        turn = pid // stripe
        if pid < 2 * pairs:
            is_tile = turn % 2 == 0
            pid = turn // 2 * stripe + pid % stripe
        else:
            is_tile = pid - pairs < programs
            pid = tl.where(is_tile, pid - pairs, pid - programs)
    if MODE != "splits":
        if is_tile:
            program(
                pid,
                q, k, v, k_desc, v_desc, k2_desc, out, lse, table, kv_lens, cu_q, cu_k, bias, alibi, sinks, k_scale, v_scale, cos, sin,
                parts, stats, counters,
                scale, softcap, v_factor, window_left, window_right,
                q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h, table_b, bias_b, bias_h, bias_q, bias_k, alibi_b,
                ks_b, ks_h, vs_b, vs_h, cos_s, batch, heads_kv, len_q, len_k, page_size, programs, group, slots, budget,
                fixed_chunk,
                fixed_splits, stripe, before, lse_rows, merging, False, BM, BN, SPLIT_BM if MODE == "both" else 0, 0, BB, SEARCH, G, D, DV,
                BD, BD2, BDV,
                PAGED, PAGE, WIDE, NEAR, ALIKE, LEFT,
                RIGHT, SOFTCAP, BIAS, BIAS_ROWS, ROTARY, INTERLEAVED, FORMAT, V_IN_K, IEEE, False, LOOPS, FLIP, MERGE_ROWS, MERGE_PARTS,
                LSE_FORM)
    if MODE != "tiles":
        if not is_tile:
            program(
                pid,
                q, k, v, k_desc, v_desc, k2_desc, out, lse, table, kv_lens, cu_q, cu_k, bias, alibi, sinks, k_scale, v_scale, cos, sin,
                parts, stats, counters,
                scale, softcap, v_factor, window_left, window_right,
                q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, o_b, o_s, o_h, table_b, bias_b, bias_h, bias_q, bias_k, alibi_b,
                ks_b, ks_h, vs_b, vs_h, cos_s, batch, heads_kv, len_q, len_k, page_size, programs, group, slots, budget,
                fixed_chunk,
                fixed_splits, stripe, before, lse_rows, merging, True, SPLIT_BM, SPLIT_BN, 0, SPLIT_BM if MODE == "both" else 0, BB, SEARCH,
                G, D, DV, BD, BD2, BDV, PAGED,
                SPLIT_PAGE, WIDE, NEAR, ALIKE, LEFT, RIGHT, SOFTCAP, BIAS, BIAS_ROWS, ROTARY, INTERLEAVED, FORMAT, V_IN_K, IEEE, SPLIT_BM <= 16,
                SPLIT_LOOPS, FLIP, MERGE_ROWS, MERGE_PARTS, LSE_FORM)


# ---- the small ones


@triton.jit
def append(
    k_new, v_new, k, v, table, kv_lens, cu_q, slots, k_scale, v_scale, cos, sin,
    k_divisor, v_divisor,
    kn_b, kn_s, kn_h, vn_b, vn_s, vn_h, k_b, k_s, k_h, v_b, v_s, v_h, table_b, ks_b, ks_h, vs_b, vs_h, cos_s,
    batch, len_q, page_size, tokens, heads, pages, columns,
    BT: tl.constexpr, BB: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr, BY_HAND: tl.constexpr, COUNTING: tl.constexpr,
):
    """Writes new keys and values into a paged cache: stored = x / scale, after rotary. One program a kv head and BT tokens.

    With `slots`, token t goes to slot slots[t] (page * page_size + offset; negative: nowhere). Else it is one of the last
    tokens of its sequence, and goes to position kv_lens[b] - Lq + i (negative: nowhere) through the table, which has `columns`
    entries a sequence. What lies beyond these, or beyond the cache's `pages`, goes nowhere too. COUNTING: what kv_lens count
    (portattn/dialect.py)."""
    pid = tl.program_id(0)
    kn_b, kn_s, kn_h = kn_b.to(tl.int64), kn_s.to(tl.int64), kn_h.to(tl.int64)
    vn_b, vn_s, vn_h = vn_b.to(tl.int64), vn_s.to(tl.int64), vn_h.to(tl.int64)
    k_b, k_s, k_h = k_b.to(tl.int64), k_s.to(tl.int64), k_h.to(tl.int64)
    v_b, v_s, v_h = v_b.to(tl.int64), v_s.to(tl.int64), v_h.to(tl.int64)
    table_b, cos_s = table_b.to(tl.int64), cos_s.to(tl.int64)
    head = pid % heads
    t = pid // heads * BT + tl.arange(0, BT)
    ok = t < tokens
    if slots is not None:
        slot = tl.load(slots + t, mask=ok, other=-1).to(tl.int64)
        page = slot // page_size
        ok = ok & (slot >= 0)
        inside = slot % page_size
        position = inside
        k_at = t * kn_s
        v_at = t * vn_s
        b = t * 0
    else:
        if cu_q is not None:
            b = t * 0 - 1
            bs = tl.arange(0, BB)
            for at in tl.range(0, batch + 1, BB):
                begins = tl.load(cu_q + at + bs, mask=at + bs <= batch, other=0).to(tl.int32)
                b += tl.sum(((begins[None, :] <= t[:, None]) & (at + bs <= batch)[None, :]).to(tl.int32), 1)
            ok = ok & (b < batch) & (b >= 0)  # rows past the last sequence belong to none
            begin = tl.load(cu_q + b, mask=ok, other=0).to(tl.int32)
            count = tl.load(cu_q + b + 1, mask=ok, other=0).to(tl.int32) - begin
            i = t - begin
            k_at = t * kn_s
            v_at = t * vn_s
        else:
            b = t // len_q
            i = t % len_q
            count = len_q
            k_at = b * kn_b + i * kn_s
            v_at = b * vn_b + i * vn_s
        length = tl.load(kv_lens + b, mask=ok, other=0).to(tl.int32)
        if COUNTING == 1:
            length += count
        elif COUNTING == 2:
            length = tl.load(kv_lens + b + 1, mask=ok, other=0).to(tl.int32) - length
        position = length - count + i
        ok = ok & (position >= 0) & (position // page_size < columns)
        page = tl.load(table + b * table_b + position // page_size, mask=ok, other=0).to(tl.int64)
        inside = (position % page_size).to(tl.int64)
    ok = ok & (page >= 0) & (page < pages)
    if BT > 1:  # tokens for one slot: the last one's key and value stay, in all heads
        to = tl.where(ok, page * page_size + inside, -1 - t)
        later = (to[:, None] == to[None, :]) & (t[:, None] < t[None, :])
        ok = ok & (tl.max(later.to(tl.int32), 1) == 0)
    k_factor = k_divisor
    v_factor = v_divisor
    k_by = tl.zeros([BT], tl.float32) + k_factor
    v_by = tl.zeros([BT], tl.float32) + v_factor
    if k_scale is not None:
        k_by = tl.load(k_scale + b * ks_b + head * ks_h, mask=ok, other=1.0)
    if v_scale is not None:
        v_by = tl.load(v_scale + b * vs_b + head * vs_h, mask=ok, other=1.0)
    dims = tl.arange(0, BD)
    mask = ok[:, None] & (dims[None, :] < D)
    if ROTARY > 0:
        x = rotated(k_new, k_at + head * kn_h, dims, mask, position, cos, sin, cos_s, D, ROTARY, INTERLEAVED)
    else:
        x = tl.load(k_new + (k_at + head * kn_h)[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    v_dims = tl.arange(0, BDV)
    v_mask = ok[:, None] & (v_dims[None, :] < DV)
    y = tl.load(v_new + (v_at + head * vn_h)[:, None] + v_dims[None, :], mask=v_mask, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.broadcast_to(k_by[:, None], [BT, BD]))
    y = tl.div_rn(y, tl.broadcast_to(v_by[:, None], [BT, BDV]))
    k_to = k + (page * k_b + inside * k_s + head * k_h)[:, None] + dims[None, :]
    v_to = v + (page * v_b + inside * v_s + head * v_h)[:, None] + v_dims[None, :]
    if FORMAT == "same":
        tl.store(k_to, narrow(x, k.dtype.element_ty, BY_HAND), mask=mask)
        tl.store(v_to, narrow(y, v.dtype.element_ty, BY_HAND), mask=v_mask)
    else:
        tl.store(k_to, encode_fp8(x, FORMAT), mask=mask)
        tl.store(v_to, encode_fp8(y, FORMAT), mask=v_mask)


@triton.jit
def merge(outs, lses, sinks, out, lse, parts, rows, heads, part_stride, BR: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr,
          BY_HAND: tl.constexpr):
    """outs (parts, rows, DV) and lses (parts, rows) contiguous, in natural logarithms; row r is head r % heads."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    dims = tl.arange(0, BDV)
    ok = r < rows
    mask = ok[:, None] & (dims[None, :] < DV)
    top = tl.full([BR], float("-inf"), tl.float32)
    den = tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    for s in tl.range(0, parts):
        at = r + s * rows.to(tl.int64)
        l = tl.load(lses + at, mask=ok, other=float("-inf"))
        live = l != float("-inf")
        x = tl.load(outs + at[:, None] * part_stride + dims[None, :], mask=mask & live[:, None], other=0.0).to(tl.float32)
        new = tl.maximum(top, l)
        base = tl.where(new == float("-inf"), 0.0, new)
        w = tl.exp2((l - base) * LOG2E)
        shrink = tl.exp2((top - base) * LOG2E)
        den = den * shrink + w
        acc = acc * shrink[:, None] + x * w[:, None]
        top = new
    if sinks is not None:
        sink = tl.load(sinks + r % heads, mask=ok, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, sink)
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2((top - base) * LOG2E)
        den = den * shrink + tl.exp2((sink - base) * LOG2E)
        acc = acc * shrink[:, None]
        top = new
    acc = acc / tl.where(den == 0.0, 1.0, den)[:, None]
    tl.store(out + r[:, None] * DV + dims[None, :], narrow(acc, out.dtype.element_ty, BY_HAND), mask=mask)
    tl.store(lse + r, tl.where(den == 0.0, float("-inf"), top + tl.log2(tl.where(den == 0.0, 1.0, den)) * LN2), mask=ok)
