"""Acceptance, draws and shared coins of a sampler whose laws are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from equivtest.stats.sampler import acceptance, draws, shared, smallest_bias


def decisions(bias: float, count: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    accept_prob = rng.uniform(0.05, 0.95, count)
    return rng.random(count) < accept_prob + bias, accept_prob


@pytest.mark.parametrize("bias", [-0.02, 0.02])
def test_the_estimate_of_the_acceptance_bias_is_what_was_planted(bias: float) -> None:
    """Within the width of its 95 % interval, two standard errors either way: one seed in 10,000 is further off."""
    found = acceptance(*decisions(bias, 100_000), name="acceptance", stratum="all")
    assert found is not None
    assert abs(found.estimate - bias) < found.ci_high - found.ci_low
    assert found.p_value < 1e-12


def test_the_smallest_bias_is_found_in_nine_of_ten_runs() -> None:
    """40 runs: fewer than 30 would come once in 1,000 seeds. None of 40 runs without a bias comes near."""
    count, level = 20_000, 1e-6
    bias = smallest_bias(decisions(0.0, count)[1], level=level)
    results = [acceptance(*decisions(bias, count, seed), name="a", stratum="s") for seed in range(40)]
    assert sum(found is not None and found.p_value <= level for found in results) >= 30
    null = [acceptance(*decisions(0.0, count, seed), name="a", stratum="s") for seed in range(40)]
    assert not any(found is not None and found.p_value <= 1e-4 for found in null)


def test_decisions_that_are_not_open_say_nothing() -> None:
    sure = np.array([0.0, 1.0])
    assert acceptance(np.array([False, True]), sure, name="a", stratum="s") is None
    assert smallest_bias(sure, level=1e-6) == math.inf
    assert draws(np.full(99, 0.5), name="d", stratum="s") is None
    assert shared(np.zeros(5), np.zeros(5), np.ones(5), name="c", stratum="s") is None


def test_a_shared_coin_correlates_two_draws_and_independent_ones_do_not() -> None:
    """Fixed seed; the independent pair fails with probability 1e-4 at most."""
    rng = np.random.default_rng(4)
    first, second = rng.random((2, 5_000)) - 0.5
    variance = np.full(5_000, 1 / 12)
    apart = shared(first, second, variance, name="c", stratum="s")
    together = shared(first, 0.3 * first + 0.7 * second, variance, name="c", stratum="s")
    assert apart is not None
    assert apart.p_value > 1e-4
    assert together is not None
    assert together.p_value < 1e-12
    assert together.estimate == pytest.approx(0.3, abs=0.05)
