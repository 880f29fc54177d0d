"""The draft length that pays, from what is accepted and what a step costs."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.decoder.draft_length import StepCost, acceptance_by_slot, best_draft_length
from equivtest.errors import InvalidSetting
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for

ACCEPTANCE = (0.8, 0.7, 0.6, 0.5)
FLAT = StepCost(verify_s=((1, 1e-3), (256, 1e-3)), draft_s=((1, 2e-4), (256, 2e-4)))
RISING = StepCost(verify_s=((1, 1e-3), (16, 1e-3), (256, 5e-3)), draft_s=((1, 2e-4), (32, 2e-4)))


def simulated_token_s(num_draft: int, cost: StepCost, batch: int, num_steps: int = 200_000) -> float:
    """Seconds a token of a request whose drafts are accepted by coin."""
    coins = np.random.default_rng(num_draft).random((num_steps, num_draft)) < ACCEPTANCE[:num_draft]
    tokens = 1 + np.cumprod(coins, axis=1).sum(axis=1)
    return cost.of(batch, num_draft) / float(tokens.mean())


@pytest.mark.parametrize("batch", [1, 8, 16, 64])
def test_the_chosen_length_is_the_one_that_a_simulation_finds(batch: int) -> None:
    """200,000 rounds a length: their means are within 1 %, and a length is chosen within that of the best."""
    chosen = best_draft_length(ACCEPTANCE, RISING, batch)
    simulated = [simulated_token_s(num_draft, RISING, batch) for num_draft in range(5)]
    assert chosen.token_s == pytest.approx(simulated[chosen.num_draft], rel=0.01)
    assert simulated[chosen.num_draft] <= min(simulated) * 1.01


def test_free_rows_ask_for_every_draft_and_dear_ones_for_none() -> None:
    assert best_draft_length(ACCEPTANCE, FLAT, 1).num_draft == 4
    dear = StepCost(verify_s=((1, 1e-3), (2, 2e-3)))
    assert best_draft_length(ACCEPTANCE, dear, 1) == (0, 1.0, 1e-3)
    lengths = [best_draft_length(ACCEPTANCE, RISING, batch).num_draft for batch in (1, 8, 16, 64, 256)]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) >= 3


def test_a_block_that_costs_more_than_it_gives_is_not_drafted() -> None:
    slow = StepCost(verify_s=FLAT.verify_s, draft_s=((1, 5e-3),))
    assert best_draft_length(ACCEPTANCE, slow, 1).num_draft == 0


def test_expected_tokens_are_those_of_the_slots() -> None:
    assert best_draft_length((0.5, 0.5), FLAT, 1).tokens == pytest.approx(1 + 0.5 + 0.25)
    assert best_draft_length((), FLAT, 1) == (0, 1.0, 1e-3)


def test_steps_larger_than_any_measured_go_on_at_the_last_slope() -> None:
    assert RISING.of(512, 0) == pytest.approx(5e-3 + 256 * 4e-3 / 240)
    assert RISING.of(32, 0) == pytest.approx(1e-3 + 16 * 4e-3 / 240)
    assert RISING.of(32, 1) == pytest.approx(1e-3 + 48 * 4e-3 / 240 + 2e-4)


def rounds_by_slot(generations: list[Generation], num_slots: int) -> np.ndarray:
    """Accepted over reached, round by round, as one would count them by hand."""
    accepted, reached = np.zeros(num_slots), np.zeros(num_slots)
    for generation in generations:
        for step in np.unique(generation.steps):
            tokens = np.flatnonzero(generation.steps == step)
            num_accepted = sum(generation.origins[t].name == "ACCEPTED" for t in tokens)
            offered = int(generation.num_drafts[tokens[0]])
            accepted[:num_accepted] += 1
            reached[: min(num_accepted + 1, offered)] += 1
    return accepted / reached


def test_acceptance_is_counted_among_the_drafts_that_were_reached() -> None:
    executor = build(get_backend("cpp"), "early_exit")
    generations = executor.generate(requests_for(random_prompts(24), CONFIGS["topp95"]), speculative=True)
    by_hand = rounds_by_slot(generations, 4)
    np.testing.assert_allclose(acceptance_by_slot(generations, 4, prior=0), by_hand)
    cautious = acceptance_by_slot(generations, 4)
    assert (cautious < by_hand).all()
    assert (cautious > by_hand - 0.1).all()
    assert 0.1 < by_hand[0] < 0.95


def test_slots_that_nobody_reached_promise_nothing() -> None:
    assert acceptance_by_slot([], 3).tolist() == [0, 0, 0]
    assert acceptance_by_slot([], 3, prior=0).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"verify_s": ()}, "verify_s"),
        ({"verify_s": ((4, 1.0), (2, 1.0))}, "verify_s"),
        ({"verify_s": ((0, 1.0),)}, "verify_s"),
        ({"verify_s": ((1, -1.0),)}, "verify_s"),
        ({"verify_s": ((1, 1.0),), "draft_s": ((1, float("nan")),)}, "draft_s"),
    ],
)
def test_costs_that_cannot_be_are_refused(arguments: dict[str, object], setting: str) -> None:
    with pytest.raises(InvalidSetting, match=setting):
        StepCost(**arguments)  # type: ignore[arg-type]


def test_acceptance_and_batch_are_checked() -> None:
    with pytest.raises(InvalidSetting, match="acceptance"):
        best_draft_length((1.5,), FLAT, 1)
    with pytest.raises(InvalidSetting, match="batch"):
        best_draft_length(ACCEPTANCE, FLAT, 0)
