"""Bands hold what they say: pointwise 95 % of what chance gives."""

import numpy as np
import pytest
from scipy import stats

from equivtest.stats.bands import binomial_band, binomial_intervals, sum_band, uniform_quantile_band


def test_each_sorted_uniform_lies_in_its_band_in_95_percent_of_draws() -> None:
    """20,000 draws of 30 values: each of the 30 shares has a standard error of .0015; none strays further than 5."""
    expected, low, high = uniform_quantile_band(30)
    draws = np.sort(np.random.default_rng(1).random((20_000, 30)), axis=1)
    assert draws.mean(axis=0) == pytest.approx(expected, abs=0.004)
    inside = ((draws >= low) & (draws <= high)).mean(axis=0)
    assert np.abs(inside - 0.95).max() < 5 * 0.0016
    # The twin: values that crowd at 0 leave it.
    crowded = draws**2
    assert ((crowded >= low) & (crowded <= high)).mean(axis=0).min() < 0.5


def test_no_values_have_no_band() -> None:
    assert [len(values) for values in uniform_quantile_band(0)] == [0, 0, 0]


def test_a_count_lies_in_its_band_with_at_least_95_percent() -> None:
    low, high = binomial_band(1_000, 0.05)
    law = stats.binom(1_000, 0.05)
    assert 0.95 <= law.cdf(high) - law.cdf(low - 1) < 0.97


def test_intervals_of_a_probability_are_those_of_clopper_and_pearson_and_cover_it() -> None:
    low, high = binomial_intervals(40)
    for count in (0, 1, 17, 40):
        expected = stats.binomtest(count, 40).proportion_ci(0.95, method="exact")
        assert (low[count], high[count]) == pytest.approx((expected.low, expected.high), abs=1e-9)
    for probability in (0.03, 0.4, 0.9):
        weights = stats.binom(40, probability).pmf(np.arange(41))
        covered = weights[(low <= probability) & (probability <= high)].sum()
        assert covered >= 0.95
        # The twin: intervals of four times as many trials are too short for these.
        short_low, short_high = (ends[::4] for ends in binomial_intervals(160))
        assert weights[(short_low <= probability) & (probability <= short_high)].sum() < 0.9


def test_the_share_of_independent_events_lies_in_its_band_in_95_percent_of_draws() -> None:
    """20,000 draws of 500 events: the share has a standard error of .0015, and the counts steps of up to .005."""
    rng = np.random.default_rng(2)
    probabilities = rng.random(500)
    low, high = sum_band(probabilities)
    shares = (rng.random((20_000, 500)) < probabilities).mean(axis=1)
    assert ((shares >= low) & (shares <= high)).mean() == pytest.approx(0.95, abs=0.0125)
    # The twin: a bias of .03 leaves it.
    assert ((shares + 0.03 >= low) & (shares + 0.03 <= high)).mean() < 0.75
    assert sum_band(np.ones(3)) == (1.0, 1.0)
