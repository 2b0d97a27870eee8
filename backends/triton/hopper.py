"""Prefill on sm_90 with Hopper's own instructions, in Gluon: what Triton's plain kernels cannot say is the overlap of one tile's
softmax with another tile's matmul.

Computes   what kernels.attend computes for dense and varlen prefill in 16 bits; head dims 64, 128, 256, no bias, ALiBi or softcap.
Warps      One producer warp fetches work and moves tiles by TMA. NC consumer warp groups own 64 rows each and walk the same keys.
           In a group, S = Q K^T of a tile runs beside O += P V of the tile before it, and softmax runs under that second matmul;
           the groups take turns at issuing, so that one's softmax runs under the other's matmuls too.
Rows       PACK query heads of a kv head are packed: row r of a sequence is query r // PACK, head r % PACK of its pack.
Keys       From the last tile to the first: masked tiles of a causal block come first, full tiles follow.
Grid       Persistent: a program's first block of rows is its number, the next ones come from a counter, longest first where lengths
           are known. The pipeline does not drain between blocks: the first scores of a block are computed beside the last matmul
           of the block before, whose results are stored then.
Memory     Rings of STAGES tiles of K and V, of QS blocks of Q and of two records of work; a full and an empty barrier a slot.
           With QS 2, O is staged in its block's slot of Q; with QS 1 it is stored from registers.
Numerics   As in kernels.py: p = exp2(s * c - m * c), float32 sums.
Versions   Triton 3.6 and newer: 3.5's warp_specialize takes other arguments, 3.4 has no wgmma. With those kernels.py serves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a consumer group: M of one wgmma
FIELDS = gl.constexpr(16)  # room of a record of work
STOP = gl.constexpr(-2)  # in the place of a count of tiles
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # the name until Triton 3.6
sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the warps of this partition


@gluon.jit
def work(t, cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, programs, group,
         PACK: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SEARCH: gl.constexpr):
    """Block t: (sequence, pack of heads, first row, first query and first key in memory, lengths, first key, keys that all rows
    see, number of tiles of keys: -1 where there are no rows)."""
    q_first = 0
    k_first = 0
    if cu_q is not None:  # as in kernels.program: row blocks of sequence b start at number cu_q[b] * PACK // BM + b
        head = t % heads
        number = programs // heads - 1 - t // heads
        bs = gl.arange(0, SEARCH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        b = -1
        for at in range(0, batch, SEARCH):
            starts = gl.load(cu_q + at + bs, mask=at + bs < batch, other=0).to(gl.int32) * PACK // BM + at + bs
            b += gl.sum(((starts <= number) & (at + bs < batch)).to(gl.int32), 0)
        q_first = gl.load(cu_q + b).to(gl.int32)
        row0 = (number - (q_first * PACK // BM + b)) * BM
        len_q = gl.load(cu_q + b + 1).to(gl.int32) - q_first
        k_first = gl.load(cu_k + b).to(gl.int32)
        if used_k is None:
            len_k = gl.load(cu_k + b + 1).to(gl.int32) - k_first
    else:  # `group` packs at a time (their keys share the L2 cache), last rows first
        blocks = (len_q * PACK + BM - 1) // BM
        strip = t // (group * blocks)
        within = t % (group * blocks)
        width = gl.minimum(group, batch * heads - strip * group)
        both = strip * group + within % width
        row0 = (blocks - 1 - within // width) * BM
        b = both // heads
        head = both % heads
    if used_k is not None:
        len_k = gl.minimum(gl.maximum(gl.load(used_k + b).to(gl.int32), 0), len_k)
    shift = len_k - len_q
    first = row0 // PACK
    last = (gl.minimum(row0 + BM, len_q * PACK) - 1) // PACK
    lo = 0
    hi = len_k
    full_lo = 0
    full_hi = len_k
    if RIGHT:
        full_hi = gl.minimum(hi, first + shift + window_right + 1)
        hi = gl.minimum(hi, last + shift + window_right + 1)
    if LEFT:
        full_lo = gl.maximum(lo, last + shift - window_left)
        lo = gl.maximum(lo, first + shift - window_left) // BN * BN
    count = gl.where(row0 < len_q * PACK, (gl.maximum(hi - lo, 0) + BN - 1) // BN, -1)
    return b, head, row0, q_first, k_first, len_q, len_k, lo, full_lo, full_hi, count


@gluon.jit
def write(records, at, i: gl.constexpr, value):
    """Field i of the record at `at`."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    records.index(at * FIELDS + i).store(gl.full([1], value, gl.int32, ONE))


