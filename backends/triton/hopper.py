"""Prefill on sm_90 with Hopper's own instructions, in Gluon: what Triton's plain kernels cannot say is the overlap of one tile's
softmax with another tile's matmul.

Computes   what kernels.attend computes for dense and varlen prefill in 16 bits; head dims 64, 128, 256, no bias, ALiBi or softcap.
Warps      One producer warp moves tiles by TMA. NC consumer warp groups own 64 rows each and walk the same keys. In a group,
           S = Q K^T of a tile runs while the tile before it is multiplied into O, and softmax runs under that second matmul;
           the groups take turns at issuing, so that one's softmax runs under the other's matmuls.
Rows       PACK query heads of a kv head are packed: row r of a sequence is query r // PACK, head r % PACK of its pack.
Keys       From the last tile to the first: masked tiles of a causal block come first, full tiles follow.
Memory     Rings of STAGES tiles of K and V; a full and an empty barrier a slot. Q has one buffer a group, in which O is staged.
Grid       Persistent: program p computes tiles p, p + n, p + 2 n ..., every second round in reverse, longest tiles first.
Numerics   As in kernels.py: p = exp2(s * c - m * c), float32 sums.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a consumer group: M of one wgmma
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # the name until Triton 3.6
sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of the warps of this partition


@gluon.jit
def work(t, cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, programs, group,
         PACK: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, SEARCH: gl.constexpr):
    """Tile t: (sequence, pack of heads, first row, first query row and key row in memory, lengths, key range, range that all
    rows see, number of tiles of keys or -1 where there is nothing to do)."""
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
    else:
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
def turn_of(round, pid, n):
    """The tile of a program in a round: there and back, so that sums of falling lengths are even."""
    return round * n + gl.where(round % 2 == 0, pid, n - 1 - pid)


@gluon.jit
def produce(given, NC: gl.constexpr, PACK: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            LEFT: gl.constexpr, RIGHT: gl.constexpr, SEARCH: gl.constexpr):
    """The producer warp: Q, then K and V of each tile of keys, as slots become free."""
    (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
     cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, k_h, v_h, programs, group) = given
    pid = gl.program_id(0)
    n_programs = gl.num_programs(0)
    slot = 0
    phase = 0
    q_phase = 0
    for round in range(0, (programs + n_programs - 1) // n_programs):
        t = turn_of(round, pid, n_programs)
        if t < programs:
            b, head, row0, q_first, k_first, _lq, _lk, lo, _flo, _fhi, count = work(
                t, cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, programs, group,
                PACK, NC * ROWS, BN, LEFT, RIGHT, SEARCH)
            if count >= 0:
                kv_head = head * PACK // G
                for w in gl.static_range(NC):
                    mbarrier.wait(q_empty.index(w), q_phase ^ 1)
                    mbarrier.expect(q_full.index(w), ROWS * D * 2)
                    row = row0 // PACK + w * (ROWS // PACK)
                    if cu_q is not None:
                        load_tile(q_desc, [q_first + row, head * PACK, 0], q_full.index(w), q_smem.index(w))
                    else:
                        load_tile(q_desc, [b, row, head * PACK, 0], q_full.index(w), q_smem.index(w))
                q_phase ^= 1
                for i in range(0, count):
                    n = lo + (count - 1 - i) * BN
                    mbarrier.wait(k_empty.index(slot), phase ^ 1)
                    mbarrier.expect(k_full.index(slot), BN * D * 2)
                    if cu_q is not None:
                        load_tile(k_desc, [k_first + n, kv_head * k_h], k_full.index(slot), k_smem.index(slot))
                    else:
                        load_tile(k_desc, [b, n, kv_head * k_h], k_full.index(slot), k_smem.index(slot))
                    mbarrier.wait(v_empty.index(slot), phase ^ 1)
                    mbarrier.expect(v_full.index(slot), BN * D * 2)
                    if cu_q is not None:
                        load_tile(v_desc, [k_first + n, kv_head * v_h], v_full.index(slot), v_smem.index(slot))
                    else:
                        load_tile(v_desc, [b, n, kv_head * v_h], v_full.index(slot), v_smem.index(slot))
                    slot += 1
                    if slot == STAGES:
                        slot = 0
                        phase ^= 1


@gluon.jit
def soft(s, n, edge, row_lo, row_hi, top, c2, LEFT: gl.constexpr, BN: gl.constexpr, LAYOUT: gl.constexpr,
         DTYPE: gl.constexpr, LATE: gl.constexpr):
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
    return p if LATE else p.to(DTYPE), gl.sum(p, 1), shrink, new_top


@gluon.jit
def consume(given, w: gl.constexpr, NC: gl.constexpr, PACK: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
            LEFT: gl.constexpr, RIGHT: gl.constexpr, SEARCH: gl.constexpr, TURNS: gl.constexpr):
    """Consumer group w: rows row0 + 64 w .. of each tile."""
    (q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
     out, lse, sinks, cu_q, cu_k, used_k, scale, window_left, window_right, o_b, o_s, o_h, batch, heads, len_q0, len_k0,
     programs, group) = given
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # 16-byte stores
    DTYPE: gl.constexpr = q_smem.dtype
    pid = gl.program_id(0)
    n_programs = gl.num_programs(0)
    c = gl.maximum(scale, 1e-30)  # a scale of 0: every visible key weighs the same
    c2 = c * LOG2E
    q = q_smem.index(w).reshape([ROWS, D])
    slot = 0
    phase = 0
    v_slot = 0
    v_phase = 0
    q_phase = 0
    my_turn = 1 if w == 0 else 0  # the first group need not wait for its first turn
    for round in range(0, (programs + n_programs - 1) // n_programs):
        t = turn_of(round, pid, n_programs)
        if t < programs:
            b, head, row0, q_first, k_first, len_q, len_k, lo, full_lo, full_hi, count = work(
                t, cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q0, len_k0, programs, group,
                PACK, NC * ROWS, BN, LEFT, RIGHT, SEARCH)
            if count >= 0:
                pos = (row0 + w * ROWS + gl.arange(0, ROWS, S_ROWS)) // PACK + (len_k - len_q)
                row_hi = pos * 0 + len_k
                row_lo = pos * 0
                if RIGHT:
                    row_hi = gl.minimum(row_hi, pos + (window_right + 1))
                if LEFT:
                    row_lo = pos - window_left
                acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
                den = gl.zeros([ROWS], gl.float32, S_ROWS)
                top = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS)
                mbarrier.wait(q_full.index(w), q_phase)
                if count > 0:
                    none = gl.zeros([ROWS, BN], gl.float32, S_LAYOUT)
                    n = lo + (count - 1) * BN
                    mbarrier.wait(k_full.index(slot), phase)
                    s = warpgroup_mma(q, k_smem.index(slot).reshape([BN, D]).permute((1, 0)), none, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(0, deps=[s])
                    sync()
                    mbarrier.arrive(k_empty.index(slot), count=1)
                    slot += 1
                    if slot == STAGES:
                        slot = 0
                        phase ^= 1
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
                    p, den, shrink, top = soft(s, n, True, row_lo, row_hi, top, c2, LEFT, BN, S_LAYOUT, DTYPE, NC > 2)
                    a = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
                    for i in range(1, count):
                        n = lo + (count - 1 - i) * BN
                        mbarrier.wait(k_full.index(slot), phase)
                        if TURNS:
                            mbarrier.wait(turn.index(w), my_turn)
                            my_turn ^= 1
                        s = warpgroup_mma(q, k_smem.index(slot).reshape([BN, D]).permute((1, 0)), none, use_acc=False, is_async=True)
                        mbarrier.wait(v_full.index(v_slot), v_phase)
                        o = warpgroup_mma(a, v_smem.index(v_slot).reshape([BN, D]), acc, is_async=True)
                        if TURNS:
                            mbarrier.arrive(turn.index((w + 1) % NC), count=1)
                        s = warpgroup_mma_wait(1, deps=[s])
                        sync()
                        mbarrier.arrive(k_empty.index(slot), count=1)
                        slot += 1
                        if slot == STAGES:
                            slot = 0
                            phase ^= 1
                        edge = (n + BN > full_hi) | (n < full_lo)
                        p, more, shrink, top = soft(s, n, edge, row_lo, row_hi, top, c2, LEFT, BN, S_LAYOUT, DTYPE, NC > 2)
                        den = den * shrink + more
                        # A barrier that has been passed ends a basic block: within one, the assembler would move softmax
                        # behind the wait for the matmul that it is to run under.
                        mbarrier.wait(v_full.index(v_slot), v_phase)
                        acc, p, den, shrink, top = warpgroup_mma_wait(0, deps=[o, p, den, shrink, top])
                        sync()
                        mbarrier.arrive(v_empty.index(v_slot), count=1)
                        v_slot += 1
                        if v_slot == STAGES:
                            v_slot = 0
                            v_phase ^= 1
                        acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
                        a = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
                    mbarrier.wait(v_full.index(v_slot), v_phase)
                    o = warpgroup_mma(a, v_smem.index(v_slot).reshape([BN, D]), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=[o])
                    sync()
                    mbarrier.arrive(v_empty.index(v_slot), count=1)
                    v_slot += 1
                    if v_slot == STAGES:
                        v_slot = 0
                        v_phase ^= 1
                # -- sink, division, stores
                rows = row0 + w * ROWS + gl.arange(0, ROWS, S_ROWS)
                top = gl.where(top == float("-inf"), top, top * c)
                alone = den == 0.0  # the row saw no key
                value = top + gl.log2(gl.where(alone, 1.0, den)) * LN2
                weight = 1.0 / gl.where(alone, 1.0, den)
                if sinks is not None:
                    sink = gl.load(sinks + head * PACK + rows % PACK).to(gl.float32)
                    value = gl.where(alone, float("-inf"), value)
                    most = gl.maximum(value, sink)
                    most = gl.where(most == float("-inf"), 0.0, most)
                    total = gl.exp2((value - most) * LOG2E) + gl.exp2((sink - most) * LOG2E)
                    weight = weight * gl.where(alone, 0.0, gl.exp2((value - most) * LOG2E) / gl.where(total == 0.0, 1.0, total))
                    value = gl.where(total == 0.0, float("-inf"), most + gl.log2(gl.where(total == 0.0, 1.0, total)) * LN2)
                else:
                    value = gl.where(alone, float("-inf"), value)
                if lse is not None:
                    before = q_first.to(gl.int64) if cu_q is not None else b.to(gl.int64) * len_q
                    at = (before + rows // PACK) * (heads * PACK) + head * PACK + rows % PACK
                    gl.store(lse + at, value, mask=rows < len_q * PACK)
                acc = acc * gl.convert_layout(weight, O_ROWS)[:, None]
                q.store(acc.to(DTYPE))
                sync()
                o_rows = row0 + w * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
                o_dims = gl.arange(0, D, gl.SliceLayout(0, OUT))
                o_at = b.to(gl.int64) * o_b + (q_first + o_rows // PACK).to(gl.int64) * o_s + (head * PACK + o_rows % PACK).to(
                    gl.int64) * o_h
                gl.store(out + o_at[:, None] + o_dims[None, :], q.load(OUT), mask=(o_rows < len_q * PACK)[:, None])
                fence_async_shared()  # Q's buffer was written by ordinary stores; TMA writes it next
                sync()
                mbarrier.arrive(q_empty.index(w), count=1)
                q_phase ^= 1


@gluon.jit
def attend_hopper(
    q_desc, k_desc, v_desc, out, lse, used_k, cu_q, cu_k, sinks, scale, window_left, window_right,
    o_b, o_s, o_h, k_h, v_h, batch, heads, len_q, len_k, programs, group,
    NC: gl.constexpr, PACK: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SEARCH: gl.constexpr, TURNS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
):
    """heads: packs of query heads; k_h, v_h: elements between kv heads; programs: tiles; group: heads walked together."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(DTYPE, [NC] + q_desc.block_shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES] + k_desc.block_shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES] + v_desc.block_shape, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [NC, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [NC, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [NC, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(NC):
        mbarrier.init(q_full.index(w), count=1)
        mbarrier.init(q_empty.index(w), count=1)
        mbarrier.init(turn.index(w), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NC)
        mbarrier.init(v_empty.index(i), count=NC)
    fence_async_shared()
    given = (q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty, turn,
             out, lse, sinks, cu_q, cu_k, used_k, scale, window_left, window_right, o_b, o_s, o_h, batch, heads, len_q, len_k,
             programs, group)
    feed = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            cu_q, cu_k, used_k, window_left, window_right, batch, heads, len_q, len_k, k_h, v_h, programs, group)
    if NC == 2:
        gl.warp_specialize([(consume, (given, 0, NC, PACK, BN, D, STAGES, LEFT, RIGHT, SEARCH, TURNS)),
                            (consume, (given, 1, NC, PACK, BN, D, STAGES, LEFT, RIGHT, SEARCH, TURNS)),
                            (produce, (feed, NC, PACK, G, BN, D, STAGES, LEFT, RIGHT, SEARCH))], [4, 1], [CONSUMER_REGISTERS, 24])
    else:
        gl.warp_specialize([(consume, (given, 0, NC, PACK, BN, D, STAGES, LEFT, RIGHT, SEARCH, TURNS)),
                            (consume, (given, 1, NC, PACK, BN, D, STAGES, LEFT, RIGHT, SEARCH, TURNS)),
                            (consume, (given, 2, NC, PACK, BN, D, STAGES, LEFT, RIGHT, SEARCH, TURNS)),
                            (produce, (feed, NC, PACK, G, BN, D, STAGES, LEFT, RIGHT, SEARCH))], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, 32])
