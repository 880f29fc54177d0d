"""Faults of the accept stage."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from equivtest.decoder.stages import AcceptStage, Drafts, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Fault
from equivtest.kernels.contract import SpecAccept


class InflatedAcceptance:
    """Accepts a draft with probability min(1, (p + epsilon) / q) where min(1, p / q) is right.

    The target law is changed at the draft token alone, before a correct accept stage sees it. What that stage does on
    a rejection stays right, and this is why the fault is one of acceptance only:
    - point mass at the draft (q = 1): the residual is p with the draft's mass removed, in which p(d) has no part;
    - a real q: a rejection needs p(d) + epsilon < q(d), so relu(p + epsilon - q) is 0 at d, as relu(p - q) is.
    Under the `match` rule nothing changes at the other tokens but their common scale: the draft is drawn with
    probability (p + epsilon) / (1 + epsilon).
    """

    def __init__(self, inner: AcceptStage, epsilon: float) -> None:
        self.inner, self.epsilon = inner, epsilon

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        offered = torch.arange(drafts.token_ids.shape[1]) < torch.from_numpy(drafts.num_draft)[:, None]
        rows, slots = (index.to(target_probs.device) for index in offered.nonzero(as_tuple=True))
        token_ids = torch.from_numpy(drafts.token_ids)[offered].to(target_probs.device)
        # In place: the scratch is this step's, and the next verify writes these rows anew.
        target_probs[rows, slots, token_ids] = (target_probs[rows, slots, token_ids] + self.epsilon).clamp(max=1.0)
        return self.inner(step, drafts, target_probs)


def inflated_acceptance(*, epsilon: float = 0.1) -> Fault:
    """Raises InvalidSetting unless 0 < epsilon <= 1."""
    if not (math.isfinite(epsilon) and 0 < epsilon <= 1):
        raise InvalidSetting("epsilon", epsilon, "must be above 0 and at most 1")
    return Fault(
        name="inflated_acceptance",
        stage="accept",
        description=f"drafts are accepted with {epsilon:g} too much probability",
        wrap=lambda stages: dataclasses.replace(stages, accept=InflatedAcceptance(stages.accept, epsilon)),
    )
