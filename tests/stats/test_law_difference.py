"""On minus off forgives a law that is wrong for both arms, and nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from equivtest.errors import InsufficientSamples
from equivtest.stats.law import law_family
from equivtest.stats.law_difference import on_minus_off
from equivtest.stats.multiplicity import holm
from equivtest.stats.scored import ScoredTokens
from tests.stats.law_sampler import Fault, Simulation, World, even_world, make_world, simulate

SIZES = {"samples_per_group": 45, "num_positions": 20, "max_draft": 2}


def pairs(world: World, fault: Fault, count: int, *, seed: int) -> tuple[Simulation, Simulation]:
    on = simulate(world, count, fault=fault, seed=seed, **SIZES)  # type: ignore[arg-type]
    off = simulate(world, count, speculative=False, seed=seed + 1, **SIZES)  # type: ignore[arg-type]
    return on, off


def stopped(evidence: tuple, alpha: float) -> bool:
    return bool((holm(np.array([e.p_value for e in evidence])) < alpha).any())


def test_every_difference_holds_its_level() -> None:
    """1,000 pairs of correct arms: 5 % in the exact 99.99 % interval of each test's rejections, 5 tests."""
    on, off = pairs(make_world(41), Fault(), 1_000, seed=42)
    results = [on_minus_off(on.replication(i), off.replication(i), "on minus off") for i in range(1_000)]
    for index, name in enumerate(("surprisal_draft", "surprisal_bonus", "surprisal_plain", "rank", "vocab")):
        assert {result[index].name for result in results} == {name}
        rejections = sum(result[index].p_value <= 0.05 for result in results)
        interval = stats.binomtest(rejections, 1_000).proportion_ci(0.9999)
        assert interval.low <= 0.05 <= interval.high, (name, rejections)


def test_a_law_that_is_wrong_for_both_arms_cancels() -> None:
    """Surprisals shifted by .2 nats and ranks squeezed in both arms: each arm fails its own law in 20 of 20 runs, their
    difference at 1 % in at most 2 (3 or more with probability 1e-3). In the even world every slot has one law."""
    on, off = pairs(even_world(43), Fault(), 20, seed=44)

    def wrong(tokens: ScoredTokens) -> ScoredTokens:
        return dataclasses.replace(tokens, entropy=tokens.entropy + 0.2, pit_rank=tokens.pit_rank**1.2)

    arms = [(wrong(on.replication(i)), wrong(off.replication(i))) for i in range(20)]
    assert all(law_family(tokens, "arm").flagged() for pair in arms for tokens in pair)
    assert sum(stopped(on_minus_off(*pair, "on minus off"), 0.01) for pair in arms) <= 2


def test_a_fault_of_one_arm_does_not_cancel() -> None:
    on, off = pairs(make_world(45), Fault(draft_temperature=1.6), 20, seed=46)
    results = [on_minus_off(on.replication(i), off.replication(i), "on minus off") for i in range(20)]
    assert sum(stopped(result, 0.01) for result in results) == 20
    assert np.mean([result[0].estimate for result in results]) > 0.1


def test_the_distance_of_two_arms_is_kolmogorovs() -> None:
    on, off = (simulation.replication(0) for simulation in pairs(make_world(47), Fault(), 1, seed=48))
    rank = on_minus_off(on, off, "on minus off")[-2]
    assert rank.estimate == pytest.approx(stats.ks_2samp(on.pit_rank, off.pit_rank).statistic)
    mirrored = on_minus_off(off, on, "off minus on")[-2]
    assert (mirrored.statistic, mirrored.estimate) == pytest.approx((rank.statistic, rank.estimate))


def test_small_arms_are_refused() -> None:
    on, off = (simulation.replication(0) for simulation in pairs(make_world(47), Fault(), 1, seed=48))
    with pytest.raises(InsufficientSamples, match="arm off"):
        on_minus_off(on, off.take(off.sample < 2), "on minus off")
