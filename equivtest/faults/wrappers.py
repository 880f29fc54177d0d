"""What several faults need: verdicts on drafts, chosen rows, tokens drawn anew, other counts, altered drafters."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.acceptance import MatchAcceptance, RoutedAcceptance
from equivtest.decoder.drafters.draft_model import ModelDrafter, draw
from equivtest.decoder.model import Model
from equivtest.decoder.stages import AcceptStage, Drafts, Int64Array, Stages, StepInput
from equivtest.decoder.standard_stages import DrafterPropose
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import PADDING, KernelBackend, SpecAccept
from equivtest.rng import Purpose, uniforms

SAMPLED_DRAFTER = "sampled_exit"
"""The drafter that samples from a law q and that every target has."""

Rows = npt.NDArray[np.bool_]
"""[B, K+1], some of the rows that the target's laws stand in."""


class Offered(NamedTuple):
    """The n drafts that the rows of a step are offered, and what the laws say of them; on the device of the laws."""

    rows: Tensor
    """int64 [n], batch rows."""
    slots: Tensor
    """int64 [n]."""
    token_ids: Tensor
    """int64 [n]."""
    p: Tensor
    """[n], the target's probability of each, in the dtype of its laws."""
    q: Tensor
    """[n], the drafter's; 1 for a sure draft."""

    @classmethod
    def of(cls, drafts: Drafts, target_probs: Tensor) -> Offered:
        device = target_probs.device
        is_offered = np.arange(drafts.token_ids.shape[1]) < drafts.num_draft[:, None]
        rows, slots = (torch.from_numpy(index).to(device) for index in np.nonzero(is_offered))
        token_ids = torch.from_numpy(drafts.token_ids[is_offered]).to(device)
        p = target_probs[rows, slots, token_ids]
        q = torch.ones_like(p) if drafts.probs is None else drafts.probs[rows, slots, token_ids]
        return cls(rows, slots, token_ids, p, q)


Judge = Callable[[StepInput, Offered, Tensor], Tensor]
"""(step, offered drafts, target_probs) to what the target's probability of each draft is taken to be: [n]."""


class JudgedDrafts:
    """An accept stage that sees another probability at each draft and the target's own everywhere else.

    The entries are put back afterwards: what is reported of a token is its own law. On a rejection the residual holds
    the changed entry at the draft, relu(p' - q); it is 0 there whenever p' made the rejection, and with a sure draft.
    """

    def __init__(self, inner: AcceptStage, judge: Judge) -> None:
        self.inner, self.judge = inner, judge

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        offered = Offered.of(drafts, target_probs)
        places = (offered.rows, offered.slots, offered.token_ids)
        target_probs[places] = self.judge(step, offered, target_probs).to(target_probs.dtype)
        accepted = self.inner(step, drafts, target_probs)
        target_probs[places] = offered.p
        return accepted


def judged(fault: str, judge: Judge) -> Callable[[Stages], Stages]:
    """How a fault is planted that is one of the chain rule's verdicts."""

    def wrap(stages: Stages) -> Stages:
        require_chain(stages, fault)
        return dataclasses.replace(stages, accept=JudgedDrafts(stages.accept, judge))

    return wrap


def verdict(kept: Tensor) -> Tensor:
    """Probabilities p' that force these verdicts (bool [n]) under any coin and any q of at most 1 but for rounding.

    A draft that alone has mass must be kept: a rejection would find nothing to draw.
    """
    return 2.0 * kept


def coins(step: StepInput, rows: Tensor, slots: Tensor, purpose: Purpose, draw: int = 0) -> Tensor:
    """The coins of positions `slots` ([n]) into the round of batch rows `rows` ([n]): float64 [n], on their device.

    Draws from 1 on are nobody's: what a fault decides by chance, it decides with those.
    """
    keys, positions = (column.index_select(0, rows).cpu().numpy() for column in step.streams)
    return torch.from_numpy(uniforms(keys, positions + slots.cpu().numpy(), purpose, draw)).to(rows.device)


def recovered_rows(drafts: Drafts, accepted: SpecAccept) -> tuple[Tensor, Tensor]:
    """The batch rows that rejected a draft and the slots at which they did: int64 [n] each."""
    num_draft = torch.from_numpy(drafts.num_draft).to(accepted.emitted.device)
    rows = (accepted.emitted < num_draft).nonzero()[:, 0]
    return rows, accepted.emitted[rows].long()


