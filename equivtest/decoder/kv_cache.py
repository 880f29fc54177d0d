"""A paged cache of keys and values, with pages shared between sequences by reference count.

Which page belongs to whom is kept in numpy arrays on the host and every call is vectorised over sequences. A page is
written only by a sequence that holds it alone: `extend` first copies a shared last page (copy on write), so a forked
sequence never changes its parent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from equivtest.errors import CacheFull, InvalidSetting
from equivtest.kernels.contract import AttentionBatch, HostBatch

IntArray = npt.NDArray[np.int64]


class DeviceBatch(NamedTuple):
    """A RaggedBatch on the device."""

    attention: AttentionBatch
    slots: Tensor  # int64 [num_rows]
    positions: Tensor  # int64 [num_rows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedBatch:
    """Where the rows of one forward go and what they see, on the host.

    The B sequences have their new rows side by side: rows query_start[b] : query_start[b + 1] are sequence b's.
    """

    page_table: npt.NDArray[np.int32]
    """[B, max_pages], pages of each sequence; entries past its length are arbitrary."""
    kv_lens: npt.NDArray[np.int32]
    """[B], length of each sequence, the new rows included."""
    query_start: npt.NDArray[np.int32]
    """[B + 1]."""
    slots: IntArray
    """[num_rows], where each new row is written: page * page_size + offset."""
    positions: IntArray
    """[num_rows], position of each new row in its sequence."""

    def on(self, device: torch.device) -> DeviceBatch:
        """Copied to the device."""
        host = HostBatch(self.page_table, self.kv_lens, self.query_start)
        table, kv_lens, query_start = (
            torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True) for array in host
        )
        slots, positions = (
            torch.from_numpy(array).to(device, non_blocking=True) for array in (self.slots, self.positions)
        )
        return DeviceBatch(AttentionBatch(table, kv_lens, query_start, host), slots, positions)


class PagedKVCache:
    """Keys and values of up to `max_sequences` sequences in `num_pages` pages of `page_size` tokens.

    Sequences are named by small integers from `new_sequence` and `fork`; lengths are in tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        max_sequences: int,
        page_size: int = 16,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("num_pages", num_pages), ("max_sequences", max_sequences), ("page_size", page_size)):
            if value < 1:
                raise InvalidSetting(name, value, "must be at least 1")
        self.page_size = page_size
        self.max_length = min(config.max_position, num_pages * page_size)
        """Longest sequence that could ever fit."""
        self.spare_page = num_pages
        """A page that belongs to nobody: rows that only fill up a batch are written there."""
        # Zeros, so that a backend that reads a whole page and masks never meets a NaN.
        self.pages = torch.zeros(
            config.num_layers,
            num_pages + 1,
            2,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            dtype=dtype,
            device=device,
        )
        """[num_layers, num_pages + 1, 2, page_size, num_kv_heads, head_dim]; keys at [:, :, 0], values at [:, :, 1]."""
        self._table = np.zeros((max_sequences, -(-self.max_length // page_size)), dtype=np.int32)
        self._lengths = np.full(max_sequences, -1, dtype=np.int64)  # -1: not in use
        self._references = np.zeros(num_pages, dtype=np.int32)
        self._free_pages = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free_pages = num_pages
        self._free_sequences = list(range(max_sequences - 1, -1, -1))

    @property
    def num_free_pages(self) -> int:
        return self._num_free_pages

    @property
    def num_free_sequences(self) -> int:
        return len(self._free_sequences)

    def new_sequence(self) -> int:
        """An empty sequence. Raises CacheFull."""
        if not self._free_sequences:
            raise CacheFull("sequences", 1, 0)
        sequence = self._free_sequences.pop()
        self._lengths[sequence] = 0
        return sequence

    def fork(self, sequence: int) -> int:
        """A sequence with the same contents that shares every page until one of them is extended. Raises CacheFull."""
        length = int(self.lengths(np.array([sequence]))[0])
        copy = self.new_sequence()
        num_pages = -(-length // self.page_size)
        self._table[copy, :num_pages] = self._table[sequence, :num_pages]
        self._references[self._table[copy, :num_pages]] += 1
        self._lengths[copy] = length
        return copy

    def lengths(self, sequences: IntArray) -> IntArray:
        """Tokens in each of `sequences`. Raises InvalidSetting for one that is not in use."""
        sequences = np.asarray(sequences, dtype=np.int64)
        known = (sequences >= 0) & (sequences < len(self._lengths))
        lengths: IntArray = self._lengths[sequences if known.all() else np.where(known, sequences, 0)]
        if lengths.min(initial=0) < 0 or not known.all():
            unused = np.where(known, lengths, -1) < 0
            raise InvalidSetting("sequence", int(sequences[unused][0]), "is not in use")
        return lengths

    def slots(self, sequences: IntArray, positions: IntArray) -> IntArray:
        """Where positions[i] of sequences[i] is stored: page * page_size + offset, int64 of their shape.

        Raises InvalidSetting for a position that the sequence does not have.
        """
        sequences, positions = np.asarray(sequences, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        outside = (positions < 0) | (positions >= self.lengths(sequences))
        if outside.any():
            raise InvalidSetting("position", int(positions[outside][0]), "is not in the sequence")
        return self._slots(sequences, positions)

    def extend(self, sequences: IntArray, num_new: IntArray) -> RaggedBatch:
        """Make room for `num_new[b]` more tokens of each sequence and say where their rows go.

        sequences: int [B], distinct. num_new: int [B], at least 1 each. The next forward must write the rows.
        Raises CacheFull, or InvalidSetting for a sequence past the longest length; then nothing has changed.
        """
        sequences, num_new = np.asarray(sequences, dtype=np.int64), np.asarray(num_new, dtype=np.int64)
        old = self._distinct_lengths(sequences)
        if num_new.shape != sequences.shape or (num_new < 1).any():
            raise InvalidSetting("num_new", num_new.tolist(), "must have one entry of at least 1 per sequence")
        new = old + num_new
        if (new > self.max_length).any():
            raise InvalidSetting("sequence length", int(new.max()), f"must be at most {self.max_length} tokens")
        old_pages, new_pages = -(-old // self.page_size), -(-new // self.page_size)
        copies = self._shared_last_pages(sequences, old)
        num_added = int((new_pages - old_pages).sum())
        taken = self._take(num_added + len(copies))
        self._copy_last_pages(sequences[copies], old_pages[copies] - 1, taken[num_added:])
        if num_added:
            rows, offsets = _ragged_arange(new_pages - old_pages)
            self._table[sequences[rows], old_pages[rows] + offsets] = taken[:num_added]
        self._lengths[sequences] = new
        return self._batch(sequences, old, num_new)

    def extend_by_ones(self, sequences: IntArray, num_new: IntArray) -> list[RaggedBatch]:
        """Make room for `num_new[b]` more tokens of each sequence (int [B], 0 or more), to be fed one at a time.

        One batch a token, each with a row of every sequence, so that all have one shape: where a sequence gets no token
        more, its row belongs to nobody and goes to the spare page. Raises what `extend` does.
        """
        sequences, num_new = np.asarray(sequences, dtype=np.int64), np.asarray(num_new, dtype=np.int64)
        growing = np.flatnonzero(num_new)
        num_sequences, num_batches = len(sequences), int(num_new.max(initial=0))
        if not num_batches:
            return []
        grown = self.extend(sequences[growing], num_new[growing])
        table = np.full((num_sequences, grown.page_table.shape[1]), self.spare_page, np.int32)
        table[growing] = grown.page_table
        slots = np.full((num_batches, num_sequences), self.spare_page * self.page_size)
        positions = np.zeros((num_batches, num_sequences), np.int64)
        rows, offsets = _ragged_arange(num_new)
        slots[offsets, rows], positions[offsets, rows] = grown.slots, grown.positions
        return [
            RaggedBatch(
                page_table=table,
                # A row that belongs to nobody still attends to something.
                kv_lens=(np.maximum.accumulate(positions, axis=0)[index] + 1).astype(np.int32),
                query_start=np.arange(num_sequences + 1, dtype=np.int32),
                slots=slots[index],
                positions=positions[index],
            )
            for index in range(num_batches)
        ]

    def truncate(self, sequences: IntArray, lengths: IntArray) -> None:
        """Cut each sequence back to `lengths[b]` tokens (int [B], at most what it has), releasing pages."""
        sequences, lengths = np.asarray(sequences, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        old = self._distinct_lengths(sequences)
        if lengths.shape != sequences.shape or (lengths < 0).any() or (lengths > old).any():
            raise InvalidSetting("lengths", lengths.tolist(), f"must be between 0 and {old.tolist()}")
        self._release(sequences, -(-lengths // self.page_size), -(-old // self.page_size))
        self._lengths[sequences] = lengths

    def free(self, sequences: IntArray) -> None:
        """Give up sequences; their numbers may be handed out again."""
        sequences = np.asarray(sequences, dtype=np.int64)
        self.truncate(sequences, np.zeros_like(sequences))
        self._lengths[sequences] = -1
        self._free_sequences.extend(sequences[::-1].tolist())

    def _distinct_lengths(self, sequences: IntArray) -> IntArray:
        if sequences.ndim != 1 or len(set(sequences.tolist())) != len(sequences):
            raise InvalidSetting("sequences", sequences.tolist(), "must be distinct, one dimension")
        return self.lengths(sequences)

    def _shared_last_pages(self, sequences: IntArray, lengths: IntArray) -> IntArray:
        """Indices into `sequences` of those whose partial last page must be copied before it is written."""
        partial = np.flatnonzero(lengths % self.page_size)
        pages = self._table[sequences[partial], lengths[partial] // self.page_size]
        shared = self._references[pages] > 1
        if not shared.any():
            return partial[:0]
        partial, pages = partial[shared], pages[shared]
        # When every holder of a page is extended in this call, the first one may keep it.
        unique, first, holders = np.unique(pages, return_index=True, return_counts=True)
        keeps = first[holders == self._references[unique]]
        return np.delete(partial, keeps)

    def _copy_last_pages(self, sequences: IntArray, columns: IntArray, copies: npt.NDArray[np.int32]) -> None:
        if not len(copies):
            return
        originals = self._table[sequences, columns]
        self._table[sequences, columns] = copies
        np.subtract.at(self._references, originals, 1)  # never to 0: extend leaves one holder
        source, target = self._tensor(originals).long(), self._tensor(copies).long()
        for layer in self.pages:  # a layer at a time: the temporary stays small
            layer.index_copy_(0, target, layer.index_select(0, source))

    def _take(self, count: int) -> npt.NDArray[np.int32]:
        if count > self._num_free_pages:
            raise CacheFull("pages", count, self._num_free_pages)
        self._num_free_pages -= count
        taken = self._free_pages[self._num_free_pages : self._num_free_pages + count][::-1].copy()
        self._references[taken] = 1
        return taken

    def _release(self, sequences: IntArray, first: IntArray, last: IntArray) -> None:
        """Drop the references to table columns first[b] : last[b]."""
        if not (last > first).any():
            return
        rows, offsets = _ragged_arange(last - first)
        pages = self._table[sequences[rows], first[rows] + offsets]
        np.subtract.at(self._references, pages, 1)
        pages = np.unique(pages)
        freed = pages[self._references[pages] == 0]
        self._free_pages[self._num_free_pages : self._num_free_pages + len(freed)] = freed
        self._num_free_pages += len(freed)

    def _slots(self, sequences: IntArray, positions: IntArray) -> IntArray:
        pages = self._table[sequences, positions // self.page_size].astype(np.int64)
        slots: IntArray = pages * self.page_size + positions % self.page_size
        return slots

    def _batch(self, sequences: IntArray, old: IntArray, num_new: IntArray) -> RaggedBatch:
        new = old + num_new
        rows, offsets = _ragged_arange(num_new)
        positions = old[rows] + offsets
        columns = -(-int(new.max(initial=0)) // self.page_size)
        return RaggedBatch(
            page_table=self._table[sequences, :columns],
            kv_lens=new.astype(np.int32),
            query_start=np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32),
            slots=self._slots(sequences[rows], positions),
            positions=positions,
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.pages.device, non_blocking=True)


def _ragged_arange(counts: IntArray) -> tuple[IntArray, IntArray]:
    """For counts [2, 0, 3]: the entry each element belongs to, [0, 0, 2, 2, 2], and its rank in it, [0, 1, 0, 1, 2]."""
    rows = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    return rows, np.arange(len(rows)) - np.repeat(ends - counts, counts)
