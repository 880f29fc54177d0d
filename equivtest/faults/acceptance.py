"""Faults of the accept stage: which drafts are kept, and what a rejection draws from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from equivtest.decoder.stages import AcceptStage, Drafts, Stages, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import (
    SAMPLED_DRAFTER,
    JudgedDrafts,
    Offered,
    coins,
    judged,
    recovered_rows,
    redraw,
    require_chain,
    residual,
    verdict,
)
from equivtest.kernels.contract import SpecAccept
from equivtest.rng import Purpose

_KIND = "acceptance"


class InflatedAcceptance(JudgedDrafts):
    """Accepts a draft with probability min(1, (p + epsilon) / q) where min(1, p / q) is right.

    The target law is changed at the draft token alone, before a correct accept stage sees it. What that stage does on
    a rejection stays right, and this is why the fault is one of acceptance only:
    - point mass at the draft (q = 1): the residual is p with the draft's mass removed, in which p(d) has no part;
    - a real q: a rejection needs p(d) + epsilon < q(d), so relu(p + epsilon - q) is 0 at d, as relu(p - q) is.
    Under the `match` rule nothing changes at the other tokens but their common scale: the draft is drawn with
    probability (p + epsilon) / (1 + epsilon).
    """

    def __init__(self, inner: AcceptStage, epsilon: float) -> None:
        super().__init__(inner, lambda step, offered, target_probs: (offered.p + epsilon).clamp(max=1.0))


class StaleResidual:
    """An accept stage that draws from the residual of the slot before where a later slot than the first rejects."""

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        accepted = self.inner(step, drafts, target_probs)
        rows, slots = recovered_rows(drafts, accepted)
        rows, slots = rows[slots > 0], slots[slots > 0]
        if len(rows):
            stale = residual(drafts, target_probs, rows, slots - 1)
            redraw(accepted, rows, slots, stale, coins(step, rows, slots, Purpose.RECOVER))
        return accepted


def _every_draft(step: StepInput, offered: Offered, target_probs: Tensor) -> Tensor:
    return verdict(torch.ones_like(offered.p))


def _possible_drafts(step: StepInput, offered: Offered, target_probs: Tensor) -> Tensor:
    return verdict(offered.p > 0)


_GRID = 32
"""Values that the coarse coin can take."""


def _coarse_coin(step: StepInput, offered: Offered, target_probs: Tensor) -> Tensor:
    u = (coins(step, offered.rows, offered.slots, Purpose.ACCEPT) * _GRID).floor() / _GRID
    return verdict(u * offered.q <= offered.p)


def inflated_acceptance(*, epsilon: float = 0.1) -> Fault:
    """Raises InvalidSetting unless 0 < epsilon <= 1."""
    if not (math.isfinite(epsilon) and 0 < epsilon <= 1):
        raise InvalidSetting("epsilon", epsilon, "must be above 0 and at most 1")
    return Fault(
        name="inflated_acceptance",
        stage="accept",
        kind=_KIND,
        description=f"drafts are accepted with {epsilon:g} too much probability",
        expected=frozenset({Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY}),
        wrap=lambda stages: dataclasses.replace(stages, accept=InflatedAcceptance(stages.accept, epsilon)),
    )


def accept_all() -> Fault:
    return Fault(
        name="accept_all",
        stage="accept",
        kind=_KIND,
        description="every draft is accepted",
        ids=(17,),
        reports=("transformers#28508",),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.DUPLICATES, Family.IDENTITY}
        ),
        wrap=judged("accept_all", _every_draft),
    )


def coin_at_zero() -> Fault:
    return Fault(
        name="coin_at_zero",
        stage="accept",
        kind=_KIND,
        description="the coin that judges a draft is always 0: every draft that is possible at all is accepted",
        ids=(18,),
        reports=("vllm-ascend#13730", "vllm-ascend#13470"),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.DUPLICATES}),
        wrap=judged("coin_at_zero", _possible_drafts),
    )


def coarse_coin() -> Fault:
    return Fault(
        name="coarse_coin",
        stage="accept",
        kind=_KIND,
        description=f"the coin that judges a draft has {_GRID} values, and at 0 accepts a draft that is impossible",
        ids=(19,),
        reports=("sglang#35771",),
        expected=frozenset({Family.LAW, Family.IDENTITY}),
        subtle=True,
        wrap=judged("coarse_coin", _coarse_coin),
    )


def stale_residual() -> Fault:
    """A sampled drafter shows it best: the stale residual then lacks more than one token."""

    def wrap(stages: Stages) -> Stages:
        require_chain(stages, "stale_residual")
        return dataclasses.replace(stages, accept=StaleResidual(stages.accept))

    return Fault(
        name="stale_residual",
        stage="accept",
        kind=_KIND,
        ids=(21,),
        reports=("EAGLE#47",),
        description="a rejection after an accepted draft draws from what was left over for the draft before",
        setting=Setting(drafter=SAMPLED_DRAFTER),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY}),
        wrap=wrap,
    )


FAULTS: tuple[Callable[[], Fault], ...] = (inflated_acceptance, accept_all, coin_at_zero, coarse_coin, stale_residual)
