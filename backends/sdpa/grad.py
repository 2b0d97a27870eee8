"""Gradients by recomputed tiles: forward keeps q, k, v, out and lse, backward makes each tile of probabilities again.

Memory stays O(N). Products of the backward pass run in float32 on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from portattn.device import without_autocast
from portattn.errors import ONLY_ONCE, ArgumentError

from . import arith, lengths, tiled
from .tiled import INF, Rules

_ONE_BY_ONE = ("gradients of out: wanted one at a time, or torch.func.jacrev or torch.func.vmap for many, got a batch of them by "
               "is_grads_batched=True or vectorize=True, whose vmap knows few operators")


class _Attention(torch.autograd.Function):
    """Dense attention (B, S, H, D) with lse; `lens` (q_lens, k_lens), int64 (B,) on the device; None: all count."""

    @staticmethod
    def forward(ctx, q, k, v, bias, slopes, sinks, rules: Rules, lens, limit, alone):
        rules = rules._replace(bias=bias, slopes=slopes, sinks=sinks)
        (batch, sq, hq, _), dim_v = q.shape, v.shape[-1]
        out = q.new_empty(batch, sq, hq, dim_v)
        lse = torch.empty(batch, sq, hq, dtype=torch.float32, device=q.device)
        if lens is None:
            tiled.attend(q, k, v, rules, out, lse, limit, alone)
        else:
            _forward_lengths(q, k, v, rules, lens, out, lse, limit, alone)
        ctx.save_for_backward(q, k, v, bias, slopes, sinks, out, lse)
        ctx.rules, ctx.lens, ctx.limit = rules._replace(bias=None, slopes=None, sinks=None), lens, limit
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        if any(map(is_legacy_batchedtensor, (d_out, d_lse))):
            raise ArgumentError(_ONE_BY_ONE)
        q, k, v, bias, slopes, sinks, out, lse = ctx.saved_tensors
        rules = ctx.rules._replace(bias=bias, slopes=slopes, sinks=sinks)
        need = (ctx.needs_input_grad[3], ctx.needs_input_grad[4])
        with torch.no_grad(), without_autocast(q.device.type):
            grads = _backward(q, k, v, rules, ctx.lens, out, lse, d_out, d_lse, need, ctx.limit)
        if torch.is_grad_enabled():
            grads = _Once.apply(len(grads), *grads, *ctx.saved_tensors[:6], d_out, d_lse)
        return (*grads, None, None, None, None)


class _Once(torch.autograd.Function):
    """`count` gradients as they are, a part of the graph of all that they depend on: once_differentiable of torch leaves them
    out of it where out's gradient is a constant, and a penalty on them would be lost."""

    @staticmethod
    def forward(ctx, count: int, *tensors):
        return tensors[:count]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(ONLY_ONCE)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Rules,
    lens: tuple[Tensor, Tensor] | None = None,
    limit: tiled.Limits | None = None,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Sq, Hq), differentiable once in every tensor; `alone` as in tiled.attend."""
    return _Attention.apply(
        q, k, v, rules.bias, rules.slopes, rules.sinks, rules._replace(bias=None, slopes=None, sinks=None), lens, limit, alone
    )


def _forward_lengths(q, k, v, rules, lens, out, lse, limit, alone) -> None:
    (batch, sq, hq, _), sk = q.shape, k.shape[1]
    start = torch.arange(batch, device=q.device)
    fetch_k, fetch_v = (lengths.rows_of(x.flatten(0, 1), start * sk) for x in (k, v))
    ragged = lengths.Ragged(q.flatten(0, 1), start * sq, *lens, sq, sk)
    # Rows past a length get lse -inf, and so give no gradient.
    lengths.attend(
        ragged,
        k.shape[2],
        v.shape[3],
        lambda b, at, there: (fetch_k(b, at, there), fetch_v(b, at, there)),
        rules,
        out.view(-1, hq, v.shape[3]),
        lse.view(-1, hq),
        limit or tiled.limits(q.device),
        alone,
    )


def _backward(q, k, v, rules, lens, out, lse, d_out, d_lse, need, limit):
    (batch, sq, hq, dim), (_, sk, heads, dim_v) = q.shape, v.shape
    group, offset, device = hq // heads, sk - sq, q.device
    _, left, right, softcap, bias, slopes, sinks = rules
    float32 = torch.float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=float32, device=device) for x in (q, k, v))
    d_bias = torch.zeros(bias.shape, dtype=float32, device=device) if need[0] else None
    d_slopes = torch.zeros(slopes.shape, dtype=float32, device=device) if need[1] else None
    empty = lse == -INF
    # d score = p * (d_out . v - delta), with delta = d_out . out - d_lse; a row without keys has no gradient.
    delta = (d_out.float() * out.float()).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    d_sinks = None
    if sinks is not None:
        share = (sinks.float() - lse.masked_fill(empty, 0.0)).exp()
        d_sinks = -(share * delta).masked_fill(empty, 0.0).sum((0, 1)).to(sinks.dtype)
    first, last = tiled.visible_rows(sq, sk, offset, left, right) if lens is None else (0, sq if sk else 0)
    if q.numel() == 0 or first == last:
        return _cast(dq, q), _cast(dk, k), _cast(dv, v), _cast(d_bias, bias), _cast(d_slopes, slopes), d_sinks
    limit = limit or tiled.limits(device)
    c = tiled.cut(batch, last - first, sk, group, heads, 2 * (dim + dim_v), limit)
    alpha = rules.scale / softcap if softcap else rules.scale
    q5, out_g, lse5, delta5 = (x.unflatten(2, (heads, group)) for x in (q, d_out, lse.masked_fill(empty, INF), delta))
    dq5 = dq.unflatten(2, (heads, group))
    j_all = torch.arange(sk, device=device)

    def fold(x: Tensor) -> Tensor:  # (nb, r, nh, G, d) -> (nb * nh, G * r, d)
        x = x.permute(0, 2, 3, 1, 4).to(float32)
        return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    for b0 in range(0, batch, c.batch):
        b = slice(b0, min(b0 + c.batch, batch))
        for h0 in range(0, heads, c.heads):
            h = slice(h0, min(h0 + c.heads, heads))
            nb, nh = b.stop - b0, h.stop - h0
            kh, vh = (tiled.copy_heads(x[b, :, h], float32) for x in (k, v))
            dkh, dvh = torch.zeros_like(kh), torch.zeros_like(vh)
            for lo in range(first, last, c.rows):
                hi = min(lo + c.rows, last)
                k0, k1 = tiled.visible_keys(lo, hi, offset, sk, left, right) if lens is None else (0, sk)
                rows, d_rows = fold(q5[b, lo:hi, h]), fold(out_g[b, lo:hi, h])
                shape = (nb, nh, group, hi - lo)
                row_lse, row_delta = (x[b, lo:hi, h].permute(0, 2, 3, 1).unsqueeze(-1) for x in (lse5, delta5))
                d_block = torch.zeros_like(rows)
                place = torch.arange(lo, hi, device=device)[None] + (offset if lens is None else (lens[1] - lens[0])[b, None])
                for c0 in range(k0, k1, c.keys):
                    c1 = min(c0 + c.keys, k1)
                    keys, values = kh[:, c0:c1], vh[:, c0:c1]
                    s = arith.product(rows, keys.transpose(1, 2)).mul_(alpha).view(*shape, c1 - c0)
                    t = None
                    if softcap:
                        t = s.tanh_()
                        s = t * softcap
                    if slopes is not None:
                        far = tiled.distance(place, j_all[c0:c1].expand(place.shape[0], -1))[:, None, None]
                        s = s - tiled.slopes_part(slopes, b, h, heads) * far
                    if bias is not None:
                        tiled.add_bias(s, bias, b, h, slice(lo, hi), slice(c0, c1))
                    if lens is None:
                        tiled.hide(s, lo, hi, c0, c1, offset, left, right)
                    else:
                        s = s.masked_fill(_unseen(place, j_all[c0:c1], lens[1][b], left, right)[:, None, None], -INF)
                    p = (s - row_lse).exp_()  # 0 in rows without keys, whose lse is +inf here
                    if sinks is None and c1 - c0 == k1 - k0:
                        # All keys at hand: a row's sum takes out what rounding lse, and s in another order than forward, put into all of it.
                        total = p.sum(-1, keepdim=True)
                        p.div_(total.masked_fill_(total == 0, 1.0))
                    flat = p.view(nb * nh, -1, c1 - c0)
                    dvh[:, c0:c1] += arith.product(flat.transpose(1, 2), d_rows)
                    ds = arith.product(d_rows, values.transpose(1, 2)).view(p.shape).sub_(row_delta).mul_(p)
                    if need[0]:
                        _add_bias_grad(d_bias, ds, b, h, slice(lo, hi), slice(c0, c1))
                    if need[1]:
                        per_head = (ds * far).sum((-1, -2)).flatten(1).neg_()
                        part = d_slopes.unflatten(-1, (heads, group))
                        (part[h] if slopes.dim() == 1 else part[b, h]).add_(
                            per_head.view(nb, nh, group).sum(0) if slopes.dim() == 1 else per_head.view(nb, nh, group)
                        )
                    if softcap:
                        ds = ds * (1 - t * t) * softcap
                    ds = ds.mul_(alpha).view(flat.shape)
                    d_block += arith.product(ds, keys)
                    dkh[:, c0:c1] += arith.product(ds.transpose(1, 2), rows)
                dq5[b, lo:hi, h] = d_block.view(*shape, dim).permute(0, 3, 1, 2, 4)
            dk[b, :, h] = dkh.view(nb, nh, sk, dim).transpose(1, 2)
            dv[b, :, h] = dvh.view(nb, nh, sk, dim_v).transpose(1, 2)
    return _cast(dq, q), _cast(dk, k), _cast(dv, v), _cast(d_bias, bias), _cast(d_slopes, slopes), d_sinks


def _unseen(place: Tensor, keys: Tensor, k_lens: Tensor, left: int, right: int) -> Tensor:
    """(nb, r, n): what rows at positions `place` (nb, r) must not see of `keys` (n,)."""
    hidden = (keys >= k_lens[:, None])[:, None]
    if right >= 0:
        hidden = hidden | (keys > place[..., None] + right)
    return hidden | (keys < place[..., None] - left) if left >= 0 else hidden


def _add_bias_grad(total: Tensor, ds: Tensor, b: slice, h: slice, rows: slice, keys: slice) -> None:
    """Adds ds (nb, nh, G, r, n) to its slice of the bias's gradient, summed where the bias is broadcast."""
    part = tiled.bias_part(total, b, h, rows, keys, ds.shape[2])
    part.add_(ds.sum_to_size(part.shape))


