"""Samples of one prompt share prefixes: every distinct prefix is fed once, as one node of their tree.

With pages of one token a sequence's page table can be any path through the tree, so a single ragged forward serves all
samples: a node is written by the first sample that has it and read by all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivtest.decoder.kv_cache import RaggedBatch
from equivtest.decoder.stages import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """The tree of the tokens that are fed, its nodes numbered in the order of the rows that feed them."""

    node: Int64Array
    """[num_samples, num_positions], the node that predicts each token; -1 past the end of a text."""
    is_new: npt.NDArray[np.bool_]
    """[num_samples, num_positions], whether the sample is the first to have it: from some position to its end."""

    @classmethod
    def of(cls, token_ids: Int64Array, lengths: Int64Array) -> SharedPrefixes:
        """token_ids: [num_samples, num_positions] of samples in lexicographic order (`lexicographic`).

        lengths: [num_samples], tokens of each text; what ends a text is one of its tokens, so that texts that begin
        alike are as long.
        """
        num_samples, num_positions = token_ids.shape
        # What predicts token t is fed tokens 0..t-1: the prompt alone at t = 0.
        same = np.ones((num_samples, num_positions), np.bool_)
        same[1:, 1:] = np.logical_and.accumulate(token_ids[1:, :-1] == token_ids[:-1, :-1], axis=1)
        same[0] = False
        held = np.arange(num_positions) < lengths[:, None]
        is_new = held & ~same
        index = np.cumsum(is_new).reshape(same.shape) - 1
        # Numbers rise from sample to sample, so the newest node of a column is the largest so far.
        newest = np.maximum.accumulate(np.where(is_new, index, -1), axis=0)
        return cls(node=np.where(held, newest, -1), is_new=is_new)

    @property
    def num_nodes(self) -> int:
        return int(self.node.max()) + 1

    def fed(self, token_ids: Int64Array, last_prompt_token: int) -> Int64Array:
        """[num_nodes] the token that each node feeds."""
        before = np.concatenate([np.full((len(token_ids), 1), last_prompt_token), token_ids[:, :-1]], axis=1)
        return np.ascontiguousarray(before[self.is_new])

    def batch(self, prompt_pages: int) -> RaggedBatch:
        """The forward that feeds every node, in a cache with pages of one token whose first `prompt_pages` hold all of
        the prompt but its last token; node k takes the page after them."""
        own = np.flatnonzero(self.is_new.any(axis=1))  # a sample that is another's double has nothing to feed
        prompt = np.broadcast_to(np.arange(prompt_pages), (len(own), prompt_pages))
        node = self.node[own]
        return _ragged(
            table=np.concatenate([prompt, np.maximum(node, 0) + prompt_pages], axis=1),
            lengths=prompt_pages + (node >= 0).sum(axis=1),
            num_new=self.is_new[own].sum(axis=1),
            slots=np.arange(self.num_nodes) + prompt_pages,
            positions=np.nonzero(self.is_new)[1] + prompt_pages,
        )

    def blocks(self, prompt_pages: int, samples: Int64Array, positions: Int64Array, size: int) -> RaggedBatch:
        """The forward that feeds a block of `size` rows to each of samples [n] in place of its text from positions [n]
        on, in the cache of `batch`. Blocks take the pages behind the last node's."""
        num, columns = len(samples), np.arange(size)
        lengths = prompt_pages + positions
        at = lengths[:, None] + columns
        pages = prompt_pages + self.num_nodes + np.arange(num * size).reshape(num, size)
        prompt = np.broadcast_to(np.arange(prompt_pages), (num, prompt_pages))
        text = np.maximum(self.node[samples], 0) + prompt_pages
        table = np.concatenate([prompt, text, np.zeros_like(pages)], axis=1)
        np.put_along_axis(table, at, pages, axis=1)
        return _ragged(
            table=table, lengths=lengths + size, num_new=np.full(num, size), slots=pages.ravel(), positions=at.ravel()
        )


def prompt_batch(start: int, stop: int) -> RaggedBatch:
    """The forward that feeds tokens start:stop of a prompt, token t on page t."""
    return _ragged(
        table=np.arange(stop)[None],
        lengths=np.array([stop]),
        num_new=np.array([stop - start]),
        slots=np.arange(start, stop),
        positions=np.arange(start, stop),
    )


def lexicographic(token_ids: Int64Array) -> Int64Array:
    """The order in which samples with equal prefixes stand side by side: [num_samples] indices."""
    return np.lexsort(token_ids.T[::-1])


def _ragged(
    *,
    table: Int64Array,
    lengths: Int64Array,
    num_new: Int64Array,
    slots: Int64Array,
    positions: Int64Array,
) -> RaggedBatch:
    return RaggedBatch(
        page_table=np.ascontiguousarray(table, np.int32),
        kv_lens=np.ascontiguousarray(lengths, np.int32),
        query_start=np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32),
        slots=np.ascontiguousarray(slots, np.int64),
        positions=np.ascontiguousarray(positions, np.int64),
    )
