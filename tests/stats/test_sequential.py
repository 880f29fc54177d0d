import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.sequential import bias_sequence, e_process, normal_mixture_radius

MAX_WEIGHT = 20.0


def draft_tokens(num_tokens, bias, rng):
    """Draft probabilities as decoding has them, many near 0 and 1, and whether each draft came out."""
    p = rng.beta(0.6, 0.4, num_tokens).clip(1e-4, 1 - 1e-4)
    return p, rng.random(num_tokens) < (p + bias).clip(0, 1)


def weights(p):
    return np.minimum(1 / (p * (1 - p)), MAX_WEIGHT)


def bets_of(p, drawn):
    """Differences and bounds of the efficient weight, as one functional: [1, n] each."""
    weight = weights(p)
    return (weight * (drawn - p))[None], (weight * np.maximum(p, 1 - p))[None]


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=6), seed=st.integers(0, 2**32))
def test_any_cut_into_updates_leads_to_the_same_state(cuts, seed):
    rng = np.random.default_rng(seed)
    p, drawn = draft_tokens(300, 0.2, rng)
    differences, bounds = bets_of(p, drawn)
    whole, wealth = bias_sequence(margin=0.05), e_process(1)
    pieces, wealth_pieces = whole, wealth
    edges = [0, *sorted(cuts), 300]
    for start, stop in pairwise(edges):
        piece = slice(start, stop)
        pieces = pieces.update((drawn - p)[piece], (p * (1 - p))[piece], weights(p)[piece])
        wealth_pieces = wealth_pieces.update(differences[:, piece], bounds[:, piece])
    whole = whole.update(drawn - p, p * (1 - p), weights(p))
    wealth = wealth.update(differences, bounds)
    assert (pieces.decision, pieces.decided_at) == (whole.decision, whole.decided_at)
    assert pieces.interval == pytest.approx(whole.interval)
    assert wealth_pieces.crossed_at == wealth.crossed_at
    assert wealth_pieces.num_tokens == wealth.num_tokens == 300
    assert wealth_pieces.log_e == pytest.approx(wealth.log_e)
    assert wealth_pieces.max_log_e == pytest.approx(wealth.max_log_e)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_both_signs_are_treated_alike(seed):
    p, drawn = draft_tokens(200, 0.1, np.random.default_rng(seed))
    differences, bounds = bets_of(p, drawn)
    assert e_process(1).update(differences, bounds).log_e == pytest.approx(
        e_process(1).update(-differences, bounds).log_e
    )
    one = bias_sequence().update(drawn - p, p * (1 - p), weights(p))
    other = bias_sequence().update(p - drawn, p * (1 - p), weights(p))
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert (one.decision, one.decided_at) == (other.decision, other.decided_at)


def test_mean_wealth_is_the_mean_over_bets_and_functionals():
    differences, bounds = np.array([[0.5, -0.25, 1.0], [0.0, 2.0, -1.0]]), np.array([[1.0, 1.0, 1.0], [0.0, 2.0, 4.0]])
    bets = (0.25, -0.5, 3.0)
    wealth = []
    for x, bound in zip(differences, bounds, strict=True):
        for bet in bets:
            product = 1.0
            for x_t, bound_t in zip(x, bound, strict=True):
                largest = 0.5 / bound_t if bound_t else 0.0
                product *= 1 + max(-largest, min(bet, largest)) * x_t
            wealth.append(product)
    state = e_process(2, bets=bets).update(differences, bounds)
    assert math.exp(state.log_e) == pytest.approx(np.mean(wealth))


NUM_RUNS = 2_000


