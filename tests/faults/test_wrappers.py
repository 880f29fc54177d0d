"""The parts that faults are made of: each right when nothing is asked of it, so that a fault is what it says alone."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch

from equivtest.decoder.drafters.draft_model import ModelDrafter
from equivtest.decoder.stages import Drafts, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.wrappers import (
    SAMPLED_DRAFTER,
    AlteredDrafter,
    JudgedDrafts,
    Offered,
    coins,
    draft_rows,
    recovered_rows,
    redraw,
    require_chain,
    require_sampled_drafter,
    residual,
    rows_with_drafts,
    verdict,
)
from equivtest.kernels.contract import SpecAccept
from equivtest.rng import Purpose
from tests.decoder.scenarios import CONFIGS, build, texts
from tests.faults import planted
from tests.faults.test_acceptance import P, one_round

RAGGED = Drafts(np.array([[0, -7], [2, 1], [1, 99]]), np.array([0, 2, 1], np.int32), None)


def test_only_drafts_that_are_offered_are_looked_at() -> None:
    laws = torch.rand(3, 3, 6, generator=torch.Generator().manual_seed(0))
    offered = Offered.of(RAGGED, laws)
    assert offered.rows.tolist() == [1, 1, 2]
    assert offered.slots.tolist() == [0, 1, 0]
    assert offered.token_ids.tolist() == [2, 1, 1]
    assert torch.equal(offered.p, torch.stack([laws[1, 0, 2], laws[1, 1, 1], laws[2, 0, 1]]))
    assert offered.q.tolist() == [1, 1, 1]
    q = torch.rand(3, 2, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Offered.of(RAGGED.with_probs(q), laws).q, torch.stack([q[1, 0, 2], q[1, 1, 1], q[2, 0, 1]]))


def test_rows_are_told_apart_by_what_they_judge() -> None:
    step = cast("StepInput", None)
    assert draft_rows(step, RAGGED).tolist() == [[False] * 3, [True, True, False], [True, False, False]]
    assert rows_with_drafts(step, RAGGED).tolist() == [[False] * 3, [True] * 3, [True, True, False]]
    assert rows_with_drafts(step, Drafts.none(2)).tolist() == [[False], [False]]


@pytest.mark.parametrize("kernels", ["reference", "cpp"])
@pytest.mark.parametrize("declared", [True, False])
def test_the_right_verdicts_and_the_right_redraw_change_nothing(declared: bool, kernels: str) -> None:
    """Forced verdicts of a correct rule, then every recovered token drawn anew: the tokens of the kernel, all of them.
    So what a fault does to either is all that it does."""
    played = one_round(declared=declared, kernels=kernels)
    expected, right = played.play()

    def judge(step: StepInput, offered: Offered, target_probs: torch.Tensor) -> torch.Tensor:
        u = coins(step, offered.rows, offered.slots, Purpose.ACCEPT)
        return verdict(u * offered.q.double() < offered.p.double())

    laws = played.laws()
    accepted = JudgedDrafts(played.stages.accept, judge)(played.step, played.drafts, laws)
    assert torch.equal(laws, played.laws())
    rows, slots = recovered_rows(played.drafts, accepted)
    assert rows.tolist() == np.flatnonzero(right < played.drafts.num_draft).tolist()
    accepted.output_token_ids[rows, slots] = -1
    weights = residual(played.drafts, laws, rows, slots)
    redraw(accepted, rows, slots, weights, coins(played.step, rows, slots, Purpose.RECOVER))
    np.testing.assert_array_equal(accepted.emitted.numpy(), right)
    np.testing.assert_array_equal(accepted.output_token_ids.numpy(), expected)


def test_a_residual_that_is_empty_is_the_law_itself() -> None:
    laws = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    drafts = Drafts(np.array([[0]]), np.ones(1, np.int32), torch.tensor([[[0.25, 0.75]]]))
    place = torch.tensor([0])
    assert residual(drafts, laws, place, place).tolist() == [[0.25, 0.75]]
    sure = Drafts(np.array([[0]]), np.ones(1, np.int32), None)
    assert residual(sure, laws, place, place).tolist() == [[0.0, 0.75]]
    alone = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    assert residual(sure, alone, place, place).tolist() == [[1.0, 0.0]]


def test_coins_of_a_fault_are_nobodys() -> None:
    played = one_round(num_rows=100)
    rows, slots = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    own = coins(played.step, rows, slots, Purpose.ACCEPT, 1)
    for purpose in Purpose:
        assert not torch.isin(own, coins(played.step, rows, slots, purpose)).any()
    np.testing.assert_array_equal(coins(played.step, rows, slots, Purpose.ACCEPT), played.coins(Purpose.ACCEPT)[:, 0])


@pytest.mark.parametrize("drafter", [SAMPLED_DRAFTER, "model"])
def test_a_copied_drafter_drafts_as_the_drafter_does(drafter: str) -> None:
    executor = planted.executor(drafter)
    requests = planted.asked(CONFIGS["topp95"])
    right = executor.generate(requests, speculative=True)
    for _ in range(2):  # a copy from the call before would hold a cache that is gone
        copied = executor.generate(
            requests,
            speculative=True,
            fault=lambda stages: dataclasses.replace(
                stages, propose=AlteredDrafter(require_sampled_drafter(stages, "copy"))
            ),
        )
        assert texts(copied) == texts(right)
        assert [g.origins for g in copied] == [g.origins for g in right]


def test_what_a_fault_needs_is_said_by_name() -> None:
    backend = planted.executor("early_exit").backend
    with pytest.raises(InvalidSetting, match=r"gremlin.*chain acceptance rule"):
        require_chain(build(backend, acceptance="match").stages, "gremlin")
    with pytest.raises(InvalidSetting, match=r"gremlin.*sampled_exit or model"):
        require_sampled_drafter(planted.executor("ngram").stages, "gremlin")
    drafter = require_sampled_drafter(planted.executor("model").stages, "gremlin")
    assert isinstance(drafter, ModelDrafter)
    require_chain(planted.executor("early_exit").stages, "gremlin")


def test_a_step_without_a_draft_is_left_as_it_is() -> None:
    given: list[torch.Tensor] = []

    def accept(step: StepInput, drafts: Drafts, target_probs: torch.Tensor) -> SpecAccept:
        given.append(target_probs.clone())
        return cast("SpecAccept", None)

    laws = P[None, :1].clone()
    JudgedDrafts(accept, lambda step, offered, target_probs: verdict(offered.p > 1))(
        cast("StepInput", None), Drafts.none(1), laws
    )
    assert torch.equal(given[0], P[None, :1])
