"""The joint family: do whole samples of two arms come from one law? Needs tokens only.

H0 of a stratum (one config and prompt): the samples of both arms are drawn from the same law over sequences. H1: they
are not, though every position's marginal may be the same. All samples of a stratum make one prefix tree; whole samples
change arms under a permutation, so tokens within a sample may depend on each other in any way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from equivtest.errors import InsufficientSamples, InvalidSetting, ResolutionTooCoarse, UnknownName
from equivtest.records import Evidence
from equivtest.stats.joint_statistics import (
    STATISTICS,
    Floats,
    Labels,
    StatisticName,
    Stratum,
    frequent_prefixes,
    mode_weight,
)
from equivtest.stats.multiplicity import holm
from equivtest.stats.prefix_tree import prefix_tree

Side = Literal["large", "both"]

DEFAULT_PERMUTATIONS = 9_999

_BLOCK_LABELS = 1 << 20
"""Labels held at a time: bounds the memory; the blocks are part of how draws are consumed, so it is a constant."""

_ROUNDING = 1e-9
"""Difference, relative to the largest value, up to which two statistics are the same one computed in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    side: Side
    """Which values are extreme: large ones, or large ones of either sign."""
    centred: bool
    """Whether the mean over all permutations is exactly 0; it is estimated from the permutations otherwise."""
    what: str
    unit: str
    """Of the estimate; empty where there is none."""


_KINDS: Mapping[StatisticName, _Kind] = {
    "mode": _Kind(
        side="both",
        centred=True,
        what="excess of the most frequent next token in arm on",
        unit="excess frequency of that token",
    ),
    "tree_g": _Kind(side="large", centred=False, what="likelihood ratio over frequent prefixes", unit=""),
    "collisions": _Kind(
        side="both",
        centred=True,
        what="difference of shared prefixes within the arms",
        unit="excess length of the common prefix of two samples, in tokens",
    ),
    "mmd": _Kind(
        side="large",
        centred=True,
        what="MMD squared with the Hamming kernel",
        unit="mean MMD squared of a stratum",
    ),
}

