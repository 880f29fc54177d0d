"""Each planted fault is found by the test that should see it, and leaves alone those that should not."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from equivtest.records import Origin
from equivtest.stats.law import LawResult, law_family
from equivtest.stats.law_counts import residual
from equivtest.stats.law_martingale import bias, lag
from equivtest.stats.marginal import marginal_family
from tests.stats.law_sampler import Fault, Simulation, even_world, make_world, simulate

NUM_RUNS = 40
"""Runs of 3,840 tokens for each fault."""


def runs(simulation: Simulation) -> list[LawResult]:
    return [law_family(simulation.replication(index), "on") for index in range(NUM_RUNS)]


def share_flagged(results: list[LawResult], name: str, alpha: float = 0.01) -> float:
    return float(np.mean([name in {e.name for e in result.flagged(alpha)} for result in results]))


def planted(fault: Fault, *, even: bool = False, seed: int, **options: object) -> list[LawResult]:
    world = even_world(11) if even else make_world(11)
    sizes = {"samples_per_group": 80, "num_positions": 24, "max_draft": 2} | options
    return runs(simulate(world, NUM_RUNS, fault=fault, seed=seed, **sizes))  # type: ignore[arg-type]


CASES = {
    # fault: (world is even, tests that see it, tests that must not)
    "inflated acceptance": (
        Fault(epsilon=0.08),
        True,
        {"bias"},
        {"surprisal_bonus", "surprisal_plain", "lag_recovered", "rows", "duplicates", "support"},
    ),
    "inflated acceptance where laws differ": (
        Fault(epsilon=0.08),
        False,
        {"bias"},
        {"surprisal_bonus", "surprisal_plain", "lag_accepted", "lag_recovered", "lag_bonus", "lag_plain", "rows"},
    ),
    "deflated acceptance": (Fault(epsilon=-0.08), True, {"bias"}, {"surprisal_bonus", "surprisal_plain", "support"}),
    "bonus from the wrong row": (
        Fault(bonus_from_wrong_row=True),
        False,
        {"surprisal_bonus", "support"},
        {"bias", "bias_slot_0", "bias_slot_1", "surprisal_draft", "surprisal_plain", "lag_recovered", "rows"},
    ),
    "recovery's coin used again": (
        Fault(reused_coin=True),
        True,
        {"lag_recovered"},
        {"bias", "bias_slot_0", "surprisal_draft", "surprisal_bonus", "rank", "lag_accepted", "rows", "support"},
    ),
    "coins shared by the rows of a step": (
        Fault(shared_rows=True),
        False,
        {"rows"},
        {"support"},  # with one coin for 160 rows every other sum varies as if it had a 160th of its tokens
    ),
    "colliding seeds": (Fault(colliding_seeds=True), False, {"duplicates"}, {"support", "rows", "lag_recovered"}),
    "filter left out": (Fault(unfiltered=True), False, {"support"}, {"rows", "lag_recovered", "duplicates"}),
    "draft rows too hot": (
        Fault(draft_temperature=1.3),
        False,
        {"surprisal_draft"},
        {"surprisal_bonus", "surprisal_plain", "rows", "duplicates", "support", "residual", "lag_recovered"},
    ),
    "residual keeps the rejected draft": (
        Fault(keeps_draft=True),
        False,
        {"residual", "bias"},
        # Not rows: where most ranks are shifted one way, their products are, too.
        {"surprisal_bonus", "surprisal_plain", "duplicates", "support", "lag_recovered"},
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_is_found_by_the_tests_that_should_see_it_and_by_no_other(case: str) -> None:
    """40 runs a fault. Seen: flagged at the family's 1 % in over 36 of them. Not seen: flagged in at most 3; a test at
    its level, flagged in under 1 % of runs, would fail that with probability 1e-4, before Holm's correction."""
    fault, even, seen, unseen = CASES[case]
    results = planted(fault, even=even, seed=21)
    for name in seen:
        assert share_flagged(results, name) > 0.9, name
    for name in unseen:
        assert share_flagged(results, name) <= 3 / NUM_RUNS, name


def test_a_residual_that_keeps_a_sampled_draft_is_seen_and_a_right_one_is_not() -> None:
    sizes = {"sampled_draft": True, "samples_per_group": 80, "max_draft": 2, "seed": 31}
    for keeps_draft in (False, True):
        tokens = simulate(make_world(11), 1, fault=Fault(keeps_draft=keeps_draft), **sizes).replication(0)  # type: ignore[arg-type]
        evidence = residual(tokens, "on")
        assert (evidence.statistic > 0, evidence.p_value) == (keeps_draft, 1.0 - keeps_draft)
        assert evidence.estimate == evidence.statistic / evidence.num_tokens


def test_a_fault_in_one_slot_is_found_in_that_slot() -> None:
    """Bias planted by hand in slot 1 alone: kept drafts there are counted twice as often rejected."""
    simulation = simulate(make_world(11), NUM_RUNS, samples_per_group=80, max_draft=2, seed=22)
    slot, q_token = (simulation.columns[name] for name in ("slot", "q_token"))
    lost = (slot == 1) & (np.random.default_rng(0).random(q_token.shape) < 0.3)
    q_token[lost] = 0.0
    results = runs(simulation)
    assert share_flagged(results, "bias_slot_1") > 0.9
    assert share_flagged(results, "bias_slot_0") <= 3 / NUM_RUNS


