"""Continuous batching in a page: sequences join and leave while others run, and attention is three portattn calls.

A step is one of two things. If a waiting sequence finds a seat and pages, every such sequence is prefilled in one
ragged call (attention_varlen). Otherwise all running sequences advance by one token in one call over the paged cache
(attention_paged). Both write their keys and values with cache_append first.

When a running sequence needs a page and none is free, the one that joined last gives its pages back and waits; later
it is prefilled again with what it had generated. The oldest sequence is never sent away, and a request that the whole
cache could not hold is refused when it is submitted, so some sequence always advances.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

import portattn

from .cache import OutOfPages, PagedCache
from .model import Llama


@dataclass(eq=False)
class Sequence:
    """One request. `tokens` is the prompt and what was generated; the last token is not in the cache until it is used."""

    tokens: list[int]
    num_prompt: int
    max_new_tokens: int
    stop: frozenset[int] = frozenset()
    pages: list[int] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def finished(self) -> bool:
        new = len(self.tokens) - self.num_prompt
        return new >= self.max_new_tokens or new > 0 and self.tokens[-1] in self.stop


@dataclass
class Stats:
    """What was done, in tokens, steps and seconds."""

    prefill_tokens: int = 0
    prefill_steps: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    evictions: int = 0


class Engine:
    """Greedy generation for many sequences at once.

    Args:
        model: the weights; its device and dtype are the cache's.
        num_pages, page_size: the cache holds num_pages * page_size tokens.
        max_batch: most sequences that run at once.
    """

    def __init__(self, model: Llama, *, num_pages: int, page_size: int = 16, max_batch: int = 8):
        c = model.config
        self.model, self.max_batch = model, max_batch
        self.cache = PagedCache(c.num_layers, num_pages, page_size, c.num_heads_kv, c.head_dim, model.dtype, model.device)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order in which they joined
        self.stats = Stats()

    def submit(self, prompt: list[int], max_new_tokens: int, stop: frozenset[int] = frozenset()) -> Sequence:
        """Queues a request; raises ValueError for one that could never run to its end."""
        if not prompt or max_new_tokens < 1:
            raise ValueError(
                f"a request needs a prompt and max_new_tokens of at least 1, got {len(prompt)} tokens and {max_new_tokens}"
            )
        longest = len(prompt) + max_new_tokens
        if longest > self.model.config.max_position:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones exceed the model's {self.model.config.max_position} positions"
            )
        if self.cache.pages_for(longest) > self.cache.num_pages:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones need {self.cache.pages_for(longest)} pages of "
                f"{self.cache.page_size} tokens; the cache has {self.cache.num_pages}"
            )
        sequence = Sequence(list(prompt), len(prompt), max_new_tokens, stop)
        self.waiting.append(sequence)
        return sequence

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Prefills those that can join, or else advances all that run; returns the sequences that got a token."""
        joining = self._admit()
        started = time.perf_counter()
        if joining:
            self._prefill(joining)
            self.stats.prefill_seconds += time.perf_counter() - started
        elif self.running:
            self._make_room()
            self._decode(self.running)
            self.stats.decode_seconds += time.perf_counter() - started
        advanced = joining or list(self.running)
        for sequence in advanced:
            if sequence.finished:
                self.running.remove(sequence)
                self.cache.release(sequence.pages)
        return advanced

    # ------------------------------------------------------------------ who runs
    def _admit(self) -> list[Sequence]:
        """Moves waiting sequences to running, first come first served, while there are seats and pages."""
        joining: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_batch:
            try:
                self.cache.grow(self.waiting[0].pages, len(self.waiting[0].tokens))
            except OutOfPages:
                break
            joining.append(self.waiting.popleft())
            self.running.append(joining[-1])
        return joining

    def _make_room(self) -> None:
        """Gives every running sequence a slot for its last token; the youngest make way where pages run out."""
        for sequence in list(self.running):
            while sequence in self.running:
                try:
                    self.cache.grow(sequence.pages, len(sequence.tokens))
                    break
                except OutOfPages:
                    youngest = self.running.pop()
                    self.cache.release(youngest.pages)
                    self.waiting.appendleft(youngest)
                    self.stats.evictions += 1

    # ------------------------------------------------------------------ what they compute
    def _prefill(self, sequences: list[Sequence]) -> None:
        """Runs all tokens of the sequences in one ragged batch and takes the token after each."""
        lengths = [len(s.tokens) for s in sequences]
        tokens = self._ints([t for s in sequences for t in s.tokens])
        positions = self._ints([p for n in lengths for p in range(n)])
        slots = self._ints([slot for s, n in zip(sequences, lengths) for slot in self.cache.slots(s.pages, 0, n)])
        cu_seqlens = torch.nn.functional.pad(self._ints(lengths).cumsum(0, dtype=torch.int32), (1, 0))
        longest = max(lengths)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            portattn.cache_append(k, v, self.cache.k[layer], self.cache.v[layer], slots)
            return portattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)

        self._take(sequences, self.model(tokens, positions, attend, rows=cu_seqlens[1:] - 1))
        self.stats.prefill_tokens += sum(lengths)
        self.stats.prefill_steps += 1

    def _decode(self, sequences: list[Sequence]) -> None:
        """Runs the last token of each sequence against its pages and takes the token after it."""
        lengths = [len(s.tokens) for s in sequences]
        tokens = self._ints([s.tokens[-1] for s in sequences])
        slots = self._ints([slot for s, n in zip(sequences, lengths) for slot in self.cache.slots(s.pages, n - 1, n)])
        kv_lens = self._ints(lengths)
        block_table = self.cache.block_table([s.pages for s in sequences])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k_cache, v_cache = self.cache.k[layer], self.cache.v[layer]
            portattn.cache_append(k, v, k_cache, v_cache, slots)
            return portattn.attention_paged(q.unsqueeze(1), k_cache, v_cache, block_table, kv_lens, causal=True).squeeze(1)

        self._take(sequences, self.model(tokens, kv_lens - 1, attend))
        self.stats.decode_tokens += len(sequences)
        self.stats.decode_steps += 1

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.model.device, non_blocking=True)

    def _take(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Appends the likeliest token to each sequence; the one wait for the device in a step."""
        for sequence, token in zip(sequences, logits.argmax(-1).tolist()):
            sequence.tokens.append(token)

    # ------------------------------------------------------------------ what serves them
    def served_by(self) -> dict[str, str]:
        """Which backend answers each of the engine's calls, by portattn.explain on tensors like theirs."""
        c, like = self.model.config, dict(dtype=self.model.dtype, device=self.model.device)
        q, k = torch.empty(2, c.num_heads_q, c.head_dim, **like), torch.empty(2, c.num_heads_kv, c.head_dim, **like)
        cu_seqlens, pair = self._ints([0, 2]).int(), self._ints([0, 1])
        k_cache, v_cache, block_table = self.cache.k[0], self.cache.v[0], self.cache.block_table([[0], [0]])
        return {
            "prefill": portattn.explain(portattn.attention_varlen, q, k, k, cu_seqlens, cu_seqlens, 2, 2, causal=True).backend,
            "decode": portattn.explain(
                portattn.attention_paged, q.unsqueeze(1), k_cache, v_cache, block_table, pair, causal=True
            ).backend,
            "cache writes": portattn.explain(portattn.cache_append, k, k, k_cache, v_cache, pair).backend,
        }
