"""The statistics of the joint family on one stratum, as functions of the samples' arm labels.

Each is prepared once from what does not depend on the labels and then takes any number of labellings at a time, the
observed one or random ones, so that observed and permuted values are computed by the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import sparse, special

from equivtest.stats.binning import MIN_EXPECTED
from equivtest.stats.prefix_tree import Ints, PrefixTree

Floats = npt.NDArray[np.float64]
Kernel = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Labels = npt.NDArray[np.float64]
"""float64 [N, B], samples in the tree's order: 1 in arm on, 0 in arm off; every column sums to the size of arm on."""
Values = Callable[[Labels], Floats]
"""Labels [N, B] to the statistic of each column, [B]."""
StatisticName = Literal["mode", "tree_g", "collisions", "mmd"]

_FLOAT32_EXACT = 1 << 24
"""Whole numbers up to here are exact in float32."""
_PANEL_ROWS = 128
"""Of a matrix that is multiplied in parts because half of it is known from the other half."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stratum:
    """The samples of both arms of one (config, prompt)."""

    tree: PrefixTree
    tokens: npt.NDArray[np.integer]
    """[N, T] in the tree's order."""
    num_off: int
    num_on: int


def mode_scores(tree: PrefixTree) -> Floats:
    """[N] what each sample adds to `mode` if its arm is on; sums to 0.

    At every node, 1 for a sample that goes on with the node's most frequent token and 0 for another, minus the share
    of that token. Where k tokens are equally frequent each counts as 1/k of the most frequent one: the choice looks
    neither at labels nor at ids. A node whose samples all go the same way, as every node with one sample does, adds
    exactly 0.
    """
    scores = np.zeros(tree.num_samples)
    for level, parent in enumerate(tree.parents):
        largest = _largest_child(tree, level)
        is_tied = tree.counts[level + 1] == largest[parent]
        num_tied = np.bincount(parent[is_tied], minlength=len(largest))
        child_scores = is_tied / num_tied[parent] - (largest / tree.counts[level])[parent]
        scores += child_scores[tree.node[level + 1]]
    return scores


def mode_weight(tree: PrefixTree, is_on: npt.NDArray[np.bool_]) -> float:
    """Sum over nodes of a b / (a + b), a and b the node's samples in the two arms: `mode` over this is the
    Mantel-Haenszel difference of the frequency of a node's most frequent token, on minus off."""
    weight = 0.0
    for level in range(tree.num_positions):
        total = tree.counts[level]
        on = np.bincount(tree.node[level], weights=is_on, minlength=len(total))
        weight += float((on * (total - on) / total).sum())
    return weight


def frequent_prefixes(stratum: Stratum) -> Ints:
    """[N] the bin of each sample: its longest prefix that is expected at least MIN_EXPECTED times in both arms.

    Decided on combined counts only, by the marginal family's rule: a larger limit would see coarse faults better, which
    `mode` does anyway, a smaller one faults that show in rare continuations only. Bins are numbered from 0.
    """
    tree, smaller = stratum.tree, min(stratum.num_off, stratum.num_on)
    enough = np.stack(
        [
            (count * smaller >= MIN_EXPECTED * tree.num_samples)[node]
            for count, node in zip(tree.counts, tree.node, strict=True)
        ]
    )
    length = np.maximum(enough.sum(axis=0) - 1, 0)
    node = tree.node[length, np.arange(tree.num_samples)]
    return np.unique(length * tree.num_samples + node, return_inverse=True)[1].ravel()


def _mode(stratum: Stratum) -> Values:
    scores = mode_scores(stratum.tree)
    return lambda labels: scores @ labels


def _tree_g(stratum: Stratum) -> Values:
    bins = frequent_prefixes(stratum)
    num_samples = stratum.tree.num_samples
    incidence = sparse.csr_array((np.ones(num_samples), (bins, np.arange(num_samples))))
    return partial(_g, incidence, np.bincount(bins), _x_log_x(num_samples))


