import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.power import (
    bias_test_power,
    bias_test_seeds,
    law_power,
    neyman_pearson_power,
    neyman_pearson_seeds,
    pilot,
    smallest_bias,
)

NUM_RUNS = 10_000


def draft_probs(num_tokens, seed=0, shape=(0.6, 0.4)):
    return np.random.default_rng(seed).beta(*shape, num_tokens)


def simulated(p, bias, alpha, seed, max_weight=20.0):
    """Shares of runs in which the bias test and the likelihood-ratio test reject."""
    rng = np.random.default_rng(seed)
    biased = np.minimum(1.0, p + bias)
    weight = np.minimum(1 / (p * (1 - p)), max_weight)
    with np.errstate(divide="ignore"):
        ratio_accepted, ratio_rejected = np.log(biased / p), np.log((1 - biased) / (1 - p))

    def outcomes(law):
        drawn = rng.random((NUM_RUNS, len(p))) < law
        z = (weight * (drawn - p)).sum(axis=1) / np.sqrt((weight**2 * p * (1 - p)).sum())
        return z, np.where(drawn, ratio_accepted, ratio_rejected).sum(axis=1)

    _, null_ratio = outcomes(p)
    z, ratio = outcomes(biased)
    # The ratio has a few atoms of no weight only, so its quantile is the level's critical value.
    critical = np.sort(null_ratio)[::-1][int(alpha * NUM_RUNS)]
    return (np.abs(z) > stats.norm.isf(alpha / 2)).mean(), (ratio > critical).mean()


@pytest.mark.parametrize(("bias", "max_weight", "seed"), [(0.015, 20.0, 71), (0.025, 20.0, 72), (0.02, 100.0, 73)])
def test_the_closed_forms_agree_with_simulation(bias, max_weight, seed):
    """10,000 runs: the standard error is at most .005 for the bias test and, with the estimated critical value, .015
    for the likelihood-ratio test; .03 and .05 leave room for what a normal law misses at 1,500 tokens."""
    p = draft_probs(1_500)
    protocol = pilot(p, 10, max_weight=max_weight)
    bias_test, likelihood_ratio = simulated(p, bias, 0.01, seed, max_weight)
    assert bias_test_power(protocol, bias) == pytest.approx(bias_test, abs=0.03)
    assert neyman_pearson_power(protocol, bias) == pytest.approx(likelihood_ratio, abs=0.05)


def test_the_likelihood_ratio_of_a_coin_is_the_binomial_test():
    """All drafts alike: the best test counts acceptances. Exact power at the two neighbouring critical values."""
    p, bias, alpha, num_tokens = 0.4, 0.05, 0.01, 2_000
    critical = stats.binom.isf(alpha, num_tokens, p)
    powers = [stats.binom.sf(critical + step, num_tokens, p + bias) for step in (1, -1)]
    power = neyman_pearson_power(pilot(np.full(num_tokens, p), 1), bias, alpha=alpha)
    assert powers[0] < power < powers[1]


def test_a_coin_is_tested_best_by_its_mean():
    """All drafts alike and one-sided in effect: the bias test then is the best test, but for its second side."""
    protocol = pilot(np.full(2_000, 0.4), 16)
    ratio = bias_test_seeds(protocol, 0.02, alpha=0.02) / neyman_pearson_seeds(protocol, 0.02, alpha=0.01)
    assert ratio == pytest.approx(1, abs=0.01)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), bias=st.floats(0.005, 0.1), alpha=st.floats(0.001, 0.1))
@example(seed=398_502, bias=0.09375, alpha=0.0625)  # the wrong side's tail matters
def test_seeds_power_and_smallest_bias_say_the_same(seed, bias, alpha):
    protocol = pilot(draft_probs(300, seed), 7)
    seeds = bias_test_seeds(protocol, bias, alpha=alpha)
    assert bias_test_power(protocol, bias, seeds=seeds, alpha=alpha) == pytest.approx(0.9, abs=1e-3)
    assert smallest_bias(protocol, seeds=seeds, alpha=alpha) == pytest.approx(bias, rel=1e-3)
    best = neyman_pearson_seeds(protocol, bias, alpha=alpha)
    assert neyman_pearson_power(protocol, bias, seeds=best, alpha=alpha) == pytest.approx(0.9, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), bias=st.floats(0.005, 0.05))
