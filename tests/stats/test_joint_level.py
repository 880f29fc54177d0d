"""How often the joint family flags a correct decoder, and that it flags wrong ones."""

import numpy as np
import pytest
from scipy import stats

from equivtest.stats.joint import joint_family
from equivtest.stats.joint_statistics import STATISTICS
from tests.stats.sequences import plain, prefix_laws, speculative

NUM_REPLICATIONS = 1_000


def replicated(num_off, num_on, epsilon, num_replications, seed):
    """Global and first stratum's p-values of every statistic, [num_replications, 4] each, the family's p-value, and
    z of mode."""
    rng = np.random.default_rng(seed)
    laws = [prefix_laws(6, rng, vocab=6) for _ in range(2)]
    overall, first, family, mode = [], [], [], []
    for _ in range(num_replications):
        result = joint_family(
            [plain(law, num_off, rng) for law in laws],
            [speculative(law, num_on, rng, epsilon=epsilon) for law in laws],
            num_permutations=199,
            level=0.05,
            rng=rng,
        )
        overall.append([test.p_value for test in result.tests])
        first.append([test.stratum_p_value[0] for test in result.tests])
        family.append(result.p_value)
        mode.append(result["mode"].z)
    return np.array(overall), np.array(first), np.array(family), np.array(mode)


@pytest.mark.parametrize(("num_off", "num_on", "seed"), [(24, 24, 41), (30, 15, 42)])
def test_a_correct_decoder_is_flagged_at_the_level(num_off, num_on, seed):
    """1,000 A/A runs of two strata. 5 % must lie in the exact 99.9 % interval of every statistic's share of p at most
    .05, a false alarm once in 1,000 each (9 intervals); the whole family may be below the level, as Holm is."""
    overall, first, family, _ = replicated(num_off, num_on, 0.0, NUM_REPLICATIONS, seed)
    for p_values in (overall, first):
        for name, column in zip(STATISTICS, p_values.T, strict=True):
            interval = stats.binomtest(int((column <= 0.05).sum()), NUM_REPLICATIONS).proportion_ci(0.999)
            assert interval.low <= 0.05 <= interval.high, (name, interval)
    flagged = int((family <= 0.05).sum())
    assert stats.binomtest(flagged, NUM_REPLICATIONS).proportion_ci(0.999).low <= 0.05
    assert flagged >= 10


@pytest.mark.parametrize(("epsilon", "seed"), [(0.35, 43), (-0.35, 44)], ids=["inflated", "deflated"])
def test_a_wrong_acceptance_is_flagged_in_its_direction(epsilon, seed):
    """The twin: a bias of .35 at 24 samples, up or down, found by mode in over 90 % of 100 runs, and by the family."""
    overall, _, family, mode = replicated(24, 24, epsilon, 100, seed)
    assert (overall[:, 0] <= 0.05).mean() > 0.9
    assert (family <= 0.05).mean() > 0.9
    assert (np.sign(mode) == np.sign(epsilon)).mean() > 0.9
