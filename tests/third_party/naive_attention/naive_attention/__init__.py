"""A backend out of tree, as small as one can be: plain attention, sequence by sequence, in float32.

`pip install` it, and `portattn doctor`, `backend="naive_attention"` and the conformance suite know it.
"""

import torch

INF = float("inf")


def probe(device):
    """() means: works on this device. A no is a tuple of portattn.Reason."""
    return ()


def sequence(call, q, k, v):
    """q (Lq, Hq, D), k (Lk, Hkv, D), v (Lk, Hkv, Dv) -> out (Lq, Hq, Dv), lse (Lq, Hq)."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = call.softmax_scale * torch.einsum("ihd,jhd->hij", q.float(), k)
    if call.softcap:
        s = call.softcap * torch.tanh(s / call.softcap)
    ahead = torch.arange(len(k), device=q.device) - (torch.arange(len(q), device=q.device)[:,
        None] + len(k) - len(q))  # key - position
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if call.window_left >= 0:
        hidden |= ahead < -call.window_left
    if call.window_right >= 0:  # causal is window_right = 0
        hidden |= ahead > call.window_right
    s = s.masked_fill(hidden, -INF)
    sink = s.new_full((len(s),), -INF) if call.sinks is None else call.sinks.float()
    s = torch.cat([sink[:, None, None].expand(-1, len(q), 1), s], -1)  # a key without a value; also makes Lk = 0 no special case
    lse = torch.logsumexp(s, -1)
    p = torch.softmax(s, -1)[..., 1:].masked_fill((lse == -INF)[..., None], 0.0)  # a row that sees nothing: 0, not NaN
    return torch.einsum("hij,jhe->ihe", p, v), lse.T


def attention(call, bound):
    """Dense and varlen: the call is validated, causal is folded into the window, layouts are (B, S, H, D) or (T, H, D)."""
    out = call.out if call.out is not None else call.q.new_empty(*call.q.shape[:-1], call.v.shape[-1])
    lse = call.q.new_empty(call.q.shape[:-1], dtype=torch.float32)
    if call.cu_seqlens_q is None:
        spans = [(b, b) for b in range(len(call.q))]
    else:
        cu_q, cu_k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
        used = [b - a for a, b in zip(cu_k, cu_k[1:])] if call.seqused_k is None else call.seqused_k.tolist()
        spans = [(slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b] + used[b])) for b in range(len(used))]
    for rows, keys in spans:
        out[rows], lse[rows] = sequence(call, call.q[rows], call.k[keys], call.v[keys])
    return (out, lse) if call.return_lse else out
