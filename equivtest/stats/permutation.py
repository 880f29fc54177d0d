"""Permutations of the samples' arm labels, and what they do to the counts of a cell.

Under H0 the samples of a cell are exchangeable between the arms, so given its combined counts and the arm sizes the
counts of one arm are multivariate hypergeometric. Drawing a random order of the labels and reading the samples sorted
by token gives exactly that law; the same label orders serve every cell of the same arm sizes, which makes a permutation
cost one look-up a token. p-values are right cell by cell; sharing the draws only makes their Monte-Carlo errors agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from equivtest.stats.binning import CountTable, Ints

Floats = npt.NDArray[np.float64]
Deviations = npt.NDArray[np.int32] | npt.NDArray[np.int64]

_BLOCK_ENTRIES = 1 << 21
"""Labels held at a time: bounds the memory; the blocks are part of how draws are consumed, so it is a constant."""

_SCREEN_PERMUTATIONS = 1_999
_SCREEN_EXCEEDANCES = 50

_ROUNDING = 1e-9
"""Relative difference up to which two statistics are the same value computed in another order."""


def permutation_p_values(
    table: CountTable,
    statistic: Callable[[Deviations, int], Floats],
    num_permutations: int,
    rng: np.random.Generator,
) -> Floats:
    """Monte-Carlo p-value (b + 1) / (B + 1) of each cell (Phipson & Smyth 2010), large statistics being extreme.

    statistic(deviation [k, B], cell): B values from B columns of deviations of that cell's k entries.
    A cell whose statistic is reached by at least 50 of the first 1,999 permutations stops there with B = 1,999. The
    p-value stays valid: below 51/2,000 only the full count can decide, from there on only the first one does.
    """
    deviation = table.deviation
    observed = np.array(
        [
            statistic(deviation[start:stop, None], cell)[0]
            for cell, (start, stop) in enumerate(zip(table.starts[:-1], table.starts[1:], strict=True))
        ]
    )
    threshold = observed * (1 - _ROUNDING)

    def count_exceedances(cells: Ints, count: int) -> Ints:
        exceedances = np.zeros(table.num_cells, np.int64)
        for cell, permuted in permuted_deviations(table, cells, count, rng):
            exceedances[cell] += np.count_nonzero(statistic(permuted, cell) >= threshold[cell])
        return exceedances

    every_cell = np.arange(table.num_cells)
    screen = min(num_permutations, _SCREEN_PERMUTATIONS)
    exceedances = count_exceedances(every_cell, screen)
    p_values = (exceedances + 1) / (screen + 1)
    promising = np.flatnonzero(exceedances < _SCREEN_EXCEEDANCES)
    if num_permutations > screen and len(promising):
        exceedances += count_exceedances(promising, num_permutations - screen)
        p_values[promising] = (exceedances[promising] + 1) / (num_permutations + 1)
    return p_values


def permuted_deviations(
    table: CountTable, cells: Ints, num_permutations: int, rng: np.random.Generator
) -> Iterator[tuple[int, Deviations]]:
    """The deviations of each cell's entries under random arm labels.

    Yields (cell, deviation [k, B']) with k the cell's entries and B' summing to num_permutations over a cell's turns;
    the magnitude is that of `CountTable.deviation`, the sign that of the smaller arm. Draws depend on combined counts
    and arm sizes alone, and not on which arm is called off.
    """
    num_samples = table.num_off + table.num_on
    smaller = np.minimum(table.num_off, table.num_on)
    sizes, group = np.unique(np.stack([num_samples, smaller])[:, cells], axis=1, return_inverse=True)
    total = table.total
    for index, (samples, chosen) in enumerate(sizes.T.tolist()):
        members = cells[group.ravel() == index]
        bounds = [_bounds(total[table.starts[cell] : table.starts[cell + 1]]) for cell in members]
        block = max(1, _BLOCK_ENTRIES // samples)
        for done in range(0, num_permutations, block):
            cumulative = _label_counts(samples, chosen, min(block, num_permutations - done), rng)
            for cell, edges in zip(members.tolist(), bounds, strict=True):
                permuted = np.diff(cumulative[edges], axis=0)
                permuted *= samples
                permuted -= (np.diff(edges) * chosen).astype(permuted.dtype)[:, None]
                yield cell, permuted


def _bounds(totals: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(totals)])


def _label_counts(num_samples: int, num_chosen: int, num_permutations: int, rng: np.random.Generator) -> Deviations:
    """[num_samples + 1, B]: of the first i samples, how many belong to the smaller arm, in B random orders."""
    # Deviations reach num_samples**2 / 4; 32 bits hold twice that and are twice as fast.
    dtype = np.int32 if num_samples < 2**15 else np.int64
    labels = np.zeros((num_permutations, num_samples), np.int8)
    labels[:, :num_chosen] = 1
    by_sample = np.ascontiguousarray(rng.permuted(labels, axis=1).T)
    cumulative = np.zeros((num_samples + 1, num_permutations), dtype)
    # numpy's cumsum goes down the columns one by one: adding whole rows is four times as fast.
    for index, chosen in enumerate(by_sample):
        np.add(cumulative[index], chosen, out=cumulative[index + 1])
    return cumulative
