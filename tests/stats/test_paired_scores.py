"""The interval of a difference of scores holds its level, and sees what the overlap of intervals does not."""

import numpy as np
import pytest
from scipy import stats

from equivtest.errors import InsufficientSamples, InvalidSetting, NoSpread
from equivtest.stats.paired_scores import overlap, paired_difference, seed_interval

RUNS, ITEMS, SEEDS = 2000, 150, 3


def scores(rng: np.random.Generator, chance: np.ndarray, size: int = RUNS) -> np.ndarray:
    """[size, num_items, SEEDS] answers that are right with each item's own chance."""
    return (rng.random((size, len(chance), SEEDS)) < chance[None, :, None]).astype(float)


def shares(drop: float) -> tuple[int, int]:
    """How many of RUNS runs the paired interval and the overlap of intervals stop, `drop` lower in arm on."""
    rng = np.random.default_rng(5)
    chance = rng.beta(0.7, 0.7, ITEMS)
    off, on = scores(rng, chance), scores(rng, np.clip(chance - drop, 0, 1))
    found = [paired_difference(a, b).p_value <= 0.05 for a, b in zip(off, on, strict=True)]
    apart = [not overlap(seed_interval(a), seed_interval(b)) for a, b in zip(off, on, strict=True)]
    return sum(found), sum(apart)


def test_a_correct_decoder_is_called_different_in_five_percent_of_runs() -> None:
    """Fixed seed; an exact 99.9 % interval over 2,000 runs of another seed would miss 0.05 once in a thousand."""
    found, apart = shares(0.0)
    interval = stats.binomtest(found, RUNS).proportion_ci(0.999)
    assert interval.low <= 0.05 <= interval.high
    # The usual reading has no level of its own: three seeds give an interval with t of 4.3.
    assert apart < found


def test_a_lower_score_is_found_where_the_intervals_still_overlap() -> None:
    """Power over 2,000 runs of a drop of 0.1 in every item's chance."""
    found, apart = shares(0.1)
    assert found >= 0.85 * RUNS
    assert apart <= 0.6 * RUNS


def test_the_visible_difference_is_found_with_the_power_that_it_states() -> None:
    rng = np.random.default_rng(6)
    chance = np.full(ITEMS, 0.5)
    own = paired_difference(*scores(rng, chance, 2)).visible
    off, on = scores(rng, chance), scores(rng, chance - own)
    found = sum(paired_difference(a, b).p_value <= 0.05 for a, b in zip(off, on, strict=True))
    assert 0.85 <= found / RUNS <= 0.95


def test_it_is_the_paired_t_test_of_the_items_means() -> None:
    """Reference: scipy.stats.ttest_rel on the items' means."""
    rng = np.random.default_rng(7)
    off, on = scores(rng, rng.random(40), 2)
    own = paired_difference(off, on)
    theirs = stats.ttest_rel(on.mean(axis=1), off.mean(axis=1))
    assert own.p_value == pytest.approx(theirs.pvalue)
    interval = theirs.confidence_interval(0.95)
    assert (own.ci_low, own.ci_high) == pytest.approx((interval.low, interval.high))
    assert paired_difference(on, off).estimate == -own.estimate


def test_seeds_that_repeat_each_other_give_no_narrower_interval() -> None:
    """What hangs together enters once: the cluster is the item."""
    off, on = scores(np.random.default_rng(8), np.full(50, 0.5), 2)
    once = paired_difference(off[:, :1], on[:, :1])
    thrice = paired_difference(np.repeat(off[:, :1], 3, axis=1), np.repeat(on[:, :1], 3, axis=1))
    assert thrice.standard_error == pytest.approx(once.standard_error)


def test_items_for_a_margin_go_with_its_inverse_square() -> None:
    own = paired_difference(*scores(np.random.default_rng(9), np.full(100, 0.5), 2))
    assert own.items_for_margin(0.01) == pytest.approx(4 * own.items_for_margin(0.02), abs=4)


def test_what_cannot_be_judged_is_refused() -> None:
    right = np.ones((10, 3))
    with pytest.raises(NoSpread):
        paired_difference(right, right)
    with pytest.raises(InsufficientSamples):
        seed_interval(right[:, :1])
    with pytest.raises(InsufficientSamples):
        paired_difference(right[:1], right[:1])
    with pytest.raises(InvalidSetting):
        paired_difference(right, right[:5])
