"""Faults that the joint family finds and the marginal family does not, at the gate budget."""

import numpy as np

from equivtest.stats.joint import joint_family
from equivtest.stats.marginal import marginal_family
from tests.stats.laws import realistic_laws
from tests.stats.sequences import coupled, plain, prefix_laws, speculative

NUM_PROMPTS, NUM_POSITIONS, NUM_SEEDS = 8, 32, 256


def judged(off, on, rng):
    """Cells that the marginal family rejects, and the joint family."""
    cells_off, cells_on = ([cell for samples in arm for cell in samples.T] for arm in (off, on))
    rejected = marginal_family(cells_off, cells_on, num_tv_permutations=1, rng=rng).num_rejected
    return rejected, joint_family(off, on, num_permutations=999, rng=rng)


def runs(epsilon, num_runs, seed):
    """Runs of a speculative decoder whose every context has a mode of its own."""
    rng = np.random.default_rng(seed)
    for _ in range(num_runs):
        laws = [prefix_laws(NUM_POSITIONS, rng, shift=1.5) for _ in range(NUM_PROMPTS)]
        off = [plain(law, NUM_SEEDS, rng) for law in laws]
        yield judged(off, [speculative(law, NUM_SEEDS, rng, epsilon=epsilon) for law in laws], rng)


def test_a_small_acceptance_bias_is_found_by_mode_where_marginals_see_next_to_nothing():
    """Blocks of 4 argmax drafts accepted with min(1, p + .03) in four runs and min(1, p + .05) in three. z of mode is
    4.5 and 7.3 on average with a deviation near 1; two-sided at a quarter of .01 it must exceed 3.0. Of 160 runs
    at .03 it found 153, and the marginal family rejected a cell in 24: that more than one of four runs is missed, or
    that more than two show a cell, has probability .01 each. Fixed seeds."""
    subtle = list(runs(0.03, 4, seed=61))
    assert sum(rejected > 0 for rejected, _ in subtle) <= 2
    assert sum(joint.p_value <= 0.01 for _, joint in subtle) >= 3
    larger = [joint for _, joint in runs(0.05, 3, seed=52)]
    assert min(joint["mode"].z for joint in larger) > 5
    assert np.mean([joint["mode"].estimate for joint in larger]) > np.mean([j["mode"].estimate for _, j in subtle])


def test_a_correct_decoder_is_not_flagged():
    """The twin: six runs, each flagged with probability at most .01; more than two are once in 50,000 draws."""
    assert sum(joint.p_value <= 0.01 for _, joint in runs(0.0, 6, seed=53)) <= 2


def test_a_fault_that_leaves_every_marginal_intact_is_found_by_the_joint_family_alone():
    """Four coins in five are used twice in a row. The marginal family is at its level: over three runs it rejects more
    than two cells in under one draw in 100. The same fault in both arms is flagged with probability at most .01."""
    rng = np.random.default_rng(54)
    laws = [rng.permuted(realistic_laws(NUM_POSITIONS, rng, vocab=40), axis=1) for _ in range(NUM_PROMPTS)]
    num_rejected, num_false = 0, 0
    for _ in range(3):
        off, on, again = (
            [coupled(law, NUM_SEEDS, rng, coupling=coupling) for law in laws] for coupling in (0.0, 0.8, 0.8)
        )
        rejected, joint = judged(off, on, rng)
        num_rejected += rejected
        assert joint["tree_g"].adjusted_p_value <= 0.01
        num_false += judged(on, again, rng)[1].p_value <= 0.01
    assert num_rejected <= 2
    assert num_false <= 1
