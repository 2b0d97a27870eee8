"""A paged KV cache: pages of a fixed number of tokens, handed out by a free list, found through block tables.

A sequence owns a list of pages that need not be neighbours; the token at position p lies in its page p // page_size,
at offset p % page_size. Memory is lost only in the last page of each sequence, and a page that is given back serves
any other sequence at once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OutOfPages(Exception):
    """No page is free; the scheduler decides who waits."""


class PagedCache:
    """Keys and values of every layer: `k[layer]` and `v[layer]` are (num_pages, page_size, num_heads_kv, head_dim)."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        shape = (num_layers, num_pages, page_size, num_heads_kv, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)  # what no sequence wrote is never read, so it is not cleared
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold num_tokens tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> None:
        """Adds pages to a sequence's list until it can hold num_tokens tokens; all of them, or OutOfPages and none."""
        wanted = self.pages_for(num_tokens) - len(pages)
        if wanted > len(self._free):
            raise OutOfPages
        pages.extend(self._free.pop() for _ in range(wanted))

    def release(self, pages: list[int]) -> None:
        """Takes a sequence's pages back and empties its list."""
        self._free.extend(reversed(pages))
        pages.clear()

    def slots(self, pages: list[int], start: int, stop: int) -> list[int]:
        """Slots (page * page_size + offset) of the tokens at positions start..stop-1, as cache_append wants them."""
        return [pages[p // self.page_size] * self.page_size + p % self.page_size for p in range(start, stop)]

    def block_table(self, pages: list[list[int]]) -> Tensor:
        """int32 (batch, most pages) of the sequences' page lists; entries past a list's end are never looked at."""
        width = max(map(len, pages))
        rows = [p + [-1] * (width - len(p)) for p in pages]
        return torch.tensor(rows, dtype=torch.int32).to(self.k.device, non_blocking=True)
