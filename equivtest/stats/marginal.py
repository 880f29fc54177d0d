"""The marginal family: do the tokens of two arms at each (config, prompt, position) come from one law?

H0 of a cell: the samples of both arms are drawn from the same law over tokens. H1: they are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from equivtest.errors import InvalidSetting, ResolutionTooCoarse
from equivtest.records import Evidence
from equivtest.stats.binning import CountTable, Ints, count_tokens, merge_bins
from equivtest.stats.multiplicity import ADJUST, harmonic
from equivtest.stats.permutation import Deviations, Floats, permutation_p_values, permuted_deviations

Statistic = Literal["chi2", "max_z"]
Dependence = Literal["bh", "by", "bonferroni"]

_TV_QUANTILE = 0.975
_CORRECTION_NAMES: dict[Dependence, str] = {
    "bh": "Benjamini-Hochberg",
    "by": "Benjamini-Yekutieli",
    "bonferroni": "Bonferroni",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MarginalResult:
    """The marginal family on m cells: arrays of length m, and how they were computed. Nothing is ever NaN."""

    num_off: Ints
    """Samples of arm off."""
    num_on: Ints
    """Samples of arm on."""
    num_bins: Ints
    """Bins of the chi-squared test after merging; for max_z, the distinct tokens."""
    statistic: Floats
    """Pearson's X squared, or the largest studentised difference."""
    df: Ints
    """Degrees of freedom, num_bins - 1; 0 for max_z, which has none."""
    p_value: Floats
    q_value: Floats
    """The p-value adjusted for all m cells."""
    rejected: npt.NDArray[np.bool_]
    """q_value at most q."""
    tv: Floats
    """Total variation distance of the two samples, over unpooled tokens."""
    tv_null_mean: Floats
    """Its mean over random relabellings of the samples' arms: what two arms with one law show."""
    tv_null_q975: Floats
    """Its 97.5 % quantile over the same relabellings."""
    tv_excess: Floats
    """tv - tv_null_mean: the effect size, near 0 under H0."""
    name: str
    """chi2, chi2_exact or max_z."""
    method: str
    """How p-values were computed and adjusted, in one phrase."""
    q: float
    """Level of the family."""
    num_permutations: int
    """Permutations of a cell's p-value; 0 where it is asymptotic."""

    @property
    def num_cells(self) -> int:
        return len(self.p_value)

    @property
    def num_rejected(self) -> int:
        return int(self.rejected.sum())

    def evidence(self, stratum: str) -> Evidence:
        """One line: the smallest adjusted p-value, the number of rejections as statistic, the largest excess of TV."""
        return Evidence(
            family="marginal",
            name=self.name,
            stratum=stratum,
            statistic=float(self.num_rejected),
            p_value=float(self.q_value.min()),
            estimate=float(self.tv_excess.max()),
            num_tokens=int(self.num_off.sum() + self.num_on.sum()),
            method=f"{self.method}; statistic: rejected of {self.num_cells} cells; estimate: largest excess of TV",
        )


def marginal_family(
    off: Sequence[npt.NDArray[np.integer]],
    on: Sequence[npt.NDArray[np.integer]],
    *,
    statistic: Statistic = "chi2",
    exact: bool = False,
    q: float = 0.05,
    dependence: Dependence = "bh",
    num_permutations: int | None = None,
    num_tv_permutations: int = 999,
    rng: np.random.Generator,
) -> MarginalResult:
    """Test every cell, adjust for all of them, and measure how far apart the arms are.

    off, on: one integer array [n] a cell with the token ids of its samples in that arm; n may differ by cell and arm.
    statistic "chi2": Pearson's X^2 = sum (o - e)^2 / e over the merged bins and both arms, without continuity
        correction, against chi-squared with bins - 1 degrees of freedom; `exact` counts label permutations instead.
        Fewer than two bins: p = 1, and the cell still counts.
    statistic "max_z": the largest |difference of a token's frequencies| over its permutation standard deviation, by
        label permutations over unpooled tokens.
    dependence: what may be assumed of the cells: "bh" independent or positively dependent (Benjamini & Hochberg 1995),
        "by" anything (Benjamini & Yekutieli 2001); "bonferroni" anything, for the few cells of a confirmation.
    num_permutations: B of a permutation p-value; by default at least 9,999 and 4 times what one rejection needs.

    The result does not depend on the order of samples or on which id a token has, and swapping the arms changes nothing
    but num_off and num_on. Raises InsufficientSamples (a cell with fewer than 2 samples in an arm, no cells),
    ResolutionTooCoarse (1/(B+1) above the level of the smallest p-value), InvalidSetting.

    Sources: Pearson 1900; Cochran 1954 (bins); Phipson & Smyth 2010 (permutation p-values).
    """
    if not 0 < q < 1:
        raise InvalidSetting("q", q, "must be between 0 and 1")
    if num_tv_permutations < 1:
        raise InvalidSetting("num_tv_permutations", num_tv_permutations, "must be at least 1")
    if num_permutations is not None and num_permutations < 1:
        raise InvalidSetting("num_permutations", num_permutations, "must be at least 1")
    counts = count_tokens(off, on)
    table = merge_bins(counts) if statistic == "chi2" else counts
    value = cell_statistics(table, statistic)
    by_permutation = exact or statistic == "max_z"
    permutations = choose_permutations(num_permutations, counts.num_cells, q, dependence) if by_permutation else 0
    # First, so that one rng seed gives one TV null whatever the test.
    tv, tv_null_mean, tv_null_q975 = _total_variation(counts, num_tv_permutations, rng)
    if by_permutation:
        p_value = permutation_p_values(table, _permuted_statistic(table, statistic), permutations, rng)
    else:
        p_value = chi2_p_values(value, table.num_entries - 1)
    q_value = ADJUST[dependence](p_value)
    source = f"{permutations} label permutations" if by_permutation else "asymptotic"
    test = "chi-squared on the merged support" if statistic == "chi2" else "largest studentised difference of a token"
    return MarginalResult(
        num_off=counts.num_off,
        num_on=counts.num_on,
        num_bins=table.num_entries,
        statistic=value,
        df=table.num_entries - 1 if statistic == "chi2" else np.zeros_like(table.num_entries),
        p_value=p_value,
        q_value=q_value,
        # A p-value of exactly 1/(B+1) = q/m must not be lost to rounding.
        rejected=q_value <= q * (1 + 1e-12),
        tv=tv,
        tv_null_mean=tv_null_mean,
        tv_null_q975=tv_null_q975,
        tv_excess=tv - tv_null_mean,
        name=f"{statistic}_exact" if exact and statistic == "chi2" else statistic,
        method=f"{test}, {source}, {_CORRECTION_NAMES[dependence]} at {q:g}",
        q=q,
        num_permutations=permutations,
    )


