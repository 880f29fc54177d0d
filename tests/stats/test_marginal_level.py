"""How often the marginal family stops a correct decoder, and that it stops a wrong one."""

import numpy as np
import pytest
from scipy import stats

from equivtest.stats.binning import count_tokens, merge_bins
from equivtest.stats.marginal import cell_statistics, chi2_p_values, marginal_family
from equivtest.stats.multiplicity import ADJUST
from tests.stats.laws import draw, realistic_laws, towards_the_mode

NUM_CELLS = 32


def replicated_p_values(epsilon: float, num_replications: int, num_off: int, num_on: int, seed: int):
    """[num_replications, NUM_CELLS] asymptotic p-values, all replications of the same laws."""
    rng = np.random.default_rng(seed)
    laws = realistic_laws(NUM_CELLS, rng)
    off = draw(np.tile(laws, (num_replications, 1)), num_off, rng)
    on = draw(np.tile(towards_the_mode(laws, epsilon), (num_replications, 1)), num_on, rng)
    table = merge_bins(count_tokens(off, on))
    p_values = chi2_p_values(cell_statistics(table, "chi2"), table.num_entries - 1)
    return p_values.reshape(num_replications, NUM_CELLS)


def share_stopped(p_values, method):
    return [bool((ADJUST[method](row) <= 0.05).any()) for row in p_values]


@pytest.mark.parametrize(("num_off", "num_on"), [(256, 256), (64, 64), (256, 64)])
def test_a_correct_decoder_is_stopped_in_at_most_five_percent_of_families(num_off, num_on):
    """2,000 A/A families of 32 cells. The lower end of the exact 99.9 % interval must not be above 5 %: a gate at the
    level fails this once in 2,000 times. Without Benjamini-Hochberg four families in five would be stopped."""
    p_values = replicated_p_values(0.0, 2_000, num_off, num_on, seed=11)
    stopped = share_stopped(p_values, "bh")
    assert stats.binomtest(sum(stopped), 2_000).proportion_ci(0.999).low <= 0.05
    assert sum(stopped) >= 10  # a gate that never fires would have no level to speak of
    assert sum(share_stopped(p_values, "by")) <= sum(stopped)
    assert (p_values <= 0.05).any(axis=1).mean() > 0.5


def test_a_biased_decoder_is_stopped():
    """The twin: the mode accepted with probability p + .1 at 256 seeds is stopped in over 99 % of families."""
    stopped = share_stopped(replicated_p_values(0.1, 300, 256, 256, seed=12), "bh")
    assert stats.binomtest(sum(stopped), 300).proportion_ci(0.999).low > 0.97


@pytest.mark.parametrize("way", [{"exact": True}, {"statistic": "max_z"}], ids=str)
def test_permutation_families_keep_the_level_and_see_the_bias(way):
    """400 A/A families of 8 cells of 48 samples, a size where nothing is asymptotic; 99.9 % interval as above. The twin
    is a bias of .4 in 30 families."""
    rng = np.random.default_rng(13)
    laws = realistic_laws(8, rng)

    def stopped(other, num_families):
        return sum(
            marginal_family(
                draw(laws, 48, rng), draw(other, 48, rng), rng=rng, num_permutations=999, num_tv_permutations=1, **way
            ).num_rejected
            > 0
            for _ in range(num_families)
        )

    assert stats.binomtest(stopped(laws, 400), 400).proportion_ci(0.999).low <= 0.05
    assert stopped(towards_the_mode(laws, 0.4), 30) == 30