@gluon.jit
def read(records, at, i: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(records.index(at * FIELDS + i).load(ONE), 0)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot of a ring behind `slot`, and its phase."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def produce(given, NC: gl.constexpr, PACK: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            QS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SEARCH: gl.constexpr):
    """The producer warp: a record of each block of rows, its Q, then K and V of each tile of keys, as slots become free."""
    (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, records, q_full, q_empty, k_full, k_empty, v_full, v_empty, r_full, r_empty,
     counters, cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, k_h, v_h, programs, group) = given
    n_programs = gl.num_programs(0)
    slot = 0
    phase = 0
    q_slot = 0
    q_phase = 0
    r_slot = 0
    r_phase = 0
    t = gl.program_id(0)
    while t < programs:
        b, head, row0, q_first, k_first, lq, lk, lo, full_lo, full_hi, count = work(
            t, cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, programs, group,
            PACK, NC * ROWS, BN, LEFT, RIGHT, SEARCH)
        if count >= 0:
            mbarrier.wait(r_empty.index(r_slot), r_phase ^ 1)
            write(records, r_slot, 0, count)
            write(records, r_slot, 1, b)
            write(records, r_slot, 2, head)
            write(records, r_slot, 3, row0)
            write(records, r_slot, 4, q_first)
            write(records, r_slot, 5, lq)
            write(records, r_slot, 6, lk)
            write(records, r_slot, 7, lo)
            write(records, r_slot, 8, full_lo)
            write(records, r_slot, 9, full_hi)
            sync()
            mbarrier.arrive(r_full.index(r_slot), count=1)
            r_phase ^= r_slot
            r_slot ^= 1
        if count > 0:
            for w in gl.static_range(NC):
                mbarrier.wait(q_empty.index(w * QS + q_slot), q_phase ^ 1)
                mbarrier.expect(q_full.index(w * QS + q_slot), ROWS * D * 2)
                row = row0 // PACK + w * (ROWS // PACK)
                if cu_q is not None:
                    load_tile(q_desc, [q_first + row, head * PACK, 0], q_full.index(w * QS + q_slot), q_smem.index(w * QS + q_slot))
                else:
                    load_tile(q_desc, [b, row, head * PACK, 0], q_full.index(w * QS + q_slot), q_smem.index(w * QS + q_slot))
            q_slot, q_phase = next_slot(q_slot, q_phase, QS)
            k_col = head * PACK // G * k_h
            v_col = head * PACK // G * v_h
            for i in range(0, count):
                n = lo + (count - 1 - i) * BN
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                mbarrier.expect(k_full.index(slot), BN * D * 2)
                if cu_q is not None:
                    load_tile(k_desc, [k_first + n, k_col], k_full.index(slot), k_smem.index(slot))
                else:
                    load_tile(k_desc, [b, n, k_col], k_full.index(slot), k_smem.index(slot))
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                mbarrier.expect(v_full.index(slot), BN * D * 2)
                if cu_q is not None:
                    load_tile(v_desc, [k_first + n, v_col], v_full.index(slot), v_smem.index(slot))
                else:
                    load_tile(v_desc, [b, n, v_col], v_full.index(slot), v_smem.index(slot))
                slot, phase = next_slot(slot, phase, STAGES)
        t = n_programs + gl.atomic_add(counters, 1)
    mbarrier.wait(r_empty.index(r_slot), r_phase ^ 1)
    write(records, r_slot, 0, STOP)
    sync()
    mbarrier.arrive(r_full.index(r_slot), count=1)
    if gl.atomic_add(counters + 1, 1) == n_programs - 1:  # all programs have fetched their last: ready for the next launch
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def soft(s, n, edge, row_lo, row_hi, top, c2, LEFT: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr):
    """Masks, new maximum, p = exp2(s * factor - top * factor), the row sums of p, and what older sums shrink by."""
    if edge:
        j = n + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
        ok = j[None, :] < row_hi[:, None]
        if LEFT:
            ok = ok & (j[None, :] >= row_lo[:, None])
        s = gl.where(ok, s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1))
    base = gl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    factor = gl.where(gl.abs(base * c2) < 16777216.0, c2, gl.exp2(gl.floor(gl.log2(c2))))
    shifted = base * factor
    p = gl.exp2(s * factor[:, None] - shifted[:, None])
    shrink = gl.exp2(top * factor - shifted)
    return p, gl.sum(p, 1), shrink, new_top


