"""Prompts are computed once: a request starts as a fork of its prompt's pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from equivtest.decoder.follower import Follower
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Int64Array

MAX_PREFILL_ROWS = 2048
"""Prompt tokens in one forward; longer prompts go in pieces, so that activations stay small."""

PAGE_SIZE = 16

_GRAPH_LENGTH = 1024
"""Tokens that a cache on a GPU has room for at the least."""


class PromptPool:
    """Gives each request a KV sequence that holds its prompt but the last token, which the first step feeds."""

    def __init__(
        self,
        model: Model,
        kv: PagedKVCache,
        table: RequestTable,
        rows: Int64Array,
        *,
        follower: Follower | None = None,
    ) -> None:
        """rows: the table rows that will be admitted, each once. follower: what reads along."""
        self._model, self._kv, self._table, self._follower = model, kv, table, follower
        self._roots: dict[tuple[int, ...], int] = {}
        self._pending = Counter(table.requests[row].prompt_token_ids for row in rows)

    def admit(self, rows: Int64Array) -> Int64Array:
        """KV sequences for table `rows` (int64 [n]), in their order. Shared prompt pages are copied on write."""
        prompts = [self._table.requests[row].prompt_token_ids for row in rows]
        fresh = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._roots]
        for prompt in fresh:
            self._roots[prompt] = self._kv.new_sequence()
        for pieces in _packed(fresh):
            token_ids = torch.tensor([token for _, piece in pieces for token in piece], device=self._model.device)
            batch = self._kv.extend(
                np.array([self._roots[prompt] for prompt, _ in pieces]), np.array([len(piece) for _, piece in pieces])
            )
            self._model.forward(token_ids, batch, self._kv, follower=self._follower)
        sequences = [self._kv.fork(self._roots[prompt]) for prompt in prompts]
        self._pending.subtract(prompts)
        for prompt in dict.fromkeys(prompts):
            if self._pending[prompt] == 0:
                self._kv.free(np.array([self._roots.pop(prompt)]))
        return np.array(sequences, np.int64)


def cache_for(
    model: Model,
    table: RequestTable,
    *,
    max_batch: int,
    reuse: PagedKVCache | None,
    follower: Follower | None = None,
) -> PagedKVCache:
    """A cache in which the table's requests, at most `max_batch` at a time, always fit; `reuse` when it is enough.

    follower: what may read along, now or at a later call.
    """
    companion, lookahead = (None, 0) if follower is None else (follower.config, follower.lookahead)
    last_fed = table.prompt_lengths + table.max_tokens - 1 + lookahead
    private = -(-last_fed // PAGE_SIZE) - (table.prompt_lengths - 1) // PAGE_SIZE
    shared = _prompt_pages(table, max_batch)
    num_pages = max(1, int(np.sort(private)[::-1][:max_batch].sum()) + shared)
    max_sequences = 2 * max_batch + len({request.prompt_token_ids for request in table.requests})
    longest = int(last_fed.max(initial=1))
    if (
        reuse is not None
        and reuse.num_free_pages >= num_pages
        and reuse.num_free_sequences >= max_sequences
        and reuse.max_length >= longest
        and reuse.companion == companion
    ):
        return reuse
    if model.device.type == "cuda":
        # Graphs hold a cache's memory: one with room to spare serves prompts of other lengths too.
        num_pages, longest = (1 << (count - 1).bit_length() for count in (num_pages, max(longest, _GRAPH_LENGTH)))
        num_pages = max(num_pages, -(-longest // PAGE_SIZE))
    return PagedKVCache(
        model.config,
        num_pages=num_pages,
        max_sequences=max_sequences,
        page_size=PAGE_SIZE,
        dtype=model.dtype,
        device=model.device,
        companion=companion,
        lookahead=lookahead,
    )


def _prompt_pages(table: RequestTable, max_batch: int) -> int:
    """Upper bound of pages that hold prompts: those of running requests, and of prompts with requests to come."""
    first: dict[tuple[int, ...], int] = {}
    last: dict[tuple[int, ...], int] = {}
    for index, request in enumerate(table.requests):
        first.setdefault(request.prompt_token_ids, index)
        last[request.prompt_token_ids] = index
    pages = {prompt: -(-len(prompt) // PAGE_SIZE) for prompt in first}
    change = np.zeros(len(table) + 1, np.int64)
    for prompt, count in pages.items():
        change[first[prompt]] += count
        change[last[prompt]] -= count
    running = sum(sorted(pages.values(), reverse=True)[:max_batch])
    return running + int(np.cumsum(change).max(initial=0))


def _packed(prompts: list[tuple[int, ...]]) -> Iterator[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """(prompt, next piece of it) pairs of at most MAX_PREFILL_ROWS tokens a forward; the last token is left out."""
    pieces: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    room = MAX_PREFILL_ROWS
    for prompt in prompts:
        start = 0
        while start < len(prompt) - 1:
            piece = prompt[start : min(start + room, len(prompt) - 1)]
            pieces.append((prompt, piece))
            start, room = start + len(piece), room - len(piece)
            if room == 0:
                yield pieces
                pieces, room = [], MAX_PREFILL_ROWS
    if pieces:
        yield pieces