_SIDE_WORDS: Mapping[Side, str] = {"large": "one-sided", "both": "two-sided"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointTest:
    """One statistic of the family: of all strata together, and arrays of length num_strata. Nothing is ever NaN."""

    name: StatisticName
    statistic: float
    """The sum over strata."""
    z: float
    """Its distance from the mean of the permutation null in standard deviations of that null; 0 for a constant null."""
    p_value: float
    """(b + 1) / (B + 1), b permutations at least as extreme."""
    adjusted_p_value: float
    """Holm, over the statistics of the family."""
    df: int | None
    """tree_g: bins - 1, summed over strata, its asymptotic degrees of freedom; None for the others."""
    estimate: float | None
    """Effect size: of mode, the excess frequency of a node's most frequent token in arm on; of collisions, the excess
    length in tokens of the common prefix of two samples; of mmd, the mean over strata; None for tree_g."""
    stratum_statistic: Floats
    stratum_z: Floats
    stratum_p_value: Floats
    """Of each stratum by itself, from the same permutations, not adjusted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointResult:
    """The joint family on the strata of one comparison."""

    tests: tuple[JointTest, ...]
    """In the order asked for."""
    num_off: npt.NDArray[np.int64]
    """[num_strata] samples of arm off."""
    num_on: npt.NDArray[np.int64]
    num_tokens: int
    """Tokens of both arms in all strata."""
    num_permutations: int

    def __getitem__(self, name: StatisticName) -> JointTest:
        by_name = {test.name: test for test in self.tests}
        if name not in by_name:
            raise UnknownName("joint statistic of this result", name, by_name)
        return by_name[name]

    @property
    def p_value(self) -> float:
        """Of the family: the smallest adjusted p-value."""
        return min(test.adjusted_p_value for test in self.tests)

    def evidence(self, stratum: str) -> list[Evidence]:
        """One line a statistic: the statistic is z, the p-value is the one adjusted for the family."""
        return [
            Evidence(
                family="joint",
                name=test.name,
                stratum=stratum,
                statistic=test.z,
                df=test.df,
                p_value=test.adjusted_p_value,
                estimate=test.estimate,
                num_tokens=self.num_tokens,
                method=self._method(_KINDS[test.name]),
            )
            for test in self.tests
        ]

    def _method(self, kind: _Kind) -> str:
        return (
            f"{kind.what}, {_SIDE_WORDS[kind.side]}, {self.num_permutations} permutations of whole samples, "
            f"Holm over {len(self.tests)}; statistic: z" + (f"; estimate: {kind.unit}" if kind.unit else "")
        )


def joint_family(
    off: Sequence[npt.NDArray[np.integer]],
    on: Sequence[npt.NDArray[np.integer]],
    *,
    statistics: Sequence[StatisticName] = ("mode", "tree_g", "collisions", "mmd"),
    num_permutations: int = DEFAULT_PERMUTATIONS,
    level: float = 0.01,
    rng: np.random.Generator,
) -> JointResult:
    """Test all strata together and each by itself, with one set of permutations for every statistic.

    off, on: one integer array [n, T] a stratum with the token ids of its samples in that arm, one sample a row; n may
    differ by stratum and arm, T by stratum. Summed over strata:

    mode: sum over the nodes of the tree of b_m - b c_m / c, where b of the node's c samples are in arm on and m is its
        most frequent token, chosen on combined counts; equally frequent tokens share the place. Two-sided: above 0
        where arm on takes the most likely token too often, as inflated acceptance of good drafts does, and below 0
        where it takes it too seldom, as inflated acceptance of drafts that mostly are another token does. Its estimate
        is the Mantel-Haenszel difference of that token's frequency.
    tree_g: sum over nodes and tokens of 2 o ln(o / e), e the arm's share of the node. Over all nodes this telescopes to
        the table of whole samples by arm, which is constant where no two samples are equal; so tokens of a node that
        are expected fewer than 5 times in an arm share one bin, and their subtrees are not looked at. It then is the G
        of the table of longest frequent prefixes by arm. Large values are extreme: differences of any kind.
    collisions: mean length of the common prefix of two samples of arm on, minus the same of arm off, in tokens.
        Two-sided: entropy lost or gained.
    mmd: unbiased MMD squared with the kernel "share of positions with equal tokens". Large values are extreme.

    level: significance that the family is judged at; refuses (ResolutionTooCoarse) a number of permutations at which
        Holm could not reject anything.

    The result does not depend on the order of samples within an arm, nor, up to rounding, on which id a token has at
    which prefix. mmd compares tokens of different prefixes, so ids may change by position only, and its p-value then
    moves within its Monte-Carlo error. Swapping the arms changes the signs of mode and collisions and nothing else;
    only where the arms are equally large in some strata and not in others are the permutations different ones.
    Raises InsufficientSamples (no strata, fewer than 2 samples in an arm), ResolutionTooCoarse, InvalidSetting,
    UnknownName.

    Sources: Phipson & Smyth 2010 (p-values); Mantel & Haenszel 1959; Gretton et al. 2012, lemma 6 (MMD); Gao, Liang &
    Guestrin 2024 (Hamming kernel); Holm 1979.
    """
    _check(off, on, statistics, num_permutations, level)
    num_off = np.array([len(samples) for samples in off], np.int64)
    num_on = np.array([len(samples) for samples in on], np.int64)
    observed = np.empty((len(statistics), len(off)))
    null = np.empty((len(statistics), len(off), num_permutations))
    df, weight = 0, 0.0
    for index, (first, second) in enumerate(zip(off, on, strict=True)):
        tokens = np.concatenate([first, second])
        tree = prefix_tree(tokens)
        stratum = Stratum(tree=tree, tokens=tokens[tree.order], num_off=len(first), num_on=len(second))
        is_on = tree.order >= len(first)
        values = [STATISTICS[name](stratum) for name in statistics]
        observed[:, index] = [value(is_on[:, None].astype(np.float64))[0] for value in values]
        for start, labels in _random_labels(len(first), len(second), num_permutations, rng):
            for row, value in enumerate(values):
                null[row, index, start : start + labels.shape[1]] = value(labels)
        df += int(frequent_prefixes(stratum).max())
        weight += mode_weight(tree, is_on)
    divisors: Mapping[StatisticName, float] = {"mode": weight, "collisions": len(off), "mmd": len(off)}
    judged = [_judge(_KINDS[name], observed[row], null[row]) for row, name in enumerate(statistics)]
    adjusted = holm(np.array([overall.p_value for overall, _ in judged]))
    tests = tuple(
        JointTest(
            name=name,
            statistic=overall.statistic,
            z=overall.z,
            p_value=overall.p_value,
            adjusted_p_value=float(adjusted_p),
            df=df if name == "tree_g" else None,
            estimate=overall.statistic / divisors[name] if name in divisors else None,
            stratum_statistic=observed[row],
            stratum_z=own.z,
            stratum_p_value=own.p_value,
        )
        for row, (name, (overall, own), adjusted_p) in enumerate(zip(statistics, judged, adjusted, strict=True))
    )
    return JointResult(
        tests=tests,
        num_off=num_off,
        num_on=num_on,
        num_tokens=sum(samples.size for arm in (off, on) for samples in arm),
        num_permutations=num_permutations,
    )


class _Overall(NamedTuple):
    statistic: float
    z: float
    p_value: float


class _ByStratum(NamedTuple):
    z: Floats
    p_value: Floats


def _judge(kind: _Kind, observed: Floats, null: Floats) -> tuple[_Overall, _ByStratum]:
    """Observed [S] against its null [S, B]: the sum over strata, and each stratum by itself."""
    total = _against_null(kind, observed.sum(keepdims=True), null.sum(axis=0, keepdims=True))
    overall = _Overall(float(observed.sum()), float(total.z[0]), float(total.p_value[0]))
    return overall, _against_null(kind, observed, null)


def _against_null(kind: _Kind, observed: Floats, null: Floats) -> _ByStratum:
    centre = np.zeros(len(observed)) if kind.centred else null.mean(axis=1)
    deviation = np.sqrt(((null - centre[:, None]) ** 2).mean(axis=1))
    scale = np.maximum(np.abs(null).max(axis=1), np.abs(observed))
    z = np.divide(observed - centre, deviation, out=np.zeros(len(observed)), where=deviation > _ROUNDING * scale)
    if kind.side == "both":
        observed, null = np.abs(observed), np.abs(null)
    extreme = null >= (observed - _ROUNDING * scale)[:, None]
    return _ByStratum(z, (extreme.sum(axis=1) + 1) / (null.shape[1] + 1))


def _random_labels(
    num_off: int, num_on: int, num_permutations: int, rng: np.random.Generator
) -> Iterator[tuple[int, Labels]]:
    """Blocks of random labellings with the index of their first. Draws do not depend on which arm is called off."""
    num_samples, smaller = num_off + num_on, min(num_off, num_on)
    block = max(1, _BLOCK_LABELS // num_samples)
    for start in range(0, num_permutations, block):
        # Those that drew the smallest numbers: one call outside the interpreter's lock, where a shuffle of every row
        # takes it for each. Two equal numbers of 53 bits are not to be met.
        drawn = rng.random((min(block, num_permutations - start), num_samples))
        chosen = drawn <= np.partition(drawn, smaller - 1, axis=1)[:, smaller - 1 : smaller]
        # Turned round while it is small.
        turned = np.ascontiguousarray((chosen if num_on <= num_off else ~chosen).T)
        yield start, turned.astype(np.float64)


def _check(
    off: Sequence[npt.NDArray[np.integer]],
    on: Sequence[npt.NDArray[np.integer]],
    statistics: Sequence[StatisticName],
    num_permutations: int,
    level: float,
) -> None:
    for name in statistics:
        if name not in STATISTICS:
            raise UnknownName("joint statistic", name, STATISTICS)
    if not statistics or len(set(statistics)) < len(statistics):
        raise InvalidSetting("statistics", tuple(statistics), "must name at least one statistic, none of them twice")
    if num_permutations < 1:
        raise InvalidSetting("num_permutations", num_permutations, "must be at least 1")
    if not 0 < level < 1:
        raise InvalidSetting("level", level, "must be between 0 and 1")
    if num_permutations + 1 < len(statistics) / level * (1 - 1e-12):
        raise ResolutionTooCoarse(num_permutations, len(statistics), level)
    if len(off) != len(on):
        raise InvalidSetting("number of strata", (len(off), len(on)), "must be the same in both arms")
    if not len(off):
        raise InsufficientSamples("joint family (strata)", 0, 1)
    for index, pair in enumerate(zip(off, on, strict=True)):
        for arm, samples in zip(("off", "on"), pair, strict=True):
            if samples.ndim != 2:
                raise InvalidSetting(f"samples of arm {arm}, stratum {index}", samples.shape, "must be [n, T]")
            if len(samples) < 2:
                raise InsufficientSamples(f"joint family, arm {arm} of stratum {index}", len(samples), 2)
        if pair[0].shape[1] != pair[1].shape[1]:
            shapes = (pair[0].shape[1], pair[1].shape[1])
            raise InvalidSetting(f"positions of stratum {index}", shapes, "must be the same in both arms")