def _cast(x: Tensor | None, like: Tensor | None) -> Tensor | None:
    return x if x is None or x.dtype == like.dtype else x.to(like.dtype)


# ------------------------------------------------------------------ varlen
def varlen(
    q: Tensor, k: Tensor, v: Tensor, rules: Rules, starts_q: list[int], starts_k: list[int], ends_k: list[int]
) -> tuple[Tensor, Tensor]:
    """out (Tq, Hq, Dv) and lse (Tq, Hq): each sequence by itself. Splits and one concatenation keep backward O(N)."""
    parts, parts_lse = [], []
    pieces = [_split(q, starts_q), _split(k, starts_k), _split(v, starts_k)]
    for b in range(len(starts_q) - 1):
        own = rules._replace(slopes=rules.slopes[b]) if rules.slopes is not None and rules.slopes.dim() == 2 else rules
        used = ends_k[b] - starts_k[b]
        out, lse = attention(pieces[0][b][None], pieces[1][b][None, :used], pieces[2][b][None, :used], own)
        parts.append(out[0])
        parts_lse.append(lse[0])
    rest = q.shape[0] - starts_q[-1]
    if rest or not parts:
        nothing = _nothing(q, k, v, rules)
        parts.append(q.new_zeros(rest, q.shape[1], v.shape[2]) + nothing.to(q.dtype))
        parts_lse.append(torch.full((rest, q.shape[1]), -INF, dtype=torch.float32, device=q.device) + nothing)
    return torch.cat(parts), torch.cat(parts_lse)