def _g(incidence: sparse.csr_array, totals: Ints, x_log_x: Floats, labels: Labels) -> Floats:
    on = (incidence @ labels).astype(np.int64)
    off = totals[:, None] - on
    num_samples, num_on = len(labels), int(labels[:, 0].sum())
    fixed = x_log_x[num_samples] - x_log_x[num_on] - x_log_x[num_samples - num_on] - x_log_x[totals].sum()
    # off + on, not on + off minus ...: the same to the last bit when the arms change places.
    value: Floats = 2 * ((x_log_x[off] + x_log_x[on]).sum(axis=0) + fixed)
    return value


def _collisions(stratum: Stratum) -> Values:
    tree = stratum.tree
    shared = np.zeros(tree.num_samples)
    for count, node in zip(tree.counts[1:], tree.node[1:], strict=True):
        shared += count[node] - 1
    if stratum.num_off == stratum.num_on:
        # The pairs within arm on then cancel but for their linear part.
        pairs, total = stratum.num_on * (stratum.num_on - 1), float(shared.sum())
        return lambda labels: (2 * (shared @ labels) - total) / pairs
    kernel = _equal_tokens(tree.node[1:].T)
    return lambda labels: _difference_within(_pair_means(kernel, labels))


def _mmd(stratum: Stratum) -> Values:
    kernel = _equal_tokens(stratum.tokens)
    num_positions = stratum.tree.num_positions

    def values(labels: Labels) -> Floats:
        within_off, within_on, between = _pair_means(kernel, labels)
        return ((within_off + within_on) - 2 * between) / num_positions

    return values


STATISTICS: Mapping[StatisticName, Callable[[Stratum], Values]] = {
    "mode": _mode,
    "tree_g": _tree_g,
    "collisions": _collisions,
    "mmd": _mmd,
}
"""Preparation of each statistic by name."""


def _largest_child(tree: PrefixTree, level: int) -> Ints:
    """[nodes of the level] count of the most frequent child, which is the first one."""
    parent = tree.parents[level]
    return tree.counts[level + 1][np.searchsorted(parent, np.arange(len(tree.counts[level])))]


def _x_log_x(largest: int) -> Floats:
    numbers = np.arange(largest + 1, dtype=np.float64)
    table: Floats = special.xlogy(numbers, numbers)
    return table


def _equal_tokens(tokens: npt.NDArray[np.integer]) -> Kernel:
    """[N, N] positions at which two samples agree; 0 on the diagonal. float32 where products with labels are exact."""
    num_samples, num_positions = tokens.shape
    kernel = np.zeros((num_samples, num_samples), np.int32)
    for column in np.ascontiguousarray(tokens.T):
        kernel += column[:, None] == column[None, :]
    np.fill_diagonal(kernel, 0)
    if 2 * num_samples * num_positions < _FLOAT32_EXACT:
        return kernel.astype(np.float32)
    return kernel.astype(np.float64)


def _pair_means(kernel: Kernel, labels: Labels) -> tuple[Floats, Floats, Floats]:
    """[B] each: mean of the kernel over ordered pairs within arm off, within arm on, and between the arms."""
    num_on = int(labels[:, 0].sum())
    num_off = len(labels) - num_on
    row_sums = kernel.sum(axis=1, dtype=np.float64)
    with_on = row_sums @ labels
    within_on = _within(kernel, labels)
    between = with_on - within_on
    within_off = row_sums.sum() - with_on - between
    return (
        within_off / (num_off * (num_off - 1)),
        within_on / (num_on * (num_on - 1)),
        between / (num_off * num_on),
    )


def _within(kernel: Kernel, labels: Labels) -> Floats:
    """[B] sum of the kernel over ordered pairs within arm on: whole numbers, so that their order does not matter.

    The kernel is symmetric: rows are taken in panels, each with the columns from its own on, and what is past the
    diagonal block counts twice.
    """
    on: Kernel = labels.astype(np.float32) if kernel.dtype == np.float32 else labels
    total = np.zeros(labels.shape[1])
    for start in range(0, len(kernel), _PANEL_ROWS):
        stop = min(start + _PANEL_ROWS, len(kernel))
        panel = kernel[start:stop, start:].copy()
        panel[:, stop - start :] *= 2
        agreements = panel @ on[start:]
        agreements *= on[start:stop]
        total += agreements.sum(axis=0, dtype=np.float64)
    return total


def _difference_within(means: tuple[Floats, Floats, Floats]) -> Floats:
    within_off, within_on, _ = means
    return within_on - within_off
