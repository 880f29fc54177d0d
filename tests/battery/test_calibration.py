"""A correct sampler fails no more often than the level says: checked at levels where it can be counted."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from equivtest.records import Evidence
from equivtest.stats.multiplicity import holm
from tests.battery.exact import correct_run

RUNS = 80


@pytest.fixture(scope="module")
def runs() -> list[list[Evidence]]:
    rng = np.random.default_rng(20)
    return [correct_run(rng) for _ in range(RUNS)]


def p_values(runs: list[list[Evidence]]) -> np.ndarray:
    return np.array([item.p_value for run in runs for item in run])


@pytest.mark.parametrize("level", [0.01, 0.1])
def test_runs_fail_no_more_often_than_the_level(runs: list[list[Evidence]], level: float) -> None:
    """All tests of a run, corrected as the battery corrects them; the share of failed runs against an exact binomial
    bound, passed at a true rate of `level` in 99.9 % of seeds."""
    failed = sum(bool((holm(np.array([item.p_value for item in run])) <= level).any()) for run in runs)
    assert stats.binom.sf(failed - 1, RUNS, level) > 1e-3


@pytest.mark.parametrize("level", [0.01, 0.001])
def test_single_tests_fail_no_more_often_than_the_level(runs: list[list[Evidence]], level: float) -> None:
    """Thousands of p-values, many of them of the same draws: a correlation of .1 would still pass in 99 % of seeds."""
    values = p_values(runs)
    failed, count = int((values <= level).sum()), len(values)
    assert count > 6_000
    assert failed <= stats.binom.isf(1e-4, count, level)


def test_the_statistics_have_the_variance_that_their_bounds_take(runs: list[list[Evidence]]) -> None:
    """Freedman's bound is never too small; a variance that is wrong would hide behind it. So the statistics themselves
    are held against the normal law: mean square 1 within 4 standard errors."""
    scores = np.array(
        [item.statistic for run in runs for item in run if "Freedman" in item.method and item.num_tokens > 300]
    )
    assert len(scores) > 2_000
    assert abs((scores**2).mean() - 1) < 4 * np.sqrt(2 / RUNS / 20)
    assert abs(scores.mean()) < 0.05


def test_p_values_of_draws_are_uniform(runs: list[list[Evidence]]) -> None:
    """Chi-squared p-values are held from both sides: Kolmogorov's distance at a level of 1e-3 of a tenth as many."""
    values = np.array([item.p_value for run in runs for item in run if "equal bins" in item.method])
    assert stats.kstest(values, "uniform").statistic < stats.kstwobign.isf(1e-3) / np.sqrt(len(values) / 10)