@gluon.jit
def finish(acc, den, top, q, out, lse, sinks, c, o_b, o_s, o_h, across, w: gl.constexpr, b, head, row0, q_first, len_q,
           PACK: gl.constexpr, D: gl.constexpr, STAGED: gl.constexpr, S_ROWS: gl.constexpr, O_LAYOUT: gl.constexpr,
           OUT: gl.constexpr, DTYPE: gl.constexpr, LSE_FORM: gl.constexpr):
    """Sink, division, stores of a group's rows. LSE_FORM as in kernels.finish; across: what a step in lse is measured by, packs of
    heads, or rows of a head where the heads come first and rows are ragged."""
    rows = row0 + w * ROWS + gl.arange(0, ROWS, S_ROWS)
    alone = den == 0.0  # the row saw no key
    weight = 1.0 / gl.where(alone, 1.0, den)
    if lse is not None or sinks is not None:
        top = gl.where(top == float("-inf"), top, top * c)
        UNSEEN: gl.constexpr = float("inf") if LSE_FORM == 2 and sinks is None else float("-inf")
        value = gl.where(alone, UNSEEN, top + gl.log2(gl.where(alone, 1.0, den)) * LN2)
        if sinks is not None:
            sink = gl.load(sinks + head * PACK + rows % PACK).to(gl.float32)
            most = gl.maximum(value, sink)
            most = gl.where(most == float("-inf"), 0.0, most)
            mine = gl.exp2((value - most) * LOG2E)
            total = mine + gl.exp2((sink - most) * LOG2E)
            nothing = total == 0.0
            total = gl.where(nothing, 1.0, total)
            weight = gl.where(alone, 0.0, weight * mine / total)
            value = gl.where(nothing, float("-inf"), most + gl.log2(total) * LN2)
        if lse is not None:
            h = head * PACK + rows % PACK
            if LSE_FORM == 0:
                before = q_first.to(gl.int64) if q_first is not None else b.to(gl.int64) * len_q
                at = (before + rows // PACK) * (across * PACK) + h
            elif q_first is not None:
                at = h.to(gl.int64) * across + (q_first + rows // PACK)
            else:
                at = (b.to(gl.int64) * (across * PACK) + h) * len_q + rows // PACK
            gl.store(lse + at, value, mask=rows < len_q * PACK)
    o = (acc * gl.convert_layout(weight, gl.SliceLayout(1, O_LAYOUT))[:, None]).to(DTYPE)
    if STAGED:
        LAYOUT: gl.constexpr = OUT
        q.store(o)
        sync()
        o = q.load(OUT)
    else:
        LAYOUT: gl.constexpr = O_LAYOUT
    o_rows = row0 + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    o_dims = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    o_at = (head * PACK + o_rows % PACK).to(gl.int64) * o_h
    if q_first is not None:
        o_at += (q_first + o_rows // PACK).to(gl.int64) * o_s
    else:
        o_at += b.to(gl.int64) * o_b + (o_rows // PACK).to(gl.int64) * o_s
    gl.store(out + o_at[:, None] + o_dims[None, :], o, mask=(o_rows < len_q * PACK)[:, None])


@gluon.jit
def scores_beside_output(given, q, a, acc, none, slot, phase, v_slot, v_phase, my_turn, has_output, q_at, is_last,
                         w: gl.constexpr, NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
                         STAGED: gl.constexpr, TURNS: gl.constexpr):
    """S = Q K^T of the tile in `slot`, complete, beside O += P V of the tile before it, under way: (s, o, slot, phase, my_turn)
    for the next tile. Without has_output, O is of no use. Q's slot q_at is released with the last tile of its block."""
    (q_smem, k_smem, v_smem, records, q_full, q_empty, k_full, k_empty, v_full, v_empty, r_full, r_empty, turn,
     out, lse, sinks, cu_q, scale, window_left, window_right, o_b, o_s, o_h, across) = given
    mbarrier.wait(k_full.index(slot), phase)
    if TURNS:
        mbarrier.wait(turn.index(w), my_turn)
        my_turn ^= 1
    s = warpgroup_mma(q, k_smem.index(slot).reshape([BN, D]).permute((1, 0)), none, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_slot), v_phase, pred=has_output)
    o = warpgroup_mma(a, v_smem.index(v_slot).reshape([BN, D]), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turn.index((w + 1) % NC), count=1)
    s = warpgroup_mma_wait(1, deps=[s])
    sync()
    mbarrier.arrive(k_empty.index(slot), count=1)
    if not STAGED:
        mbarrier.arrive(q_empty.index(q_at), count=1, pred=is_last)
    slot, phase = next_slot(slot, phase, STAGES)
    return s, o, slot, phase, my_turn


@gluon.jit
def consume(given, w: gl.constexpr, NC: gl.constexpr, PACK: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            QS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, TURNS: gl.constexpr, LSE_FORM: gl.constexpr):
    """Consumer group w: rows row0 + 64 w .. of each block."""
    (q_smem, k_smem, v_smem, records, q_full, q_empty, k_full, k_empty, v_full, v_empty, r_full, r_empty, turn,
     out, lse, sinks, cu_q, scale, window_left, window_right, o_b, o_s, o_h, across) = given
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16-byte stores
    DTYPE: gl.constexpr = q_smem.dtype
    STAGED: gl.constexpr = QS == 2
    c = gl.maximum(scale, 1e-30)  # a scale of 0: every visible key weighs the same
    c2 = c * LOG2E
    slot = 0
    phase = 0
    v_slot = 0
    v_phase = 0
    q_slot = 0
    q_phase = 0
    r_slot = 0
    r_phase = 0
    my_turn = 1 if w == 0 else 0  # the first group need not wait for its first turn
    # the block before, whose last matmul is still to be done: old is 1 if there is one
    old = 0
    old_b = 0
    old_head = 0
    old_row0 = 0
    old_first = 0
    old_len = 0
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    a = gl.zeros([ROWS, BN], DTYPE, P_LAYOUT)
    den = gl.zeros([ROWS], gl.float32, S_ROWS)
    top = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
    none = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
    mbarrier.wait(r_full.index(0), 0)
    count = read(records, 0, 0)
    while count != STOP:
        b = read(records, r_slot, 1)
        head = read(records, r_slot, 2)
        row0 = read(records, r_slot, 3)
        q_first = read(records, r_slot, 4)
        len_q = read(records, r_slot, 5)
        len_k = read(records, r_slot, 6)
        lo = read(records, r_slot, 7)
        full_lo = read(records, r_slot, 8)
        full_hi = read(records, r_slot, 9)
        sync()
        mbarrier.arrive(r_empty.index(r_slot), count=1)
        r_phase ^= r_slot
        r_slot ^= 1
        if count > 0:
            pos = (row0 + w * ROWS + gl.arange(0, ROWS, S_ROWS)) // PACK + (len_k - len_q)
            row_hi = pos * 0 + len_k
            row_lo = pos * 0
            if RIGHT:
                row_hi = gl.minimum(row_hi, pos + (window_right + 1))
            if LEFT:
                row_lo = pos - window_left
            q = q_smem.index(w * QS + q_slot).reshape([ROWS, D])

            # -- the first scores, beside the last matmul of the block before (of nothing, before the first block)
            n = lo + (count - 1) * BN
            mbarrier.wait(q_full.index(w * QS + q_slot), q_phase)
            s, o, slot, phase, my_turn = scores_beside_output(
                given, q, a, acc, none, slot, phase, v_slot, v_phase, my_turn, old > 0, w * QS + q_slot, count == 1,
                w, NC, BN, D, STAGES, STAGED, TURNS)
            fresh = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
            p, new_den, shrink, new_top = soft(s, n, True, row_lo, row_hi, fresh, c2, LEFT, BN, S_LAYOUT)
            # A barrier that has been passed ends a basic block: within one, the assembler would move softmax behind the wait for
            # the matmul that it is to run under.
            mbarrier.wait(v_full.index(v_slot), v_phase, pred=old > 0)
            acc, p, new_den, new_top = warpgroup_mma_wait(0, deps=[o, p, new_den, new_top])
            if old > 0:
                sync()
                mbarrier.arrive(v_empty.index(v_slot), count=1)
                v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
                before = q_smem.index(w * QS + (q_slot ^ 1 if STAGED else 0)).reshape([ROWS, D])
                finish(acc, den, top, before, out, lse, sinks, c, o_b, o_s, o_h, across, w, old_b, old_head, old_row0,
                       old_first if cu_q is not None else None, old_len, PACK, D, STAGED, S_ROWS, O_LAYOUT, OUT, DTYPE, LSE_FORM)
                if STAGED:
                    fence_async_shared()  # Q's slot was written by ordinary stores; TMA writes it next
                    sync()
                    mbarrier.arrive(q_empty.index(w * QS + (q_slot ^ 1)), count=1)
            acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
            den = new_den
            top = new_top
            a = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
            if cu_q is not None:
                if n + BN > len_k:  # rows of the next sequence may hold NaN, which a weight of 0 would let through
                    mbarrier.wait(v_full.index(v_slot), v_phase)
                    for r in gl.static_range(0, BN, 16):
                        if n + r + 16 > len_k:
                            piece = v_smem.index(v_slot).slice(r, 16, dim=0)
                            key = n + r + gl.arange(0, 16, gl.SliceLayout(1, OUT))
                            piece.store(gl.where((key < len_k)[:, None], piece.load(OUT), 0.0).to(DTYPE))
                    fence_async_shared()
                    sync()

            # -- the other tiles of keys
            for i in range(1, count):
                n = lo + (count - 1 - i) * BN
                s, o, slot, phase, my_turn = scores_beside_output(
                    given, q, a, acc, none, slot, phase, v_slot, v_phase, my_turn, True, w * QS + q_slot, i == count - 1,
                    w, NC, BN, D, STAGES, STAGED, TURNS)
                edge = (n + BN > full_hi) | (n < full_lo)
                p, more, shrink, top = soft(s, n, edge, row_lo, row_hi, top, c2, LEFT, BN, S_LAYOUT)
                den = den * shrink + more
                mbarrier.wait(v_full.index(v_slot), v_phase)
                # p stays float32 until here: a 16-bit copy beside the one that the matmul reads would take the registers with
                # which max and exp2 of two rows interleave. Scaling acc beside the next scores takes too many as well.
                acc, p, den, shrink, top = warpgroup_mma_wait(0, deps=[o, p, den, shrink, top])
                sync()
                mbarrier.arrive(v_empty.index(v_slot), count=1)
                v_slot, v_phase = next_slot(v_slot, v_phase, STAGES)
                acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
                a = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
            old = 1
            old_b = b
            old_head = head
            old_row0 = row0
            old_first = q_first
            old_len = len_q
            q_slot, q_phase = next_slot(q_slot, q_phase, QS)
        else:  # rows that see no key
            nothing = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
            blank = gl.zeros([ROWS], gl.float32, S_ROWS)
            unseen = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
            finish(nothing, blank, unseen, q_smem, out, lse, sinks, c, o_b, o_s, o_h, across, w, b, head, row0,
                   q_first if cu_q is not None else None, len_q, PACK, D, False, S_ROWS, O_LAYOUT, OUT, DTYPE, LSE_FORM)
        mbarrier.wait(r_full.index(r_slot), r_phase)
        count = read(records, r_slot, 0)
    if old > 0:
        mbarrier.wait(v_full.index(v_slot), v_phase)
        o = warpgroup_mma(a, v_smem.index(v_slot).reshape([BN, D]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[o])
        sync()
        before = q_smem.index(w * QS + (q_slot ^ 1 if STAGED else 0)).reshape([ROWS, D])
        finish(acc, den, top, before, out, lse, sinks, c, o_b, o_s, o_h, across, w, old_b, old_head, old_row0,
               old_first if cu_q is not None else None, old_len, PACK, D, STAGED, S_ROWS, O_LAYOUT, OUT, DTYPE, LSE_FORM)


@gluon.jit
def attend_hopper(
    q_desc, k_desc, v_desc, out, lse, used_k, cu_q, cu_k, sinks, counters, scale, window_left, window_right,
    o_b, o_s, o_h, k_h, v_h, batch, heads, len_q, len_k, programs, group, lse_rows,
    NC: gl.constexpr, PACK: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    QS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SEARCH: gl.constexpr, TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, LSE_FORM: gl.constexpr,
):
    """heads: packs of query heads; k_h, v_h: elements between kv heads; programs: blocks of rows; group: packs walked together;
    counters: two zeros, which the launch leaves behind as zeros."""
    DTYPE: gl.constexpr = q_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [NC * QS] + q_desc.block_shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES] + k_desc.block_shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES] + v_desc.block_shape, v_desc.layout)
    records = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [NC * QS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [NC * QS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    r_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    r_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [NC, 1], BARRIER)
    for i in gl.static_range(NC * QS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(NC):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(r_full.index(i), count=1)
        mbarrier.init(r_empty.index(i), count=NC)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NC)
        mbarrier.init(v_empty.index(i), count=NC)
    fence_async_shared()
    across = heads
    if LSE_FORM != 0 and cu_q is not None:
        across = lse_rows
    given = (q_smem, k_smem, v_smem, records, q_full, q_empty, k_full, k_empty, v_full, v_empty, r_full, r_empty, turn,
             out, lse, sinks, cu_q, scale, window_left, window_right, o_b, o_s, o_h, across)
    feed = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, records, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            r_full, r_empty, counters, cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, k_h, v_h, programs,
            group)
    if NC == 2:
        gl.warp_specialize([(consume, (given, 0, NC, PACK, BN, D, STAGES, QS, LEFT, RIGHT, TURNS, LSE_FORM)),
                            (consume, (given, 1, NC, PACK, BN, D, STAGES, QS, LEFT, RIGHT, TURNS, LSE_FORM)),
                            (produce, (feed, NC, PACK, G, BN, D, STAGES, QS, LEFT, RIGHT, SEARCH))], [4, 1],
                           [CONSUMER_REGISTERS, 24])
    else:
        gl.warp_specialize([(consume, (given, 0, NC, PACK, BN, D, STAGES, QS, LEFT, RIGHT, TURNS, LSE_FORM)),
                            (consume, (given, 1, NC, PACK, BN, D, STAGES, QS, LEFT, RIGHT, TURNS, LSE_FORM)),
                            (consume, (given, 2, NC, PACK, BN, D, STAGES, QS, LEFT, RIGHT, TURNS, LSE_FORM)),
                            (produce, (feed, NC, PACK, G, BN, D, STAGES, QS, LEFT, RIGHT, SEARCH))], [4, 4, 1],
                           [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 32])
