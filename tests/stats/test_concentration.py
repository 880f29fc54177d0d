"""p-values far in the tail, against exact probabilities and importance sampling."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.concentration import MIN_PER_BIN, equal_bins, freedman, freedman_critical


@pytest.mark.parametrize("probability", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("count", [20, 1000, 100_000])
def test_freedman_is_never_below_the_exact_binomial_tail(probability: float, count: int) -> None:
    law = stats.binom(count, probability)
    variance, largest = count * probability * (1 - probability), max(probability, 1 - probability)
    for successes in range(0, count + 1, max(1, count // 50)):
        total = successes - count * probability
        exact = law.sf(successes - 1) if total > 0 else law.cdf(successes)
        assert freedman(total, variance, largest) >= exact


def test_freedman_costs_a_seventh_of_the_samples_at_1e_8() -> None:
    """The factor that the docstring names: squares of the critical values, bound against normal."""
    assert 1.1 < (freedman_critical(1e-8, 1e6, 1.0) / 1e3 / stats.norm.isf(0.5e-8)) ** 2 < 1.18


@pytest.mark.parametrize(("variance", "largest"), [(100.0, 1.0), (3.0, 0.5), (0.0, 1.0)])
def test_the_critical_value_has_the_p_value(variance: float, largest: float) -> None:
    assert freedman(freedman_critical(1e-9, variance, largest), variance, largest) == pytest.approx(1e-9)


def test_a_sum_that_cannot_move() -> None:
    assert freedman(0.0, 0.0, 0.0) == 1.0
    assert freedman(1.0, 0.0, 0.0) == 0.0
    with pytest.raises(InvalidSetting, match="at least 0"):
        freedman(1.0, -1.0, 0.0)


@pytest.mark.parametrize("num_bins", [4, 20])
def test_equal_bins_hold_their_level_down_to_1e_9(num_bins: int) -> None:
    """Importance sampling from Dirichlet-multinomial counts, whose spread reaches into the tail; within 15 %."""
    total, num_draws = MIN_PER_BIN * num_bins, 20_000
    rng = np.random.default_rng(1)
    for level in (1e-6, 1e-9):
        spread = stats.chi2.isf(level, num_bins - 1) / (num_bins - 1)
        weight = (total - spread) / (spread - 1)
        each = weight / num_bins
        counts = rng.multinomial(total, rng.dirichlet(np.full(num_bins, each), num_draws))
        log_ratio = (
            -total * np.log(num_bins)
            - special.gammaln(weight)
            + special.gammaln(total + weight)
            - (special.gammaln(counts + each) - special.gammaln(each)).sum(axis=1)
        )
        p_values = np.array([equal_bins(row)[1] for row in counts])
        rejected = np.exp(log_ratio) * (p_values <= level)
        assert rejected.mean() == pytest.approx(level, rel=0.15)


def test_equal_bins_see_a_tilt() -> None:
    """Twin of the level: 4 % more in one half of the bins, at 100,000 draws."""
    counts = np.where(np.arange(20) < 10, 5200, 4800)
    assert equal_bins(counts)[1] < 1e-12
    assert equal_bins(np.full(20, 5000)) == (0.0, 1.0)


def test_too_few_counts_are_refused() -> None:
    with pytest.raises(InsufficientSamples):
        equal_bins(np.full(20, MIN_PER_BIN - 1))
