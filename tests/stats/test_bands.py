"""Bands hold what they say: pointwise 95 % of what chance gives."""

import numpy as np
import pytest
from scipy import stats

from equivtest.stats.bands import binomial_band, uniform_quantile_band


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
