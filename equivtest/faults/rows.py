"""Faults of row and batch indices: something of another row is taken for a row's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.stages import AcceptStage, Drafts, ProposeStage, Scored, Stages, StepInput, VerifyStage
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import (
    SAMPLED_DRAFTER,
    drafted,
    on_device,
    recounted,
    require_chain,
    require_sampled_drafter,
)
from equivtest.kernels.contract import SpecAccept


class ShiftedRows:
    """Gives each slot after the first the law of the slot before it."""

    def __init__(self, inner: VerifyStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        target_probs = self.inner(step, drafts, scored)
        later = scored.slots > 0
        rows, slots = (on_device(index[later], target_probs) for index in (scored.batch_rows, scored.slots))
        target_probs[rows, slots] = target_probs[rows, slots - 1]
        return target_probs


class PermutedRows:
    """Exchanges the laws of a row with few drafts and one with many, over the slots that both have.

    It is what a batch sorted by the number of drafts does when its results are not sorted back.
    """

    def __init__(self, inner: VerifyStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        target_probs = self.inner(step, drafts, scored)
        rows = drafted(drafts)
        order = rows[np.argsort(drafts.num_draft[rows], kind="stable")]
        few, many = order[: len(order) // 2], order[::-1][: len(order) // 2]
        differ = drafts.num_draft[few] < drafts.num_draft[many]
        few, many = few[differ], many[differ]
        pairs, slots = np.nonzero(np.arange(target_probs.shape[1]) <= drafts.num_draft[few][:, None])
        first, second, at = (on_device(index, target_probs) for index in (few[pairs], many[pairs], slots))
        kept = target_probs[first, at]
        target_probs[first, at] = target_probs[second, at]
        target_probs[second, at] = kept
        return target_probs


class SliceOffset:
    """Reads the logits of a block one row too far: the last one's are the next request's."""

    def __init__(self, inner: VerifyStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        num_rows = len(scored.batch_rows)
        index = np.minimum(np.arange(num_rows) + (drafts.num_draft[scored.batch_rows] > 0), num_rows - 1)
        return self.inner(step, drafts, scored._replace(logits=scored.logits[on_device(index, scored.logits)]))


class StaleQ:
    """From batch row 2 on, declares the laws that the same row's drafts had in the step before."""

    def __init__(self, inner: ProposeStage) -> None:
        self.inner = inner
        self._before: tuple[Tensor, Drafts] | None = None
        """The laws of the step before, and what they were of."""

    def __call__(self, step: StepInput) -> Drafts:
        drafts = self.inner(step)
        before, self._before = (self._before if step.index else None), None
        if drafts.probs is None:
            return drafts
        # Copied, for the drafter writes the next step's laws to the same place.
        declared = drafts.probs.clone()
        self._before = declared, drafts
        if before is None:
            return drafts
        old_probs, old = before
        num_rows = min(step.batch, len(old.num_draft))
        num_stale = np.minimum(drafts.num_draft[:num_rows], old.num_draft[:num_rows])
        num_stale[:2] = 0
        rows, slots = np.nonzero(np.arange(drafts.token_ids.shape[1]) < num_stale[:, None])
        at = (on_device(rows, declared), on_device(slots, declared))
        stale = declared.clone()
        stale[at] = old_probs[at]
        return drafts.with_probs(stale)


class OneTooMany:
    """Counts one draft too many where one was rejected, and puts it out before the token that should replace it."""

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        accepted = self.inner(step, drafts, target_probs)
        rejected = accepted.emitted < on_device(drafts.num_draft, accepted.emitted)
        return recounted(accepted, drafts, accepted.emitted + rejected.to(torch.int32))


def shifted_rows() -> Fault:
    """Slot 0, which has no row before it, stays right."""
    return Fault(
        name="shifted_rows",
        stage="verify",
        kind="rows",
        ids=(34,),
        reports=("transformers#28166",),
        description="each draft but the first is judged by the law of the place before its own",
        wrap=lambda stages: dataclasses.replace(stages, verify=ShiftedRows(stages.verify)),
        expected=frozenset(
            {
                Family.MARGINAL,
                Family.JOINT,
                Family.LAW,
                Family.SUPPORT,
                Family.DUPLICATES,
                Family.IDENTITY,
                Family.LOGPROBS,
            }
        ),
    )


def permuted_rows() -> Fault:
    """It needs a batch whose rows differ in their number of drafts."""
    return Fault(
        name="permuted_rows",
        stage="verify",
        kind="rows",
        ids=(35,),
        reports=("vllm#14645",),
        description="requests with few and with many drafts get each other's laws",
        wrap=lambda stages: dataclasses.replace(stages, verify=PermutedRows(stages.verify)),
        setting=Setting(drafter="ngram"),
        expected=frozenset({Family.MARGINAL, Family.LAW, Family.SUPPORT, Family.REPLAY, Family.IDENTITY}),
    )


def stale_q() -> Fault:
    """It needs a batch of at least three.

    Calling it raises InvalidSetting for a drafter without a law q, and for the match rule, which reads none.
    """

    def wrap(stages: Stages) -> Stages:
        require_chain(stages, "stale_q")
        require_sampled_drafter(stages, "stale_q")
        return dataclasses.replace(stages, propose=StaleQ(stages.propose))

    return Fault(
        name="stale_q",
        stage="propose",
        kind="rows",
        ids=(37,),
        reports=("1Cat-vLLM#656",),
        description="from the third row of the batch on, drafts are judged against the draft law of the step before",
        wrap=wrap,
        setting=Setting(drafter=SAMPLED_DRAFTER),
        expected=frozenset({Family.LAW, Family.DRAFTS}),
    )


def slice_offset() -> Fault:
    return Fault(
        name="slice_offset",
        stage="verify",
        kind="rows",
        ids=(38,),
        reports=("TensorRT-LLM#15098",),
        description="the logits of a draft block are read one row too far, into the next request",
        wrap=lambda stages: dataclasses.replace(stages, verify=SliceOffset(stages.verify)),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


def one_too_many() -> Fault:
    return Fault(
        name="one_too_many",
        stage="accept",
        kind="rows",
        ids=(39,),
        reports=("flashinfer#879",),
        description="after a rejection the count is one too high, and the rejected draft is put out",
        wrap=lambda stages: dataclasses.replace(stages, accept=OneTooMany(stages.accept)),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.DUPLICATES, Family.IDENTITY}
        ),
    )


FAULTS: tuple[Callable[[], Fault], ...] = (shifted_rows, permuted_rows, stale_q, slice_offset, one_too_many)