def test_more_seeds_and_larger_biases_are_found_more_often_and_the_best_test_is_best(seed, bias):
    protocol = pilot(draft_probs(2_000, seed), 16)
    for power_of in (bias_test_power, neyman_pearson_power):
        powers = [power_of(protocol, bias, seeds=seeds) for seeds in (1, 8, 64, 512)]
        assert powers == sorted(powers)
        assert power_of(protocol, bias) <= power_of(protocol, 2 * bias) + 1e-9
    assert law_power(protocol).ratio > 1


def test_the_cap_of_the_weights_costs_little_where_drafts_are_nearly_sure():
    """Over a quarter of the drafts is beyond the cap, down to p (1 - p) = .001: twice the limit, where the cap of small
    runs needs almost four times as much."""
    p = draft_probs(20_000, shape=(0.3, 0.3)).clip(1e-3, 1 - 1e-3)
    assert law_power(pilot(p, 256)).ratio < 2
    assert law_power(pilot(p, 256, max_weight=20.0)).ratio > 3.5


def test_what_a_protocol_sees_is_said_once():
    protocol = pilot(draft_probs(20_000), 256)
    result = law_power(protocol)
    assert result.seeds == pytest.approx(256, rel=1e-3)
    assert 0.003 < result.smallest_bias < 0.02
    assert law_power(protocol, seeds=1_024).smallest_bias < 0.6 * result.smallest_bias
    # Two-sided at .01 asks for more than two-sided at .05.
    assert law_power(protocol, alpha=0.05).smallest_bias < result.smallest_bias


def test_rejected_drafts_that_a_bias_rules_out_count_for_the_best_test():
    """Drafts of p = .995 would always be accepted under a bias of .01; without it 1,000 of them see five rejections,
    and none with probability .0067."""
    protocol = pilot(np.full(1_000, 0.995), 1)
    assert neyman_pearson_power(protocol, 0.01) == 1
    assert bias_test_power(protocol, 0.01) == pytest.approx(0)  # z is 2.24 without a rejection
    # Ten of them see none with probability .95, so the best test at .01 rejects that and no more than by chance.
    assert neyman_pearson_power(pilot(np.full(10, 0.995), 1), 0.01) <= 0.05


def test_drafts_outside_the_support_are_left_out_and_sure_ones_add_nothing():
    p = draft_probs(500)
    one, other = pilot(p, 4), pilot(np.concatenate([p, np.zeros(100), np.ones(100)]), 4)
    assert bias_test_power(one, 0.03) == pytest.approx(bias_test_power(other, 0.03))
    assert neyman_pearson_power(one, 0.03) == pytest.approx(neyman_pearson_power(other, 0.03))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: pilot(np.array([0.5, 1.5]), 1), InvalidSetting),
        (lambda: pilot(np.array([0.5, np.nan]), 1), InvalidSetting),
        (lambda: pilot(np.array([[0.5]]), 1), InvalidSetting),
        (lambda: pilot(np.array([0.5]), 0), InvalidSetting),
        (lambda: pilot(np.array([0.5]), 1, max_weight=1.0), InvalidSetting),
        (lambda: pilot(np.array([]), 1), InsufficientSamples),
        (lambda: pilot(np.array([0.0, 1.0]), 1), InsufficientSamples),
        (lambda: bias_test_power(pilot(np.array([0.5]), 1), 0.0), InvalidSetting),
        (lambda: bias_test_seeds(pilot(np.array([0.5]), 1), 0.1, power=0.3), InvalidSetting),
        (lambda: smallest_bias(pilot(np.array([0.5]), 1)), InsufficientSamples),
    ],
)
def test_what_cannot_be_answered_is_refused(call, error):
    with pytest.raises(error):
        call()
