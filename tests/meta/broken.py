"""Broken backends: the toy with one step wrong, each a fault that a released kernel has had, and the rule that must catch it.

`@breaks(rule, test)` names the rule and a test of it that has to fail; everything else about a toy is right.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from toy import INF, Toy

from portattn.errors import NoBackendError


class Broken(NamedTuple):
    adapter: type
    rule: str
    test: str  # the filter that the meta test runs
    manifest: dict[str, Any]


BROKEN: dict[str, Broken] = {}


def breaks(rule: str, test: str, **manifest: Any):
    def keep(adapter: type) -> type:
        BROKEN[adapter.__name__] = Broken(adapter, rule, test, manifest)
        return adapter

    return keep


# ------------------------------------------------------------------ masks
@breaks("C-ALIGN", "test_causal_row_sees_exactly")
class TopLeftMask(Toy):
    def position(self, len_q, len_k):
        return torch.arange(len_q)


@breaks("C-ALIGN", "test_future_keys_do_not_change")
class CausalOncePerFourRows(Toy):
    def visible(self, call, len_q, len_k):
        seen = super().visible(call, len_q, len_k)
        return seen[(torch.arange(len_q) // 4 * 4 + 3).clamp(max=max(len_q - 1, 0))] if call.causal else seen


@breaks("C-WINDOW", "test_window_is_inclusive")
class WindowLeftOffByOne(Toy):
    def visible(self, call, len_q, len_k):
        return super().visible(call._replace(window_left=call.window_left + 1) if call.window_left >= 0 else call, len_q, len_k)


@breaks("C-WINDOW", "test_window_is_inclusive")
class WindowRightOffByOne(Toy):
    def visible(self, call, len_q, len_k):
        return super().visible(call._replace(window_right=max(call.window_right - 1, 0)) if call.window_right > 0 else call,
                               len_q, len_k)


@breaks("C-WINDOW", "test_window_of_one_open_side")
class WindowOnlyWithBothSides(Toy):
    def visible(self, call, len_q, len_k):
        return super().visible(call if min(call.window_left, call.window_right) >= 0 else call._replace(window_left=-1,
            window_right=-1), len_q, len_k)


@breaks("C-WINDOW", "test_no_window_touches_a_sink")
class WindowHidesSinks(Toy):
    def sinks(self, call):
        return None if call.window_left >= 0 else call.sinks


# ------------------------------------------------------------------ empty rows
@breaks("C-EMPTY", "test_a_row_without_keys")
class EmptyRowNaN(Toy):
    def softmax(self, s, sinks):
        p, lse = super().softmax(s, sinks)
        return p.masked_fill((s == -INF).all(-1, keepdim=True), float("nan")) if s.shape[-1] else p, lse

    def sequence(self, call, b, q, k, v):
        out, lse = super().sequence(call, b, q, k, v)
        return (out if len(k) else out * float("nan")), lse


@breaks("C-EMPTY", "test_a_row_without_keys")
class EmptyRowLsePlusInfinity(Toy):
    def lse(self, lse):
        return lse.masked_fill(lse == -INF, INF)


@breaks("C-EMPTY", "test_rows_masked_by_bias")
class EmptyRowLseZero(Toy):
    def lse(self, lse):
        return lse.masked_fill(lse == -INF, 0.0)


@breaks("C-EMPTY", "test_rows_masked_by_bias")
class EmptyRowAverages(Toy):
    def scores(self, call, q, k, b):
        return super().scores(call, q, k, b).clamp(min=-1e30)


@breaks("C-EMPTY", "test_a_nan_query_stays_nan")
class NaNBecomesZero(Toy):
    def sequence(self, call, b, q, k, v):
        out, lse = super().sequence(call, b, q, k, v)
        return out.nan_to_num(), lse


# ------------------------------------------------------------------ the formula
@breaks("C-NODROP", "test_every_argument_changes")
class SinksIgnored(Toy):
    def sinks(self, call):
        return None


@breaks("C-NODROP", "test_every_argument_changes")
class SoftcapIgnored(Toy):
    def soften(self, s, cap):
        return s


@breaks("C-NODROP", "test_every_argument_changes")
class AlibiIgnoredInDecode(Toy):
    def slopes(self, call, b):
        return None if call.max_seqlen_q == 1 else super().slopes(call, b)


@breaks("C-NODROP", "test_every_argument_changes")
class SequsedIgnored(Toy):
    def attention(self, call, bound):
        return super().attention(call._replace(seqused_k=None), bound)


@breaks("C-ORDER", "test_softcap_comes_before")
class SoftcapAfterBias(Toy):
    def scores(self, call, q, k, b):
        return self.soften(super().scores(call._replace(softcap=0.0), q, k, b), call.softcap)


@breaks("C-ORDER", "test_softcap_saturates")
class SoftcapByExponentials(Toy):
    def soften(self, s, cap):
        if not cap:
            return s
        e = torch.exp(2 * s / cap)
        return cap * (e - 1) / (e + 1)


@breaks("C-ORDER", "test_every_broadcast_form")
class BiasOfTheFirstBatch(Toy):
    """A bias of one head is taken for a bias of one batch."""

    def bias(self, call, b, shape):
        one_head = call.bias is not None and (call.bias.shape[1] == 1 or call.bias.stride(1) == 0)
        return super().bias(call, 0 if one_head else b, shape)


@breaks("C-ORDER", "test_the_order_of_the_formula")
class AlibiFromTheTopLeft(Toy):
    def scores(self, call, q, k, b):
        slopes = self.slopes(call, b)
        s = super().scores(call._replace(alibi_slopes=None), q, k, b)
        return s if slopes is None else s - slopes.float()[:, None,
                                                           None] * (torch.arange(len(q))[:, None] - torch.arange(len(k))).abs()


@breaks("C-ORDER", "test_the_sink_is_not_scaled")
class SinkIsScaled(Toy):
    def sinks(self, call):
        return None if call.sinks is None else call.sinks * call.softmax_scale


@breaks("C-ORDER", "test_large_logits")
class LogitsInFloat16(Toy):
    def soften(self, s, cap):
        return super().soften(s.half().float(), cap)


@breaks("C-ORDER", "test_weights_sum_to_one")
class SumOverHalfAWave(Toy):
    def softmax(self, s, sinks):
        p, lse = super().softmax(s, sinks)
        return (p / p[..., :32].sum(-1, keepdim=True).clamp(min=1e-9) if p.shape[-1] > 32 else p), lse


@breaks("C-TOL", "test_error_is_at_most")
class Float32ThroughBfloat16(Toy):
    def sequence(self, call, b, q, k, v):
        return super().sequence(call, b, q.bfloat16(), k.bfloat16(), v.bfloat16())


@breaks("C-TOL", "test_values_with_a_common_offset")
class SumsIn16Bits(Toy):
    def sequence(self, call, b, q, k, v):
        heads = self.kv_head(q.shape[1], k.shape[1])
        p, lse = self.softmax(self.scores(call, q.float(), k.float()[:, heads], b), self.sinks(call))
        out = torch.zeros(len(q), q.shape[1], v.shape[-1], dtype=call.q.dtype)
        for j in range(0, len(k), 16):
            out = out + torch.einsum("hij,jhe->ihe", p[..., j : j + 16], v[j : j + 16, heads].float()).to(call.q.dtype)
        return out.float(), lse


# ------------------------------------------------------------------ lse and types
@breaks("C-LSE", "test_lse_of_equal_scores")
class LseBaseTwo(Toy):
    def lse(self, lse):
        return lse / 0.6931471805599453


@breaks("C-LSE", "test_lse_is_natural")
class LseWithoutSink(Toy):
    def softmax(self, s, sinks):
        return super().softmax(s, sinks)[0], super().softmax(s, None)[1]


@breaks("C-LSE", "test_lse_is_natural")
class LseHeadsFirst(Toy):
    def finish(self, call, out, lse):
        return super().finish(call, out, lse.transpose(-1, -2).contiguous())


@breaks("C-DTYPE", "test_out_has_the_type_of_q")
class OutTypeIgnored(Toy):
    def finish(self, call, out, lse):
        return (out, lse) if call.return_lse else out


@breaks("C-DTYPE", "test_out_is_filled")
class OutReplaced(Toy):
    def finish(self, call, out, lse):
        return super().finish(call._replace(out=None), out, lse)


@breaks("C-DTYPE", "test_out_is_filled")
class OutFilledBesideItsRows(Toy):
    def finish(self, call, out, lse):
        if call.out is not None and not call.out.is_contiguous():
            call.out.as_strided(call.out.shape, call.out.stride(), max(call.out.storage_offset() - 1, 0)).fill_(0)
        return super().finish(call, out, lse)


@breaks("C-DTYPE", "test_a_new_out_is_contiguous")
class OutTransposed(Toy):
    def finish(self, call, out, lse):
        got = super().finish(call, out, lse)
        turn = lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2)
        return (turn(got[0]), got[1]) if call.return_lse else turn(got)


@breaks("C-DTYPE", "test_every_byte")
class Float8ReadAsFnuz(Toy):
    def read(self, cache, table, length, scale, b):
        if cache.dtype == torch.float8_e4m3fn:
            cache = cache.view(torch.float8_e4m3fnuz)
        return super().read(cache, table, length, scale, b)


# ------------------------------------------------------------------ heads and memory
@breaks("C-GQA", "test_each_query_head")
class HeadsInterleaved(Toy):
    def kv_head(self, heads_q, heads_kv):
        return torch.arange(heads_q) % heads_kv


@breaks("C-GQA", "test_groups")
class GroupsRoundedUpToAPowerOfTwo(Toy):
    def kv_head(self, heads_q, heads_kv):
        group = 1 << (heads_q // heads_kv - 1).bit_length()
        return (torch.arange(heads_q) // group).clamp(max=heads_kv - 1)


@breaks("C-DIM", "test_head_dims")
class HeadDimTailDropped(Toy):
    def scores(self, call, q, k, b):
        return super().scores(call, q[..., : max(q.shape[-1] // 8 * 8, 1)], k[..., : max(q.shape[-1] // 8 * 8, 1)], b)


@breaks("C-DIM", "test_values_of_another_head_dim")
class ValuesOfQHeadDim(Toy):
    def sequence(self, call, b, q, k, v):
        out, lse = super().sequence(call, b, q, k, v)
        out[..., q.shape[-1] :] = 0
        return out, lse


def wrapped(x: torch.Tensor) -> torch.Tensor:
    """x read with offsets that have wrapped to signed 32 bits."""
    pieces = []
    for i in range(len(x)):
        offset = (i * x.stride(0) + (1 << 31)) % (1 << 32) - (1 << 31)
        pieces.append(torch.as_strided(x, x.shape[1:], x.stride()[1:], x.storage_offset() + offset))
    return torch.stack(pieces) if pieces else x


@breaks("C-STRIDE", "beyond_32_bits_between_batches")
class Int32OffsetsBetweenBatches(Toy):
    def attention(self, call, bound):
        return super().attention(call._replace(k=wrapped(call.k)) if call.block_table is None and call.q.dim() == 4 else call,
                                 bound)


@breaks("C-STRIDE", "beyond_32_bits_between_pages")
class Int32OffsetsBetweenPages(Toy):
    def read(self, cache, table, length, scale, b):
        return super().read(wrapped(cache), table, length, scale, b)


@breaks("C-STRIDE", "an_append_beyond_32_bits")
class Int32OffsetsInAnAppend(Toy):
    def write(self, cache, slot, row, scale, b):
        page, at = divmod(slot, cache.shape[1])
        offset = (page * cache.stride(0) + (1 << 31)) % (1 << 32) - (1 << 31)
        wrong = torch.as_strided(cache, (1, *cache.shape[1:]), cache.stride(), cache.storage_offset() + offset)
        super().write(wrong, at, row, scale, b)


@breaks("C-STRIDE", "test_rows_and_heads_swapped")
class StridesOfAContiguousTensor(Toy):
    def attention(self, call, bound):
        flat = lambda x: torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())
        return super().attention(call._replace(k=flat(call.k)), bound)


@breaks("C-STRIDE", "test_expanded_tensors")
class StrideZeroTakenForOne(Toy):
    def attention(self, call, bound):
        if call.block_table is None and call.k.dim() == 4 and call.k.stride(0) == 0:
            call = call._replace(k=call.k * torch.arange(1, len(call.k) + 1)[:, None, None, None])
        return super().attention(call, bound)


@breaks("C-STRIDE", "test_nothing_beside_the_tensors")
class ReadsPastTheEnd(Toy):
    def attention(self, call, bound):
        k, v = call.k, call.v
        if k.dim() == 4 and call.block_table is None and (room := k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()) > 0:
            more = (k.shape[0], k.shape[1] + 1, *k.shape[2:])
            reach = sum((n - 1) * s for n, s in zip(more, k.stride())) + 1 if k.numel() else room + 1
            if reach <= room:
                wide = torch.as_strided(k, more, k.stride(), k.storage_offset())
                k = wide[:, :-1] + 0 * wide[:, -1:]
        return super().attention(call._replace(k=k, v=v), bound)


def packed(x: torch.Tensor | None) -> torch.Tensor | None:
    """x read as if its rows followed each other."""
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or not x.numel() or x.untyped_storage().nbytes() < x.element_size() * (x.storage_offset() + x.numel()):
        return x
    return torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())


@breaks("C-STRIDE", "test_strided_tables")
class RowsOfATableFollowEachOther(Toy):
    def attention(self, call, bound):
        return super().attention(call._replace(block_table=packed(call.block_table)), bound)


@breaks("C-STRIDE", "test_strided_slopes")
class SlopesOfSequencesFollowEachOther(Toy):
    def attention(self, call, bound):
        return super().attention(call._replace(alibi_slopes=packed(call.alibi_slopes)), bound)


@breaks("C-STRIDE", "test_strided_slopes")
class ScalesOfSequencesFollowEachOther(Toy):
    def attention(self, call, bound):
        return super().attention(call._replace(k_scale=packed(call.k_scale), v_scale=packed(call.v_scale)), bound)


# ------------------------------------------------------------------ paged caches
@breaks("C-LEN", "test_an_append_lands")
class LastPageIgnored(Toy):
    def read(self, cache, table, length, scale, b):
        page = cache.shape[1]
        rows = super().read(cache, table, length, scale, b)
        return torch.cat([rows[: length // page * page], torch.zeros_like(rows[length // page * page :])])


@breaks("C-LEN", "test_poison_in_k_alone")
class UnusedSlotsLeak(Toy):
    def read(self, cache, table, length, scale, b):
        rows = super().read(cache, table, length, scale, b)
        if length % cache.shape[1]:
            last = cache[int(table[length // cache.shape[1]])]
            rows = rows + 0 * last[length % cache.shape[1] :].float().sum(0)
        return rows


@breaks("C-LEN", "test_table_entries_past")
class TableTailDereferenced(Toy):
    def read(self, cache, table, length, scale, b):
        if int(table.max()) >= len(cache) or int(table.min()) < 0:
            raise IndexError("page id out of range")
        return super().read(cache, table, length, scale, b)


@breaks("C-LEN", "test_an_append_lands")
class LengthBeforeTheAppend(Toy):
    def length(self, call, b):
        new = 0 if call.k_new is None else (call.k_new.shape[1] if call.k_new.dim() == 4 else 0)
        return super().length(call, b) + (new if super().length(call, b) + new <= call.max_seqlen_k else 0)


@breaks("C-LEN", "test_tokens_at_negative_positions")
class PaddedRowsAreWritten(Toy):
    def first_written(self):
        return -(1 << 30)

    def write(self, cache, slot, row, scale, b):
        super().write(cache, slot % (cache.shape[0] * cache.shape[1]), row, scale, b)


@breaks("C-LEN", "test_tokens_at_negative_positions")
class NegativeLengthsEndAnAppend(Toy):
    def length(self, call, b):
        return int(call.kv_lens[b]) if call.k_new is not None else super().length(call, b)


@breaks("C-LEN", "test_tokens_at_negative_positions")
class LengthsAreClampedInPlace(Toy):
    def length(self, call, b):
        return int(call.kv_lens.clamp_(min=0)[b])


@breaks("C-LEN", "test_lengths_around_tile_edges")
class ShortTailOf256IsNaN(Toy):
    def sequence(self, call, b, q, k, v):
        out, lse = super().sequence(call, b, q, k, v)
        return (out * float("nan") if 241 <= len(k) <= 255 else out), lse


@breaks("C-EMPTY", "test_negative_lengths")
class NegativeLengthsCountFromTheEnd(Toy):
    def length(self, call, b):
        return abs(int(call.kv_lens[b]))


@breaks("C-PAGE", "test_page_ids_beyond_16_bits")
class PageIdsOf16Bits(Toy):
    def read(self, cache, table, length, scale, b):
        return super().read(cache, table % 65536, length, scale, b)


@breaks("C-PAGE", "test_negative_slots")
class MinusOneWritesTheLastSlot(Toy):
    def cache_append(self, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, bound):
        super().cache_append(k, v, k_cache, v_cache, slot_mapping % (k_cache.shape[0] * k_cache.shape[1]), k_scale, v_scale,
                             bound)


@breaks("C-PAGE", "test_cache_append_scales")
class E5m2BecomesInfinity(Toy):
    """The type has infinities, and a plain conversion gives them."""

    def write(self, cache, slot, row, scale, b):
        if cache.dtype != torch.float8_e5m2:
            return super().write(cache, slot, row, scale, b)
        row = row.float() / self.scale(scale, b)
        limit = torch.finfo(cache.dtype).max
        cache[slot // cache.shape[1], slot % cache.shape[1]] = torch.where(row.abs() > limit, row.sign() * INF, row).to(cache.dtype)


@breaks("C-PAGE", "test_cache_append_scales")
class Float8DoesNotSaturate(Toy):
    def write(self, cache, slot, row, scale, b):
        row = row.float() / self.scale(scale, b)
        limit = torch.finfo(cache.dtype).max
        cache[slot // cache.shape[1], slot % cache.shape[1]] = row.masked_fill(row.abs() > limit, float("nan")).to(cache.dtype)


@breaks("C-PAGE", "test_cache_append_scales")
class NaNIsStoredAsTheLargestNumber(Toy):
    def write(self, cache, slot, row, scale, b):
        super().write(cache, slot, row.float().nan_to_num(nan=1e9), scale, b)


@breaks("C-PAGE", "test_page_sizes")
class PagesOf16Only(Toy):
    def read(self, cache, table, length, scale, b):
        return super().read(cache, table, length, scale, b) * (1.0 if cache.shape[1] % 16 == 0 else 0.5)


@breaks("C-ROWS", "test_nan_of_one_sequence")
class BatchMatesLeak(Toy):
    def attention(self, call, bound):
        got = super().attention(call, bound)
        out = got[0] if call.return_lse else got
        out += 0 * out.flatten(0, -3)[:1].sum() if out.numel() else 0
        return got


@breaks("C-ROWS", "test_rows_past_the_last_sequence")
class LastSequenceTakesTheRest(Toy):
    def spans(self, call):
        found = list(super().spans(call))
        if call.cu_seqlens_k is not None and call.seqused_k is None and found:
            b, rows, keys = found[-1]
            found[-1] = (b, rows, slice(keys.start, call.k.shape[0]))
        return found


@breaks("C-ROWS", "test_each_sequence_has_its_own")
class SlopesOfTheFirstSequence(Toy):
    def slopes(self, call, b):
        return super().slopes(call, 0)


# ------------------------------------------------------------------ rotary and scales
@breaks("C-ROPE", "test_positions_pairings")
class AttendsToUnturnedKeys(Toy):
    def attention(self, call, bound):
        if call.k_new is None or call.rotary_cos is None:
            return super().attention(call, bound)
        got = super().attention(call._replace(k=call.k.clone(), rotary_cos=torch.ones_like(call.rotary_cos),
                                              rotary_sin=torch.zeros_like(call.rotary_sin)), bound)
        super().attention(call._replace(out=None), bound)  # the cache itself is right
        return got


@breaks("C-ROPE", "test_positions_pairings")
class CacheStoresUnturnedKeys(Toy):
    def append(self, call, b, rows, length):
        super().append(call._replace(rotary_cos=None), b, rows, length)


@breaks("C-ROPE", "test_positions_pairings")
class RotaryOffByOne(Toy):
    def angle_position(self, len_q, len_k):
        return self.position(len_q, len_k) + 1


@breaks("C-ROPE", "test_positions_pairings")
class QTurnsAtTheLength(Toy):
    def angle_position(self, len_q, len_k):
        return torch.full((len_q,), max(len_k - len_q, 0))


@breaks("C-NODROP", "test_v_scale_and_pairing")
class PairingIgnored(Toy):
    def turn(self, call, x, at):
        return super().turn(call._replace(rotary_interleaved=False), x, at)


@breaks("C-NODROP", "test_every_argument_changes")
class KScaleIgnored(Toy):
    def attention(self, call, bound):
        return super().attention(call._replace(k_scale=None), bound)


@breaks("C-ROPE", "test_positions_pairings")
class QIsTurnedInPlace(Toy):
    def attention(self, call, bound):
        got = super().attention(call, bound)
        if call.rotary_cos is not None:
            call.q.mul_(0.5)
        return got


# ------------------------------------------------------------------ merge, splits, gradients
@breaks("C-MERGE", "test_the_empty_state")
class EmptyStateSpoilsAMerge(Toy):
    def merge_states(self, outs, lses, sinks, bound):
        out, lse = super().merge_states(outs, lses, sinks, bound)
        return out + (0 * outs.float().sum(0)).to(out.dtype), lse


@breaks("C-MERGE", "test_merge_with_sinks")
class MergeOverflows(Toy):
    def merge_states(self, outs, lses, sinks, bound):
        weight = torch.exp(lses)
        total = weight.sum(0) + (0 if sinks is None else torch.exp(sinks.float()))
        return ((weight[..., None] * outs.float().nan_to_num()).sum(0) / total[...,
                                                                               None].clamp(min=1e-38)).to(outs.dtype), total.log()


@breaks("C-MERGE", "test_merge_with_sinks")
class MergeIgnoresSinks(Toy):
    def merge_states(self, outs, lses, sinks, bound):
        return super().merge_states(outs, lses, None, bound)


@breaks("C-SPLIT", "test_num_splits_changes")
class EmptySplitsCount(Toy):
    def sequence(self, call, b, q, k, v):
        out, lse = super().sequence(call, b, q, k, v)
        return (out * 0.9 if call.num_splits > len(k) > 0 else out), lse


@breaks("C-SPLIT", "test_the_same_call_gives")
class BitsChangeFromCallToCall(Toy):
    calls = 0

    def sequence(self, call, b, q, k, v):
        self.calls += 1
        out, lse = super().sequence(call, b, q, k, v)
        return out * (1 + 1e-6 * (self.calls % 3)), lse


@breaks("C-SPLIT", "test_batch_invariant_rows")
class BitsDependOnTheBatch(Toy):
    def sequence(self, call, b, q, k, v):
        out, lse = super().sequence(call, b, q, k, v)
        batch = len(call.cu_seqlens_q) - 1 if call.cu_seqlens_q is not None else len(call.q)
        return out * (1 + 1e-6 * (batch > 1)), lse + 1e-6 * (batch > 1)


@breaks("C-GRAD", "test_where_undeclared")
class GradientsDetached(Toy):
    def attention(self, call, bound):
        with torch.no_grad():
            return super().attention(call, bound)


@breaks("C-GRAD", "test_gradients_match")
class GradientOfEmptyRowsIsNaN(Toy):
    """A root of 0 whose derivative is infinite, times 0."""

    def sequence(self, call, b, q, k, v):
        out, lse = super().sequence(call, b, q, k, v)
        out, empty = out.clone(), lse == -INF
        out[empty] = out[empty] + (0 * q[empty].float() ** 2).sum(-1, keepdim=True).sqrt()
        return out, lse


@breaks("C-GRAD", "test_gradients_of_gradients")
class GradientsOfGradientsDropped(Toy):
    """Gradients that are no part of a graph."""

    def attention(self, call, bound):
        class Once(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, out):
                ctx.save_for_backward(q, out)
                return out.clone()

            @staticmethod
            @once_differentiable
            def backward(ctx, d_out):
                with torch.enable_grad():
                    q = ctx.saved_tensors[0].detach().requires_grad_()
                    out = Toy.attention(self, call._replace(q=q, return_lse=False), bound)
                return torch.autograd.grad(out, q, d_out)[0], None

        got = super().attention(call, bound)
        return got if call.return_lse or not call.q.requires_grad else Once.apply(call.q, got.detach())


@breaks("C-GRAD", "test_gradients_match")
class GradientOfSinksDropped(Toy):
    def sinks(self, call):
        return None if call.sinks is None else call.sinks.detach()


# ------------------------------------------------------------------ manifests
@breaks("C-NODROP", "test_declared_linear_memory", memory="linear")
class QuadraticDeclaredLinear(Toy):
    pass


@breaks("C-NODROP", "test_what_is_declared_runs")
class DeclaresWhatItLacks(Toy):
    def attention(self, call, bound):
        if call.alibi_slopes is not None:
            raise NotImplementedError("alibi")
        return super().attention(call, bound)


@breaks("C-NODROP", "test_what_is_declared_runs")
class RefusesWhatItDeclares(Toy):
    def attention(self, call, bound):
        if call.softcap:
            raise NoBackendError("no", bound.problem, {bound.backend: ()})
        return super().attention(call, bound)


@breaks("C-GRAD", "test_gradients_match")
class KwargsDropped(Toy):
    """Only the plainest gradient is right: a backward written before softcap and sinks were added."""

    def attention(self, call, bound):
        if call.q.requires_grad and (call.softcap or call.sinks is not None):
            plain = super().attention(call._replace(softcap=0.0, sinks=None, return_lse=False), bound)
            with torch.no_grad():
                right = super().attention(call._replace(return_lse=False), bound)
            return plain + (right - plain).detach()
        return super().attention(call, bound)
