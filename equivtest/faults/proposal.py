"""Faults of the proposal: drafts are drawn from another law than the q that is handed on with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from equivtest.decoder.drafters.draft_model import ModelDrafter
from equivtest.decoder.stages import Drafts, Stages, StepInput
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import SAMPLED_DRAFTER, AlteredDrafter, require_sampled_drafter
from equivtest.kernels.contract import KernelBackend, RowParams

Law = Callable[[KernelBackend, Tensor, RowParams], Tensor]
"""(kernels, logits [n, vocab_size], params) to the law of each row: [n, vocab_size], in any scale."""


class TwoLaws:
    """The one kernel that a sampled drafter asks for, giving it `drawn` to draw from and keeping `declared` aside."""

    def __init__(self, kernels: KernelBackend, drawn: Law, declared: Law) -> None:
        self.kernels, self.drawn, self.declared = kernels, drawn, declared
        self.aside = torch.empty(0)
        """The declared laws of the newest proposal, where `out` has the drawn ones."""

    def verify_probs(self, logits: Tensor, params: RowParams, *, out: Tensor, out_rows: Tensor) -> Tensor:
        if self.aside.shape != out.shape:
            self.aside = torch.zeros_like(out)
        self.aside[out_rows] = self.declared(self.kernels, logits, params).to(out.dtype)
        out[out_rows] = self.drawn(self.kernels, logits, params).to(out.dtype)
        return out


class MisdeclaredProposal:
    """A propose stage whose drafts come from one law and carry another as their q."""

    def __init__(self, drafter: ModelDrafter, drawn: Law, declared: Law) -> None:
        self.laws = TwoLaws(drafter.backend, drawn, declared)
        self.propose = AlteredDrafter(drafter, backend=cast("KernelBackend", self.laws))

    def __call__(self, step: StepInput) -> Drafts:
        drafts = self.propose(step)
        return drafts if drafts.probs is None else drafts.with_probs(self.laws.aside.view_as(drafts.probs))


def _right(kernels: KernelBackend, logits: Tensor, params: RowParams) -> Tensor:
    dtype = kernels.capabilities.probs_dtype
    return kernels.verify_probs(logits, params, out=torch.empty_like(logits, dtype=dtype))


def _greedy(kernels: KernelBackend, logits: Tensor, params: RowParams) -> Tensor:
    return _right(kernels, logits, params._replace(temperature=torch.zeros_like(params.temperature)))


def _unfiltered(kernels: KernelBackend, logits: Tensor, params: RowParams) -> Tensor:
    temperature = params.temperature
    everything = RowParams(
        temperature, torch.zeros_like(params.top_k), torch.ones_like(temperature), torch.zeros_like(temperature)
    )
    return _right(kernels, logits, everything)


def _bf16(kernels: KernelBackend, logits: Tensor, params: RowParams) -> Tensor:
    # The probabilities and not the logits: of a bfloat16 model those are rounded already.
    return _right(kernels, logits, params).bfloat16()


def _likelier(kernels: KernelBackend, logits: Tensor, params: RowParams) -> Tensor:
    """The law of the likelier of two independent draws: G(x)^2 - (G(x) - q(x))^2, G(x) the mass of what is at most as
    likely as x, itself included; of two equally likely tokens one counts as the likelier."""
    q, token_ids = _right(kernels, logits, params).double().sort(dim=1, stable=True)
    mass = q.cumsum(dim=1)
    return torch.empty_like(q).scatter_(1, token_ids, q * (2 * mass - q))


def argmax_draft() -> Fault:
    return _misdeclared(
        "argmax_draft",
        drawn=_greedy,
        declared=_right,
        description="drafts are the drafter's likeliest tokens, but are judged as if they had been sampled",
        ids=(12,),
        reports=("transformers#32867", "transformers#33534"),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.DUPLICATES, Family.DRAFTS}),
    )


def raw_q_in_ratio() -> Fault:
    return _misdeclared(
        "raw_q_in_ratio",
        drawn=_right,
        declared=_unfiltered,
        description="drafts are drawn from the filtered law, but are judged by the drafter's law without filters",
        ids=(13,),
        reports=("transformers#47932",),
        expected=frozenset({Family.LAW, Family.DRAFTS}),
        config="topk20p90",
    )


def draft_rounded_to_bf16() -> Fault:
    return _misdeclared(
        "draft_rounded_to_bf16",
        drawn=_bf16,
        declared=_right,
        description="drafts are drawn from probabilities in bfloat16, but are judged by those in float32",
        ids=(14,),
        reports=("DeepSpec#31",),
        expected=frozenset({Family.DRAFTS}),
    )


def likeliest_of_two() -> Fault:
    return _misdeclared(
        "likeliest_of_two",
        drawn=_likelier,
        declared=_right,
        description="each draft is the likelier of two, as a beam picks it, but is judged as if one had been sampled",
        ids=(15,),
        reports=("ml-recurrent-drafter#6",),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.DRAFTS}),
    )


def _misdeclared(
    name: str,
    *,
    drawn: Law,
    declared: Law,
    description: str,
    ids: tuple[int, ...],
    reports: tuple[str, ...],
    expected: frozenset[Family],
    config: str = "topp95",
) -> Fault:
    def wrap(stages: Stages) -> Stages:
        drafter = require_sampled_drafter(stages, name)
        return dataclasses.replace(stages, propose=MisdeclaredProposal(drafter, drawn, declared))

    return Fault(
        name=name,
        stage="propose",
        kind="declared q",
        ids=ids,
        reports=reports,
        description=description,
        setting=Setting(config=config, drafter=SAMPLED_DRAFTER),
        expected=expected,
        wrap=wrap,
    )


FAULTS: tuple[Callable[[], Fault], ...] = (argmax_draft, raw_q_in_ratio, draft_rounded_to_bf16, likeliest_of_two)