def cell_statistics(table: CountTable, statistic: Statistic) -> Floats:
    """[m] Pearson's X squared or the largest studentised difference of each cell of the table."""
    contribution = table.deviation.astype(np.float64) ** 2 * _weights(table, statistic)
    if statistic == "chi2":
        return np.add.reduceat(contribution, table.starts[:-1])
    return np.sqrt(np.maximum.reduceat(contribution, table.starts[:-1]))


def chi2_p_values(statistic: Floats, df: Ints) -> Floats:
    """[m] upper tail of chi-squared; 1 where there are no degrees of freedom."""
    return np.where(df > 0, special.chdtrc(np.maximum(df, 1), statistic), 1.0)


def _weights(table: CountTable, statistic: Statistic) -> Floats:
    """[starts[m]] what turns an entry's squared deviation into its part of X^2, or into z^2.

    With d = off * num_on - on * num_off, t = off + on and N = num_off + num_on: the parts of X^2 of both arms add up to
    d^2 / (num_off * num_on * t); over permutations d^2 has mean num_off * num_on * t * (N - t) / (N - 1).
    """
    cell, total = table.cell, table.total.astype(np.float64)
    product = (table.num_off * table.num_on).astype(np.float64)[cell]
    if statistic == "chi2":
        return 1.0 / (product * total)
    samples = (table.num_off + table.num_on).astype(np.float64)[cell]
    variance = product * total * (samples - total) / (samples - 1)
    return np.divide(1.0, variance, out=np.zeros_like(variance), where=variance > 0)


def _permuted_statistic(table: CountTable, statistic: Statistic) -> Callable[[Deviations, int], Floats]:
    return partial(_from_deviations, table.starts, _weights(table, statistic), statistic)


def _from_deviations(starts: Ints, weights: Floats, statistic: Statistic, deviation: Deviations, cell: int) -> Floats:
    squared = deviation.astype(np.float64)
    squared *= squared
    own = weights[starts[cell] : starts[cell + 1]]
    if statistic == "chi2":
        summed: Floats = own @ squared
        return summed
    squared *= own[:, None]
    largest: Floats = squared.max(axis=0)
    return largest


def choose_permutations(num_permutations: int | None, num_cells: int, q: float, dependence: Dependence) -> int:
    """The number of permutations; raises ResolutionTooCoarse where not even p = 1/(B+1) could be rejected."""
    cost = harmonic(num_cells) if dependence == "by" else 1.0
    smallest = num_cells * cost / q
    if num_permutations is None:
        return max(9_999, math.ceil(4 * smallest) - 1)
    if num_permutations + 1 < smallest * (1 - 1e-12):
        raise ResolutionTooCoarse(num_permutations, num_cells, q / cost)
    return num_permutations


def _total_variation(
    counts: CountTable, num_permutations: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """[m] each: TV of the two arms, and the mean and 97.5 % quantile of its permutation null."""
    scale = 0.5 / (counts.num_off * counts.num_on)
    distance = np.add.reduceat(np.abs(counts.deviation), counts.starts[:-1]) * scale
    null_mean, null_quantile = np.zeros(counts.num_cells), np.zeros(counts.num_cells)
    spread = np.flatnonzero(counts.num_entries > 1)
    null: dict[int, list[npt.NDArray[np.int64]]] = {}
    for cell, permuted in permuted_deviations(counts, spread, num_permutations, rng):
        null.setdefault(cell, []).append(np.abs(permuted, out=permuted).sum(axis=0, dtype=np.int64))
        if sum(map(len, null[cell])) == num_permutations:
            values = np.sort(np.concatenate(null.pop(cell)))
            null_mean[cell] = values.mean() * scale[cell]
            null_quantile[cell] = values[math.ceil(_TV_QUANTILE * num_permutations) - 1] * scale[cell]
    return distance, null_mean, null_quantile