def test_the_estimate_of_the_bias_is_the_excess_of_the_acceptance_probability() -> None:
    """Mean of 40 estimates, each with standard error .009: within .006, four of its own standard errors."""
    for epsilon in (-0.05, 0.0, 0.05):
        estimates = [r.named("bias").estimate for r in planted(Fault(epsilon=epsilon), even=True, seed=23)]
        assert np.mean(estimates) == pytest.approx(epsilon, abs=0.006)


def test_a_reused_coin_is_missed_by_the_marginal_family_where_lag_always_finds_it() -> None:
    """40 runs, 160 faulty samples against 160 correct ones, 48 cells each. At its level the marginal family stops 2
    runs, and more than 8 with probability 2e-4; lag stops every one."""
    options = {"samples_per_group": 80, "num_positions": 24, "max_draft": 2}
    correct = simulate(even_world(11), NUM_RUNS, seed=24, **options)  # type: ignore[arg-type]
    faulty = simulate(even_world(11), NUM_RUNS, fault=Fault(reused_coin=True), seed=25, **options)  # type: ignore[arg-type]
    stopped = 0
    for run in range(NUM_RUNS):
        arms = [arm.columns["token_id"][run].reshape(2, 80, 24) for arm in (correct, faulty)]
        cells = [[arm[group, :, t] for group in range(2) for t in range(24)] for arm in arms]
        stopped += marginal_family(*cells, num_tv_permutations=1, rng=np.random.default_rng(run)).num_rejected > 0
    assert stopped <= 8
    assert share_flagged(runs(faulty), "lag_recovered") == 1


def test_the_draft_indicator_is_wrong_for_a_sampled_drafter_where_q_is_right() -> None:
    """A correct sampler with drafts drawn from q. Treating the drawn draft as fixed makes z drift far off in every run;
    f = q(y) holds its level: 40 z's have a mean within 4 standard errors of 0."""
    simulation = simulate(make_world(11), NUM_RUNS, sampled_draft=True, samples_per_group=80, max_draft=2, seed=26)
    right = [bias(simulation.replication(index), "on").statistic for index in range(NUM_RUNS)]
    naive = [bias(simulation.replication(index, naive=True), "on").statistic for index in range(NUM_RUNS)]
    assert abs(np.mean(right)) < 4 / np.sqrt(NUM_RUNS)
    assert np.min(np.abs(naive)) > 5
    assert np.mean(naive) > 10


def test_an_inflated_acceptance_of_sampled_drafts_is_found() -> None:
    simulation = simulate(
        make_world(11, draft_noise=1.0),
        NUM_RUNS,
        fault=Fault(epsilon=0.2),
        sampled_draft=True,
        samples_per_group=80,
        max_draft=2,
        seed=27,
    )
    assert share_flagged(runs(simulation), "bias") > 0.9


def test_pairs_of_equal_samples_come_as_often_as_the_path_probabilities_say() -> None:
    """Texts of 4 tokens: 400 groups of 256 samples. The total count of rare pairs against its expectation, Poisson:
    outside its two-sided 1e-4 limits once in 10,000 times; and the one-sided test keeps 1 %."""
    simulation = simulate(
        make_world(12, vocab=18, spread=0.2), 400, num_groups=1, samples_per_group=256, num_positions=4, seed=28
    )
    evidence = [law_family(simulation.replication(index), "on").named("duplicates") for index in range(400)]
    count = sum(e.statistic for e in evidence)
    expected = count - sum(e.estimate for e in evidence)
    assert expected > 100
    assert stats.poisson.ppf(5e-5, expected) <= count <= stats.poisson.ppf(1 - 5e-5, expected)
    stopped = sum(e.p_value <= 0.01 for e in evidence)
    assert stats.binomtest(stopped, 400).proportion_ci(0.9999).low <= 0.01


def test_a_plain_arm_is_tested_without_drafts() -> None:
    simulation = simulate(make_world(11), NUM_RUNS, speculative=False, samples_per_group=80, seed=29)
    results = runs(simulation)
    names = {"surprisal_plain", "rank", "vocab", "rows", "duplicates", "support"}
    assert all({e.name for e in result.evidence} == names for result in results)
    assert not any(result.left_out for result in results)
    assert sum(bool(result.flagged()) for result in results) <= 3


def test_lag_looks_at_the_token_before_and_not_across_samples() -> None:
    tokens = simulate(make_world(11), 1, samples_per_group=80, max_draft=2, seed=30).replication(0)
    first = int((tokens.has_draft & ~tokens.continues & (tokens.q_variance > 0)).sum())
    open_drafts = int((tokens.has_draft & (tokens.q_variance > 0)).sum())
    put_out = set(Origin) - {Origin.ENDED, Origin.UNKNOWN}
    counted = sum(lag(tokens, "on", previous=origin).num_tokens for origin in put_out)
    assert first > 0
    assert counted == open_drafts - first
