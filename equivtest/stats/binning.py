"""From the token ids of two arms to a table of counts a cell, and from that to the bins of the chi-squared test.

All cells are held in one flat table, cell after cell, so that every step is a handful of array operations whatever the
number of cells. Counts of a cell are in a canonical order that looks at counts alone: nothing downstream can depend on
the order of the samples or on which token has which id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivtest.errors import InsufficientSamples, InvalidSetting

Ints = npt.NDArray[np.int64]

MIN_EXPECTED = 5
"""Smallest expected count of a bin in either arm (Cochran 1954)."""

_CHUNK_SAMPLES = 1 << 22
"""Samples counted at a time: bounds the memory, not the result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountTable:
    """Counts of tokens (or of bins) of m cells in two arms, cell after cell."""

    num_off: Ints
    """[m] samples of arm off."""
    num_on: Ints
    """[m] samples of arm on."""
    starts: Ints
    """[m + 1]: entries starts[c] to starts[c + 1] - 1 belong to cell c; every cell has at least one."""
    off: Ints
    """[starts[m]] count of the entry in arm off."""
    on: Ints
    """[starts[m]] count of the entry in arm on; off + on is at least 1, and falls within a cell."""

    @property
    def num_cells(self) -> int:
        return len(self.num_off)

    @property
    def num_entries(self) -> Ints:
        """[m] entries of each cell."""
        return np.diff(self.starts)

    @property
    def cell(self) -> Ints:
        """[starts[m]] the cell of each entry."""
        return np.repeat(np.arange(self.num_cells), self.num_entries)

    @property
    def total(self) -> Ints:
        """[starts[m]] count of each entry in both arms together."""
        return self.off + self.on

    @property
    def deviation(self) -> Ints:
        """[starts[m]] off * num_on - on * num_off: the difference of the frequencies times num_off * num_on, exact."""
        return self.off * self.num_on[self.cell] - self.on * self.num_off[self.cell]


def count_tokens(off: Sequence[npt.NDArray[np.integer]], on: Sequence[npt.NDArray[np.integer]]) -> CountTable:
    """Count the tokens of each cell in each arm.

    off, on: one integer array [n] a cell, the token ids of its samples in that arm; n may differ by cell and arm.
    Raises InsufficientSamples for no cells or a cell with fewer than 2 samples in an arm, InvalidSetting for arms with
    different numbers of cells, for ids that are not whole numbers and for negative ids (padding).
    """
    if len(off) != len(on):
        raise InvalidSetting("number of cells", (len(off), len(on)), "must be the same in both arms")
    if not len(off):
        raise InsufficientSamples("marginal family (cells)", 0, 1)
    num_off = np.array([len(tokens) for tokens in off], np.int64)
    num_on = np.array([len(tokens) for tokens in on], np.int64)
    for arm, sizes in (("off", num_off), ("on", num_on)):
        if sizes.min() < 2:
            raise InsufficientSamples(f"marginal family, arm {arm} of cell {int(sizes.argmin())}", int(sizes.min()), 2)
    tables = [
        _count_chunk(off[start:stop], on[start:stop], num_off[start:stop], num_on[start:stop])
        for start, stop in _chunks(num_off + num_on)
    ]
    if len(tables) == 1:
        return tables[0]
    entries = np.concatenate([table.num_entries for table in tables])
    return CountTable(
        num_off=num_off,
        num_on=num_on,
        starts=_starts(entries),
        off=np.concatenate([table.off for table in tables]),
        on=np.concatenate([table.on for table in tables]),
    )


def merge_bins(counts: CountTable) -> CountTable:
    """The bins of the chi-squared test: the same table with rare tokens merged.

    A token keeps its own bin if its expected count is at least MIN_EXPECTED in both arms; the others share one `rest`
    bin; a rest bin expected under MIN_EXPECTED joins the smallest kept bin. Only combined counts decide, so the bins
    are the same under every relabelling of the samples' arms and the test stays valid. Where several kept bins are
    smallest, the rest joins the one that gives the smallest statistic: no token id is looked at, and the error is on
    the safe side.
    """
    cell, total = counts.cell, counts.total
    num_samples = counts.num_off + counts.num_on
    smaller_arm = np.minimum(counts.num_off, counts.num_on)

    def large_enough(totals: Ints, cells: Ints) -> npt.NDArray[np.bool_]:
        return totals * smaller_arm[cells] >= MIN_EXPECTED * num_samples[cells]

    kept = large_enough(total, cell)
    rest_off = counts.num_off - _sum_by_cell(counts.off[kept], cell[kept], counts.num_cells)
    rest_on = counts.num_on - _sum_by_cell(counts.on[kept], cell[kept], counts.num_cells)
    rest = rest_off + rest_on
    num_kept = _sum_by_cell(np.ones(int(kept.sum()), np.int64), cell[kept], counts.num_cells)
    own_bin = (rest > 0) & (large_enough(rest, np.arange(counts.num_cells)) | (num_kept == 0))
    joins = (rest > 0) & ~own_bin

    merged_off, merged_on = counts.off.copy(), counts.on.copy()
    host = _smallest_kept(counts, kept, num_kept, joins, rest_off, rest_on)
    merged_off[host] += rest_off[joins]
    merged_on[host] += rest_on[joins]
    return _ordered(
        np.concatenate([cell[kept], np.flatnonzero(own_bin)]),
        np.concatenate([merged_off[kept], rest_off[own_bin]]),
        np.concatenate([merged_on[kept], rest_on[own_bin]]),
        counts.num_off,
        counts.num_on,
    )


