"""Faults of the target's law, on the rows that drafts are verified on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.stages import Drafts, ProcessStage, Scored, Stages, StepInput, VerifyStage
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import Rows, draft_rows, rows_with_drafts, speculative_rows
from equivtest.kernels.contract import RowParams

_KIND = "target law on verify rows"


class OtherParams:
    """A verify stage that takes the law of some rows from other sampling parameters."""

    def __init__(
        self,
        inner: VerifyStage,
        change: Callable[[RowParams], RowParams],
        rows: Callable[[StepInput, Drafts], Rows],
    ) -> None:
        self.inner, self.change, self.rows = inner, change, rows

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        target_probs = self.inner(step, drafts, scored)
        wrong = self.rows(step, drafts)
        if wrong.any():
            # Both laws are written to the same scratch, the right one first.
            kept = torch.from_numpy(~wrong).to(target_probs.device)
            right = target_probs[kept]
            target_probs = self.inner(dataclasses.replace(step, params=self.change(step.params)), drafts, scored)
            target_probs[kept] = right
        return target_probs


class LogitsAsProbs:
    """A verify stage that hands on the positive logits, scaled to sum to 1, where probabilities are expected.

    A row without a positive logit keeps its law.
    """

    def __init__(self, inner: VerifyStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        target_probs = self.inner(step, drafts, scored)
        device = target_probs.device
        places = np.flatnonzero(drafts.num_draft[scored.batch_rows] > 0)
        rows, slots = (torch.from_numpy(index[places]).to(device) for index in (scored.batch_rows, scored.slots))
        weights = scored.logits[torch.from_numpy(places).to(device)].to(target_probs.dtype).clamp(min=0)
        total = weights.sum(dim=1, keepdim=True)
        target_probs[rows, slots] = torch.where(total > 0, weights / total, target_probs[rows, slots])
        return target_probs


class BiasOffDrafts:
    """A process stage that leaves the requests' logit bias off the rows that judge a draft."""

    def __init__(self, inner: ProcessStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Scored:
        processed = self.inner(step, drafts, scored)
        judging = scored.slots < drafts.num_draft[scored.batch_rows]
        requests = step.requests[scored.batch_rows]
        biases: dict[tuple[tuple[int, float], ...], list[int]] = {}
        for place in np.flatnonzero(judging).tolist():
            biases.setdefault(step.table.requests[requests[place]].params.logit_bias, []).append(place)
        biases.pop((), None)
        if not biases:
            return processed
        logits = processed.logits.clone()
        for bias, places in biases.items():
            rows = torch.tensor(places, device=logits.device)[:, None]
            token_ids = torch.tensor([token_id for token_id, _ in bias], device=logits.device)
            logits[rows, token_ids] -= torch.tensor([b for _, b in bias], dtype=logits.dtype, device=logits.device)
        return processed._replace(logits=logits)


def _raw(params: RowParams) -> RowParams:
    return _unfiltered(params)._replace(temperature=torch.ones_like(params.temperature))


def _unfiltered(params: RowParams) -> RowParams:
    return params._replace(
        top_k=torch.zeros_like(params.top_k),
        top_p=torch.ones_like(params.top_p),
        min_p=torch.zeros_like(params.min_p),
    )


def _whole(params: RowParams) -> RowParams:
    return params._replace(top_p=torch.ones_like(params.top_p))


def _greedy(params: RowParams) -> RowParams:
    return params._replace(temperature=torch.zeros_like(params.temperature))


def _hot(params: RowParams) -> RowParams:
    return params._replace(temperature=torch.ones_like(params.temperature))


def raw_target() -> Fault:
    return _other_params(
        "raw_target",
        _raw,
        rows_with_drafts,
        description="drafts are verified against the model's own softmax: temperature 1 and no filter",
        ids=(1,),
        reports=("vllm#9834", "vllm#10198"),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


def top_p_skipped() -> Fault:
    return _other_params(
        "top_p_skipped",
        _whole,
        rows_with_drafts,
        description="top_p is left out where drafts are verified",
        ids=(2,),
        reports=("mlc-llm#2940",),
        expected=frozenset({Family.JOINT, Family.LAW, Family.SUPPORT, Family.LOGPROBS}),
    )


def argmax_drafts() -> Fault:
    return _other_params(
        "argmax_drafts",
        _greedy,
        draft_rows,
        description="the likeliest token is put out where a draft is judged; only the bonus token is sampled",
        ids=(3,),
        reports=("ROCm/ATOM#2318",),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.DUPLICATES, Family.LOGPROBS}),
    )


def argmax_verify() -> Fault:
    return _other_params(
        "argmax_verify",
        _greedy,
        rows_with_drafts,
        description="every step that verifies a draft is greedy, whatever the temperature",
        ids=(4,),
        reports=("sglang#31214",),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.DUPLICATES, Family.LOGPROBS}),
    )


def filtered_argmax() -> Fault:
    return _other_params(
        "filtered_argmax",
        _greedy,
        speculative_rows,
        description="the filtered law is built and then its likeliest token is put out, with or without a draft",
        ids=(5,),
        setting=Setting(drafter="ngram"),  # which leaves many rows without a draft
        reports=("mistral.rs#2329", "mistral.rs#2424"),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.DUPLICATES, Family.LOGPROBS}),
    )


def temperature_ignored() -> Fault:
    return _other_params(
        "temperature_ignored",
        _hot,
        rows_with_drafts,
        description="temperature is 1 where drafts are verified, whatever the request says",
        ids=(6,),
        reports=("lattice#388",),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


def logits_as_probs() -> Fault:
    return Fault(
        name="logits_as_probs",
        stage="verify",
        kind=_KIND,
        ids=(8,),
        reports=("vllm-ascend#6685",),
        description="logits are taken for probabilities where drafts are verified",
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
        wrap=lambda stages: dataclasses.replace(stages, verify=LogitsAsProbs(stages.verify)),
    )


def filters_on_bonus_only() -> Fault:
    return _other_params(
        "filters_on_bonus_only",
        _unfiltered,
        draft_rows,
        description="min_p and the other filters reach the bonus token only, not the rows that judge a draft",
        ids=(10,),
        reports=("vllm#42744",),
        setting=Setting(config="minp05"),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.LOGPROBS}),
    )


def bias_skips_drafts() -> Fault:
    return Fault(
        name="bias_skips_drafts",
        stage="process",
        kind=_KIND,
        ids=(11,),
        reports=("sglang#10617",),
        description="logit_bias is left out on the rows that judge a draft",
        setting=Setting(config="logitbias"),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
        wrap=lambda stages: dataclasses.replace(stages, process=BiasOffDrafts(stages.process)),
    )


def _other_params(
    name: str,
    change: Callable[[RowParams], RowParams],
    rows: Callable[[StepInput, Drafts], Rows],
    *,
    description: str,
    ids: tuple[int, ...],
    reports: tuple[str, ...],
    expected: frozenset[Family],
    setting: Setting | None = None,
) -> Fault:
    def wrap(stages: Stages) -> Stages:
        return dataclasses.replace(stages, verify=OtherParams(stages.verify, change, rows))

    return Fault(
        name=name,
        stage="verify",
        kind=_KIND,
        ids=ids,
        reports=reports,
        description=description,
        setting=setting or Setting(),
        expected=expected,
        wrap=wrap,
    )


FAULTS: tuple[Callable[[], Fault], ...] = (
    raw_target,
    top_p_skipped,
    argmax_drafts,
    argmax_verify,
    filtered_argmax,
    temperature_ignored,
    logits_as_probs,
    filters_on_bonus_only,
    bias_skips_drafts,
)