def residual(drafts: Drafts, target_probs: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """What a rejection in these rows and slots ([n] each) draws from, not normalised: float64 [n, vocab_size].

    relu(p - q), or p without a sure draft; p itself where nothing else is left, as the kernel contract has it.
    """
    p = target_probs[rows, slots].double()
    if drafts.probs is None:
        token_ids = torch.from_numpy(drafts.token_ids).to(p.device)[rows, slots]
        left = p.scatter(1, token_ids[:, None], 0.0)
    else:
        left = (p - drafts.probs[rows, slots].double()).clamp(min=0)
    return torch.where(left.sum(dim=1, keepdim=True) > 0, left, p)


def redraw(accepted: SpecAccept, rows: Tensor, slots: Tensor, weights: Tensor, u: Tensor) -> None:
    """Put out other tokens in these rows and slots ([n] each): drawn from weights [n, vocab_size] with coins u [n].

    By inverse distribution function, as the kernel contract has it. Changes accepted.output_token_ids in place.
    """
    accepted.output_token_ids[rows, slots] = torch.from_numpy(draw(weights, u.cpu().numpy())).to(rows.device)


class AlteredDrafter:
    """A propose stage that asks a copy of a sampled drafter, with another model or other kernels.

    The copy is made in the first step of every call, for by then the drafter has started and has its cache; the two
    share it, and the drafter itself stays as it is.
    """

    def __init__(
        self, drafter: ModelDrafter, *, model: Model | None = None, backend: KernelBackend | None = None
    ) -> None:
        self.drafter, self.model, self.backend = drafter, model or drafter.model, backend or drafter.backend
        self._propose = DrafterPropose(None)

    def __call__(self, step: StepInput) -> Drafts:
        if step.index == 0:
            altered = copy.copy(self.drafter)
            altered.model, altered.backend = self.model, self.backend
            self._propose = DrafterPropose(altered)
        return self._propose(step)


def rows_with_drafts(step: StepInput, drafts: Drafts) -> Rows:
    """Every row of the requests that are offered a draft, the bonus row included."""
    return (drafts.num_draft > 0)[:, None] & _in_use(drafts)


def draft_rows(step: StepInput, drafts: Drafts) -> Rows:
    """The rows that judge a draft."""
    return np.asarray(np.arange(drafts.token_ids.shape[1] + 1) < drafts.num_draft[:, None])


def speculative_rows(step: StepInput, drafts: Drafts) -> Rows:
    """Every row of the requests that are decoded speculatively, with or without a draft in this step."""
    return np.asarray(step.table.speculative[step.requests][:, None] & _in_use(drafts))


def _in_use(drafts: Drafts) -> Rows:
    return np.asarray(np.arange(drafts.token_ids.shape[1] + 1) <= drafts.num_draft[:, None])


def drafted(drafts: Drafts) -> Int64Array:
    """Batch rows with num_draft > 0."""
    return np.flatnonzero(drafts.num_draft > 0)


def on_device(array: npt.NDArray[np.int64] | npt.NDArray[np.int32], like: Tensor) -> Tensor:
    """The array on the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)


def recounted(accepted: SpecAccept, drafts: Drafts, counts: Tensor) -> SpecAccept:
    """The same step with another number of drafts kept: so many, then the token that was drawn to follow the block.

    counts: int32 [B], 0..num_draft, on the device. Nothing is changed in place. A row's own count gives the row itself.
    """
    output = accepted.output_token_ids
    slots = torch.arange(output.shape[1], device=output.device)
    drawn = output.gather(1, accepted.emitted.long()[:, None])
    block = torch.full_like(output, PADDING)
    block[:, : drafts.token_ids.shape[1]] = on_device(drafts.token_ids, output)
    tokens = torch.where(slots < counts[:, None], block, PADDING)
    return SpecAccept(torch.where(slots == counts[:, None], drawn, tokens), counts, accepted.acceptance_telemetry)


def require_chain(stages: Stages, fault: str) -> None:
    """Raise InvalidSetting for the match rule, which neither accepts by a coin nor recovers from a residual."""
    if isinstance(stages.accept, RoutedAcceptance) and isinstance(stages.accept.rule, MatchAcceptance):
        raise InvalidSetting("fault", fault, "goes with the chain acceptance rule, not with match")


def require_sampled_drafter(stages: Stages, fault: str) -> ModelDrafter:
    """The drafter that samples from a law q. Raises InvalidSetting where there is none."""
    drafter = stages.propose.drafter if isinstance(stages.propose, DrafterPropose) else None
    if not isinstance(drafter, ModelDrafter):
        raise InvalidSetting("fault", fault, "goes with a drafter that samples: sampled_exit or model")
    return drafter