def _nothing(q: Tensor, k: Tensor, v: Tensor, rules: Rules) -> Tensor:
    """float32 0 that keeps a result without sequences a part of the graph: its inputs' gradients are 0."""
    return sum(x[:0].sum(dtype=torch.float32) for x in (q, k, v, rules.slopes, rules.sinks) if x is not None)


def _split(x: Tensor, starts: list[int]) -> tuple[Tensor, ...]:
    sizes = [hi - lo for lo, hi in zip(starts, starts[1:])]
    return x.split([*sizes, x.shape[0] - starts[-1]])


def varlen_lengths(r: lengths.Ragged, k: Tensor, v: Tensor, starts_k: Tensor, rules: Rules, alone: bool) -> tuple[Tensor, Tensor]:
    """As `varlen`, with lengths on the device: each sequence padded to the bounds by gathers that are differentiable."""
    total, hq, _ = r.q.shape
    dim_v, device = v.shape[2], r.q.device
    i, j = torch.arange(r.max_q, device=device), torch.arange(r.max_k, device=device)
    parts, parts_lse, rows = [], [], []
    if total and r.max_q:
        for b in range(r.starts.shape[0]):
            exists, there = i < r.q_lens[b], j < r.k_lens[b]
            q_at = (r.starts[b] + i).masked_fill(exists.logical_not(), 0)
            k_at = (starts_k[b] + j).masked_fill(there.logical_not(), 0)
            q_b = r.q.index_select(0, q_at).masked_fill(exists.logical_not()[:, None, None], 0)
            k_b, v_b = (x.index_select(0, k_at).masked_fill(there.logical_not()[:, None, None], 0) for x in (k, v))
            own = rules._replace(slopes=rules.slopes[b]) if rules.slopes is not None and rules.slopes.dim() == 2 else rules
            out, lse = attention(q_b[None], k_b[None], v_b[None], own, (r.q_lens[b : b + 1], r.k_lens[b : b + 1]), None, alone)
            parts.append(out[0])
            parts_lse.append(lse[0])
            rows.append((r.starts[b] + i).masked_fill(exists.logical_not(), total))
    if not parts:
        nothing = _nothing(r.q, k, v, rules)
        return (r.q.new_zeros(total, hq, dim_v) + nothing.to(r.q.dtype),
                torch.full((total, hq), -INF, dtype=torch.float32, device=device) + nothing)
    to = (torch.cat(rows),)
    out = r.q.new_zeros(total + 1, hq, dim_v).index_put(to, torch.cat(parts))
    lse = torch.full((total + 1, hq), -INF, dtype=torch.float32, device=device).index_put(to, torch.cat(parts_lse))
    return out[:total], lse[:total]
