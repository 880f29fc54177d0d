"""Faults of the recovery: what is put out after a rejection."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.stages import AcceptStage, Drafts, ProposeStage, Stages, StepInput
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import (
    SAMPLED_DRAFTER,
    coins,
    recovered_rows,
    require_chain,
    require_sampled_drafter,
)
from equivtest.kernels.contract import PADDING, SpecAccept
from equivtest.rng import Purpose, uniforms

_KIND = "recovery"
_FAULTS_DRAW = 1
"""Coins of this draw are the faults' own."""
_NAN_ROWS = 1 / 32
_SMALLEST_NOISE = 1e-6


class NoisedProposal:
    """A propose stage whose q is what drawing by an exponential race left of it: q(x) / E(x), E(x) exponential.

    Every round turns the same noise, one number a token, by a coin of its own: fresh noise for each row and slot would
    cost more than the model.
    """

    def __init__(self, inner: ProposeStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput) -> Drafts:
        drafts = self.inner(step)
        if drafts.probs is None:
            return drafts
        batch, width, vocab_size = drafts.probs.shape
        device = drafts.probs.device
        rows = torch.arange(batch, device=device).repeat_interleave(width)
        slots = torch.arange(width, device=device).repeat(batch)
        turns = (coins(step, rows, slots, Purpose.DRAFT, _FAULTS_DRAW) * vocab_size).long()
        u = uniforms(np.arange(vocab_size), np.zeros(vocab_size, np.int64), Purpose.DRAFT, _FAULTS_DRAW)
        noise = torch.from_numpy(-np.log1p(-u)).clamp(min=_SMALLEST_NOISE).to(device, drafts.probs.dtype)
        turned = torch.cat([noise, noise]).unfold(0, vocab_size, 1)[turns]
        return drafts.with_probs(drafts.probs / turned.view_as(drafts.probs))


class ZeroRows:
    """An accept stage that now and then rejects the first draft of a row and puts out token 0: what comparing with
    NaN, and taking the index of the largest NaN, do. Which rows, a coin of each round says."""

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        accepted = self.inner(step, drafts, target_probs)
        device = accepted.emitted.device
        rows = torch.from_numpy(np.flatnonzero(drafts.num_draft > 0)).to(device)
        rows = rows[coins(step, rows, torch.zeros_like(rows), Purpose.ACCEPT, _FAULTS_DRAW) < _NAN_ROWS]
        accepted.output_token_ids[rows] = PADDING
        accepted.output_token_ids[rows, 0] = 0
        accepted.emitted[rows] = 0
        return accepted


class LostBlockOffset:
    """An accept stage whose recovered tokens are numbered within their half of the vocabulary."""

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        accepted = self.inner(step, drafts, target_probs)
        rows, slots = recovered_rows(drafts, accepted)
        accepted.output_token_ids[rows, slots] %= -(-target_probs.shape[-1] // 2)
        return accepted


def noised_q() -> Fault:
    """The stage is `propose`: the q that is handed on is wrong, for the acceptance and the recovery alike."""

    def wrap(stages: Stages) -> Stages:
        require_sampled_drafter(stages, "noised_q")
        require_chain(stages, "noised_q")
        return dataclasses.replace(stages, propose=NoisedProposal(stages.propose))

    return Fault(
        name="noised_q",
        stage="propose",
        kind=_KIND,
        ids=(23,),
        reports=("vllm#16952",),
        description="exponential noise is divided into the q that a draft is judged by",
        setting=Setting(drafter=SAMPLED_DRAFTER),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.DRAFTS}),
        wrap=wrap,
    )


def nan_row_gives_zero() -> Fault:
    def wrap(stages: Stages) -> Stages:
        require_chain(stages, "nan_row_gives_zero")
        return dataclasses.replace(stages, accept=ZeroRows(stages.accept))

    return Fault(
        name="nan_row_gives_zero",
        stage="accept",
        kind=_KIND,
        ids=(25,),
        reports=("vllm#41834 (comment)",),
        description="about one row in 32 puts out token 0, as a kernel without checks does that meets NaN",
        setting=Setting(drafter=SAMPLED_DRAFTER),
        expected=frozenset({Family.LAW, Family.SUPPORT, Family.IDENTITY}),
        wrap=wrap,
    )


def wrong_block() -> Fault:
    def wrap(stages: Stages) -> Stages:
        require_chain(stages, "wrong_block")
        return dataclasses.replace(stages, accept=LostBlockOffset(stages.accept))

    return Fault(
        name="wrong_block",
        stage="accept",
        kind=_KIND,
        ids=(26,),
        reports=("vllm-ascend#15118",),
        description="recovered tokens from the upper half of the vocabulary lose half its size from their id",
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY}),
        wrap=wrap,
    )


FAULTS: tuple[Callable[[], Fault], ...] = (noised_q, nan_row_gives_zero, wrong_block)
