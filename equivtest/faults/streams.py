"""Faults of the random streams."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.acceptance import MatchAcceptance, RoutedAcceptance
from equivtest.decoder.stages import AcceptStage, Drafts, Stages, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Fault
from equivtest.kernels.contract import SpecAccept
from equivtest.rng import Purpose, uniforms


class ReusedCoin:
    """After a recovered token, judges the next round's first draft with the coin that drew that token.

    The draft d is kept when u q(d) < p(d), as it should be, but u is the RECOVER coin of the position before in place
    of the ACCEPT coin of its own. Over u, drafts are kept as often as they should be and a rejection is drawn from the
    right residual; only, what follows a recovered token depends on where in the vocabulary that token lies. It is what
    a generator whose state is left to advance too little between two calls does.

    The verdict on the draft is forced through the target's probability of it, 1 or 0, so that no kernel is touched. On
    a rejection relu(p - q) is 0 at d with either value.
    """

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner
        self._recovered: npt.NDArray[np.bool_] = np.zeros(0, bool)
        """[num_requests], whether the newest token of each request of the call was recovered."""

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        if step.index == 0:
            self._recovered = np.zeros(len(step.table), bool)
        rows = np.flatnonzero(self._recovered[step.requests] & (drafts.num_draft > 0))
        if len(rows):
            self._judge(step, drafts, target_probs, rows)
        accepted = self.inner(step, drafts, target_probs)
        self._recovered[step.requests] = accepted.emitted.cpu().numpy() < drafts.num_draft
        return accepted

    @staticmethod
    def _judge(step: StepInput, drafts: Drafts, target_probs: Tensor, rows: npt.NDArray[np.int64]) -> None:
        device = target_probs.device
        on_device = torch.from_numpy(rows).to(device)
        keys, positions = (column.index_select(0, on_device).cpu().numpy() for column in step.streams)
        coins = torch.from_numpy(uniforms(keys, positions - 1, Purpose.RECOVER)).to(device)
        token_ids = torch.from_numpy(drafts.token_ids[rows, 0]).to(device)
        p = target_probs[on_device, 0, token_ids].double()
        q = 1.0 if drafts.probs is None else drafts.probs[on_device, 0, token_ids].double()
        # Where nothing but the draft has mass there is nothing to recover, whatever rounding makes of p < 1.
        sure = (target_probs[on_device, 0] > 0).sum(dim=1) <= 1
        kept = (coins * q < p) | (sure & (p > 0))
        target_probs[on_device, 0, token_ids] = kept.to(target_probs.dtype)


def reused_coin() -> Fault:
    """Calling it raises InvalidSetting for the match rule, in which no token is recovered by a coin of its own."""
    return Fault(
        name="reused_coin",
        stage="accept",
        description="the coin that draws a recovered token also judges the first draft of the next round",
        wrap=_wrap,
    )


def _wrap(stages: Stages) -> Stages:
    if isinstance(stages.accept, RoutedAcceptance) and isinstance(stages.accept.rule, MatchAcceptance):
        raise InvalidSetting("fault", "reused_coin", "goes with the chain acceptance rule, not with match")
    return dataclasses.replace(stages, accept=ReusedCoin(stages.accept))