def _smallest_kept(
    counts: CountTable,
    kept: npt.NDArray[np.bool_],
    num_kept: Ints,
    joins: npt.NDArray[np.bool_],
    rest_off: Ints,
    rest_on: Ints,
) -> Ints:
    """For each cell of `joins`, in order, the entry of the kept bin that its rest joins."""
    cell, total = counts.cell, counts.total
    smallest = np.zeros(counts.num_cells, np.int64)
    # Kept entries lead each cell, because entries fall in total.
    smallest[joins] = total[counts.starts[:-1][joins] + num_kept[joins] - 1]
    tied = np.flatnonzero(kept & joins[cell] & (total == smallest[cell]))
    tied_cell = cell[tied]
    rest_deviation = (rest_off * counts.num_on - rest_on * counts.num_off)[tied_cell].astype(np.float64)
    deviation = counts.deviation[tied].astype(np.float64)
    size, rest = total[tied].astype(np.float64), (rest_off + rest_on)[tied_cell]
    # Change of sum(deviation**2 / total) by the merge, times a factor that tied bins share.
    change = 2 * size * deviation * rest_deviation - rest * deviation**2
    order = np.lexsort((change, tied_cell))
    _, first = np.unique(tied_cell[order], return_index=True)
    return tied[order[first]]


def _chunks(sizes: Ints) -> Iterator[tuple[int, int]]:
    """Cut consecutive cells into runs of at most _CHUNK_SAMPLES samples (or one cell)."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _CHUNK_SAMPLES, side="right")))
        yield start, stop
        start = stop


def _count_chunk(
    off: Sequence[npt.NDArray[np.integer]], on: Sequence[npt.NDArray[np.integer]], num_off: Ints, num_on: Ints
) -> CountTable:
    tokens = np.concatenate([*off, *on])
    if not np.issubdtype(tokens.dtype, np.integer) or tokens.ndim != 1:
        raise InvalidSetting("token ids", f"{tokens.dtype} of {tokens.ndim} dimensions", "must be flat integer arrays")
    if tokens.min() < 0:
        raise InvalidSetting("token ids", int(tokens.min()), "must be at least 0; cut padding off first")
    num_cells = len(num_off)
    token_range = int(tokens.max()) + 1
    if token_range > 2**62 // num_cells:
        tokens = np.unique(tokens, return_inverse=True)[1]
        token_range = len(tokens)
    cells = np.arange(num_cells)
    codes = np.concatenate([np.repeat(cells, num_off), np.repeat(cells, num_on)])
    codes *= token_range
    codes += tokens.astype(np.int64, copy=False)
    # The arm is the lowest bit, so one sort groups by (cell, token) and the sum of the bits counts arm on.
    codes *= 2
    codes[int(num_off.sum()) :] += 1
    codes.sort()
    is_on = codes & 1
    codes >>= 1
    first = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    total = np.diff(first, append=len(codes))
    count_on = np.add.reduceat(is_on, first)
    return _ordered(codes[first] // token_range, total - count_on, count_on, num_off, num_on)


def _ordered(cell: Ints, off: Ints, on: Ints, num_off: Ints, num_on: Ints) -> CountTable:
    """The table in canonical order: falling totals within a cell, equal totals by the size of the deviation.

    Entries that are equal in both contribute the same to every statistic, so no result depends on how they are ordered,
    to the last bit.
    """
    deviation = np.abs(off * num_on[cell] - on * num_off[cell])
    order = np.lexsort((deviation, -(off + on), cell))
    return CountTable(
        num_off=num_off,
        num_on=num_on,
        starts=_starts(np.bincount(cell, minlength=len(num_off))),
        off=off[order],
        on=on[order],
    )


def _sum_by_cell(values: Ints, cell: Ints, num_cells: int) -> Ints:
    # Weights pass through float64, exact below 2**53.
    return np.bincount(cell, weights=values, minlength=num_cells).astype(np.int64)


def _starts(num_entries: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(num_entries)]).astype(np.int64)