def crossings(bias, num_runs, num_tokens, alpha, seed):
    """Tokens to the first crossing of 1 / alpha in each run, None where there is none; and the last p-value."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num_runs):
        p, drawn = draft_tokens(num_tokens, bias, rng)
        centred, bound = drawn - p, np.maximum(p, 1 - p)
        later = np.arange(num_tokens) % 3 > 0  # a functional that speaks of some tokens only
        efficient, efficient_bound = bets_of(p, drawn)
        state = e_process(3, alpha=alpha).update(
            np.stack([efficient[0], centred, centred * later]), np.stack([efficient_bound[0], bound, bound * later])
        )
        found.append((state.crossed_at, state.p_value))
    return found


def test_wealth_ever_reaches_one_over_alpha_in_at_most_alpha_of_correct_runs():
    """2,000 runs of 400 tokens, looked at after every one of them: the exact 99.9 % interval must reach down to
    alpha at the end and at every look before it, which a correct process fails once in 2,000 draws."""
    found = crossings(0.0, NUM_RUNS, 400, 0.05, seed=61)
    for look in (25, 50, 100, 200, 400):
        crossed = sum(at is not None and at <= look for at, _ in found)
        assert stats.binomtest(crossed, NUM_RUNS).proportion_ci(0.999).low <= 0.05
    assert all((at is not None) == (p_value <= 0.05) for at, p_value in found)
    for level in (0.1, 0.5):
        share = sum(p_value <= level for _, p_value in found)
        assert stats.binomtest(share, NUM_RUNS).proportion_ci(0.999).low <= level


def test_wealth_reaches_one_over_alpha_under_a_bias():
    """The twin: a bias of .1 is found in every one of 50 runs within 2,000 tokens, of -.1 as well."""
    for bias, seed in ((0.1, 62), (-0.1, 63)):
        found = crossings(bias, 50, 2_000, 0.01, seed)
        assert all(at is not None for at, _ in found)
        assert np.median([at for at, _ in found]) < 1_000


def replicated_sequences(bias, num_runs, num_tokens, seed):
    """[num_runs, num_tokens] each: S, W and V after every token, and the sum of w times the bias."""
    rng = np.random.default_rng(seed)
    p = rng.beta(0.6, 0.4, (num_runs, num_tokens)).clip(1e-4, 1 - 1e-4)
    biased = (p + bias).clip(0, 1)
    drawn = rng.random(p.shape) < biased
    weight = weights(p)
    total = np.cumsum(weight * (drawn - p), axis=1)
    variance = np.maximum(np.cumsum(weight**2 * p * (1 - p), axis=1), np.cumsum((weight * (drawn - p)) ** 2, axis=1))
    return total, np.cumsum(weight, axis=1), variance, np.cumsum(weight * (biased - p), axis=1)


@pytest.mark.parametrize("bias", [0.0, 0.03, -0.03])
def test_the_sequence_covers_the_mean_bias_at_all_times(bias):
    """2,000 runs of 1,000 tokens, checked after every one of them: the exact 99.9 % interval of the share of runs that
    ever leave must reach down to alpha, which a valid sequence fails once in 2,000 draws."""
    total, _, variance, true = replicated_sequences(bias, NUM_RUNS, 1_000, seed=64)
    radius = normal_mixture_radius(variance, alpha=0.05, rho=1_000.0)
    ever_left = (np.abs(total - true) > radius).any(axis=1)
    assert stats.binomtest(int(ever_left.sum()), NUM_RUNS).proportion_ci(0.999).low <= 0.05
    assert ever_left.sum() >= 5  # an interval that nothing leaves would say nothing


def test_a_fixed_time_interval_would_not_cover_at_all_times():
    """Why it is a sequence: the usual 95 % interval, looked at after every token, is left by one run in four;
    15 % lies three standard errors below."""
    total, _, variance, _ = replicated_sequences(0.0, 200, 1_000, seed=65)
    ever_left = (np.abs(total) > stats.norm.isf(0.025) * np.sqrt(variance))[:, 20:].any(axis=1)
    assert ever_left.mean() > 0.15


def decide(bias, seed, num_tokens=60_000, margin=0.02):
    p, drawn = draft_tokens(num_tokens, bias, np.random.default_rng(seed))
    return bias_sequence(margin=margin, alpha=0.01).update(drawn - p, p * (1 - p), weights(p))


def test_collection_stops_equivalent_inside_the_margin_and_different_away_from_zero():
    """20 runs each; either word is wrong with probability at most .01 a run."""
    correct = [decide(0.0, seed) for seed in range(20)]
    assert sum(state.decision == "equivalent" for state in correct) >= 18
    biased = [decide(0.05, seed) for seed in range(100, 120)]
    assert sum(state.decision == "different" for state in biased) >= 18
    # A larger bias is seen sooner, and neither takes all tokens.
    assert np.median([s.decided_at for s in biased]) < np.median([s.decided_at for s in correct]) < 40_000
    for state in biased:
        assert state.interval[0] < state.estimate < state.interval[1]


def test_the_first_decision_stands():
    state = bias_sequence(margin=0.3, alpha=0.05)
    ones = np.ones(400)
    state = state.update(0.5 * np.resize([1.0, -1.0], 400), 0.25 * ones, 4 * ones)
    assert state.decision == "equivalent"
    later = state.update(0.5 * ones, 0.25 * ones, 4 * ones)
    assert (later.decision, later.decided_at) == ("equivalent", state.decided_at)
    assert later.interval[0] > 0


def test_an_interval_that_excludes_zero_inside_the_margin_is_different():
    state = replace(bias_sequence(margin=0.9, alpha=0.05, rho=1.0), total=50.0, weight=100.0, predicted_variance=10.0)
    low, high = state.interval
    assert 0 < low < high < 0.9
    assert state.update(np.zeros(1), np.zeros(1), np.zeros(1)).decision == "different"


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: e_process(0), InvalidSetting),
        (lambda: e_process(1, alpha=0.0), InvalidSetting),
        (lambda: e_process(1, bets=()), InvalidSetting),
        (lambda: e_process(1).update(np.array([[2.0]]), np.array([[1.0]])), InvalidSetting),
        (lambda: e_process(1).update(np.array([[np.nan]]), np.array([[1.0]])), InvalidSetting),
        (lambda: e_process(2).update(np.array([[0.0]]), np.array([[1.0]])), InvalidSetting),
        (lambda: bias_sequence(alpha=1.0), InvalidSetting),
        (lambda: bias_sequence(margin=0.0), InvalidSetting),
        (lambda: bias_sequence(rho=0.0), InvalidSetting),
        (lambda: bias_sequence().update(np.zeros(2), np.zeros(1), np.zeros(2)), InvalidSetting),
        (lambda: bias_sequence().update(np.zeros(1), -np.ones(1), np.zeros(1)), InvalidSetting),
        (lambda: bias_sequence().update(np.zeros(1), np.zeros(1), np.array([np.inf])), InvalidSetting),
        (lambda: bias_sequence().interval, InsufficientSamples),
        (lambda: bias_sequence().update(np.zeros(1), np.zeros(1), np.zeros(1)).estimate, InsufficientSamples),
    ],
)
def test_nonsense_and_nothing_are_refused(build, error):
    with pytest.raises(error):
        build()


def test_no_tokens_change_nothing():
    nothing = np.zeros((2, 0))
    assert e_process(2).update(nothing, nothing).log_e == 0
    assert bias_sequence().update(np.zeros(0), np.zeros(0), np.zeros(0)) == bias_sequence()
