"""Faults of numbers: a log-probability that is none, a row that is not a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from torch import Tensor

from equivtest.decoder.stages import Drafts, Float32Array, ReportStage, Scored, StepInput, VerifyStage
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import drafted, on_device, rows_with_drafts
from equivtest.kernels.contract import SpecAccept


class LogprobZero:
    """Reports 0 for every token of a row with drafts."""

    def __init__(self, inner: ReportStage) -> None:
        self.inner = inner

    def __call__(
        self, step: StepInput, drafts: Drafts, scored: Scored, target_probs: Tensor, accepted: SpecAccept
    ) -> Float32Array | None:
        logprobs = self.inner(step, drafts, scored, target_probs, accepted)
        if logprobs is not None:
            logprobs = logprobs.copy()
            logprobs[drafted(drafts)] = 0
        return logprobs


class GreedyNan:
    """Turns the laws of greedy rows with drafts into what a kernel without checks makes of NaN: token 0 for sure.

    Their temperature is 0, and something divides by it.
    """

    def __init__(self, inner: VerifyStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        target_probs = self.inner(step, drafts, scored)
        greedy = (step.params.temperature == 0).cpu().numpy()
        rows, slots = np.nonzero(rows_with_drafts(step, drafts) & greedy[:, None])
        at = (on_device(rows, target_probs), on_device(slots, target_probs))
        target_probs[at] = 0
        target_probs[(*at, 0)] = 1
        return target_probs


def logprob_zero() -> Fault:
    """It needs requests that ask for log-probabilities; no token changes."""
    return Fault(
        name="logprob_zero",
        stage="report",
        kind="numerics",
        ids=(54,),
        reports=("llama.cpp#27972",),
        description="the reported log-probability of every token of a step with drafts is 0",
        wrap=lambda stages: dataclasses.replace(stages, report=LogprobZero(stages.report)),
        expected=frozenset({Family.LOGPROBS}),
        changes_law=False,
    )


def greedy_nan() -> Fault:
    """It needs requests at temperature 0."""
    return Fault(
        name="greedy_nan",
        stage="verify",
        kind="numerics",
        ids=(55,),
        reports=("vllm#27077",),
        description="greedy rows with drafts put out token 0, as a kernel without checks does that meets NaN",
        wrap=lambda stages: dataclasses.replace(stages, verify=GreedyNan(stages.verify)),
        setting=Setting(config="greedy"),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.DUPLICATES, Family.IDENTITY}
        ),
    )


FAULTS: tuple[Callable[[], Fault], ...] = (logprob_zero, greedy_nan)
