"""The catalogue of faults, and what the one on acceptance does to the accept stage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.acceptance import known_rules
from equivtest.decoder.drafters.registry import known_drafters
from equivtest.decoder.stages import Drafts, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults import NOT_EXPRESSIBLE, Family, Fault, Nature, catalogue, get_fault
from equivtest.faults.acceptance import InflatedAcceptance
from equivtest.kernels.contract import SpecAccept, SpecScratch, Streams
from equivtest.kernels.registry import get_backend
from equivtest.protocol.configs import CONFIGS
from tests.faults.planted import check_that_only_its_stage_changes

NUM_ROWS = 100_000
P = torch.tensor([0.2, 0.5, 0.3])


def law_of_first_token(drafts: Drafts, wrap: Callable[[Any], Any]) -> Tensor:
    """Frequencies [3] of the first token that chain acceptance puts out over NUM_ROWS rows with the same law P."""
    backend = get_backend("cpp")
    scratch = SpecScratch(NUM_ROWS, 1, 3)
    streams = Streams(torch.arange(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int64))

    def accept(step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        return backend.spec_accept(
            torch.from_numpy(drafts.token_ids), torch.from_numpy(drafts.num_draft), target_probs, drafts.probs,
            streams, scratch=scratch,
        )  # fmt: skip

    target_probs = P.expand(NUM_ROWS, 2, 3).clone()
    output = wrap(accept)(cast("StepInput", None), drafts, target_probs).output_token_ids[:, 0]
    return torch.bincount(output, minlength=3) / NUM_ROWS


@pytest.mark.parametrize("q", [None, (0.6, 0.2, 0.2)])
def test_inflated_acceptance_keeps_the_draft_too_often_and_recovers_rightly(q: tuple[float, ...] | None) -> None:
    """Draft 0 always (q None) or drawn from q, epsilon .1. A tolerance of .01 is 6 standard errors: false alarm 1e-8.

    q None: token 0 comes out with .2 + .1, the others share the rest in proportion 5 : 3.
    q real: drafts 1 and 2 are always kept (p >= q); draft 0 is kept with (.2 + .1) / .6, and a rejection goes to
    relu(p - q) = (0, .3, .1). So 0: .6 * .5 = .3, 1: .2 + .3 * .75 = .425, 2: .2 + .3 * .25 = .275.
    """
    token_ids, probs = np.zeros((NUM_ROWS, 1), np.int64), None
    if q is not None:
        token_ids = np.random.default_rng(0).choice(3, size=(NUM_ROWS, 1), p=q)
        probs = torch.tensor(q).expand(NUM_ROWS, 1, 3).contiguous()
    drafts = Drafts(token_ids, np.ones(NUM_ROWS, np.int32), probs)
    honest = law_of_first_token(drafts, lambda accept: accept)
    inflated = law_of_first_token(drafts, lambda accept: InflatedAcceptance(accept, 0.1))
    expected = [0.3, 0.7 * 5 / 8, 0.7 * 3 / 8] if q is None else [0.3, 0.425, 0.275]
    torch.testing.assert_close(honest, P, atol=0.01, rtol=0)
    torch.testing.assert_close(inflated, torch.tensor(expected), atol=0.01, rtol=0)


def test_inflated_acceptance_leaves_plain_rows_and_ignored_drafts_alone() -> None:
    given: list[Tensor] = []

    def accept(step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        given.append(target_probs.clone())
        return cast("SpecAccept", None)

    drafts = Drafts(np.array([[0, 1], [2, 2], [1, 0]]), np.array([0, 1, 2], np.int32), None)
    InflatedAcceptance(accept, 0.6)(cast("StepInput", None), drafts, P.expand(3, 3, 3).clone())
    change = given[0] - P
    assert {tuple(place) for place in change.nonzero().tolist()} == {(1, 0, 2), (2, 0, 1), (2, 1, 0)}
    assert given[0][1, 0, 2] == pytest.approx(0.9)
    assert given[0][2, 0, 1] == 1.0  # clamped


FAULTS = catalogue()
PUBLIC = (
    1, 2, 3, 4, 5, 6, 8, 10, 11, 12, 13, 14, 15, 17, 18, 19, 21, 23, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 37,
    38, 39, 40, 41, 43, 44, 45, 47, 48, 49, 50, 52, 53, 54, 55, 56,
)  # fmt: skip
"""Numbers of the faults that were reported in public and are to be planted."""


def test_every_public_fault_is_planted_once_or_said_to_be_inexpressible() -> None:
    planted = [number for fault in FAULTS for number in fault.ids]
    assert sorted([*planted, *NOT_EXPRESSIBLE]) == list(PUBLIC)
    assert len(PUBLIC) == 46
    assert len(planted) >= 38
    assert all(NOT_EXPRESSIBLE.values())


def test_names_are_those_of_their_functions_and_can_be_typed() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert re.fullmatch("[a-z]+(_[a-z0-9]+)*", fault.name)
        assert get_fault(fault.name).name == fault.name
        assert get_fault(fault.name).description == fault.description


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_says_what_it_is_and_where_it_shows(fault: Fault) -> None:
    assert fault.kind
    assert len(fault.description) > 20
    assert not fault.description.endswith(".")
    assert fault.setting.config in CONFIGS
    assert fault.setting.drafter in known_drafters()
    assert fault.setting.acceptance in known_rules()
    assert fault.setting.draft_len >= 1
    assert bool(fault.ids) == bool(fault.reports)
    if fault.nature is Nature.VARIANT:
        assert not fault.changes_law
        assert not fault.expected
        return
    assert fault.expected
    assert fault.changes_law or fault.expected <= {Family.REPLAY, Family.LOGPROBS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_wraps_the_stage_it_names_and_no_other(fault: Fault) -> None:
    check_that_only_its_stage_changes(fault)


@pytest.mark.parametrize("epsilon", [0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_an_epsilon_that_is_no_bias_is_refused(epsilon: float) -> None:
    with pytest.raises(InvalidSetting, match="epsilon"):
        get_fault("inflated_acceptance", epsilon=epsilon)
