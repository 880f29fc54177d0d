"""Faults of what requests ask of the logits: penalties, bias, and the text that they look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from equivtest.decoder.logit_processing import RowTexts, process_logits, row_texts
from equivtest.decoder.stages import Drafts, ProcessStage, Scored, Stages, StepInput
from equivtest.decoder.token_rules import TokenRules
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import Rows, draft_rows, rows_with_drafts


class OtherProcessing:
    """Processes some rows by other rules, or by another text before them, and the rest as they should be."""

    def __init__(
        self,
        inner: ProcessStage,
        change: Callable[[TokenRules, RowTexts, Scored], tuple[TokenRules, RowTexts]],
        rows: Callable[[StepInput, Drafts], Rows],
    ) -> None:
        self.inner, self.change, self.rows = inner, change, rows

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Scored:
        processed = self.inner(step, drafts, scored)
        if not step.table.rules.asks_processing:
            return processed
        wrong = np.flatnonzero(self.rows(step, drafts)[scored.batch_rows, scored.slots])
        rules, before = self.change(step.table.rules, row_texts(step, drafts, scored), scored)
        at = torch.from_numpy(wrong).to(scored.logits.device)
        logits = processed.logits.to(torch.promote_types(processed.logits.dtype, torch.float32), copy=True)
        logits[at] = process_logits(scored.logits, rules, before)[at].to(logits.dtype)
        return processed._replace(logits=logits)


def process_otherwise(
    change: Callable[[TokenRules, RowTexts, Scored], tuple[TokenRules, RowTexts]],
    rows: Callable[[StepInput, Drafts], Rows],
) -> Callable[[Stages], Stages]:
    """What a fault's `wrap` is."""
    return lambda stages: dataclasses.replace(stages, process=OtherProcessing(stages.process, change, rows))


def _no_rules(rules: TokenRules, before: RowTexts, scored: Scored) -> tuple[TokenRules, RowTexts]:
    rules, _ = _no_penalties(rules, before, scored)
    bias, min_tokens = np.zeros_like(rules.bias), np.zeros_like(rules.min_tokens)
    return dataclasses.replace(rules, bias=bias, min_tokens=min_tokens), before


def _no_penalties(rules: TokenRules, before: RowTexts, scored: Scored) -> tuple[TokenRules, RowTexts]:
    rules = dataclasses.replace(
        rules,
        repetition_penalty=np.ones_like(rules.repetition_penalty),
        presence_penalty=np.zeros_like(rules.presence_penalty),
    )
    return _no_frequency(rules, before, scored)


def _no_frequency(rules: TokenRules, before: RowTexts, scored: Scored) -> tuple[TokenRules, RowTexts]:
    return dataclasses.replace(rules, frequency_penalty=np.zeros_like(rules.frequency_penalty)), before


def _no_drafts(rules: TokenRules, before: RowTexts, scored: Scored) -> tuple[TokenRules, RowTexts]:
    return rules, before._replace(lengths=before.lengths - scored.slots)


def processing_skipped() -> Fault:
    return Fault(
        name="processing_skipped",
        stage="process",
        kind="history",
        ids=(47,),
        reports=("sglang#22049",),
        description="penalties, logit bias and min_tokens are ignored wherever drafts are verified",
        wrap=process_otherwise(_no_rules, rows_with_drafts),
        setting=Setting(config="processing"),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


def penalties_skipped() -> Fault:
    return Fault(
        name="penalties_skipped",
        stage="process",
        kind="history",
        ids=(48,),
        reports=("TensorRT-LLM#17701",),
        description="repetition, frequency and presence penalties are ignored wherever drafts are verified",
        wrap=process_otherwise(_no_penalties, rows_with_drafts),
        setting=Setting(config="penalties"),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


def frequency_skips_drafts() -> Fault:
    return Fault(
        name="frequency_skips_drafts",
        stage="process",
        kind="history",
        ids=(49,),
        reports=("vllm#18902",),
        description="the frequency penalty has no effect where a draft is judged",
        wrap=process_otherwise(_no_frequency, draft_rows),
        setting=Setting(config="penalties"),
        expected=frozenset({Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}),
    )


def stale_history() -> Fault:
    return Fault(
        name="stale_history",
        stage="process",
        kind="history",
        ids=(50,),
        reports=("mlx-examples#1255", "mlx-examples#1291"),
        description="penalties do not count the drafts of the block that come before the token they are for",
        wrap=process_otherwise(_no_drafts, rows_with_drafts),
        setting=Setting(config="penalties"),
        expected=frozenset({Family.SUPPORT, Family.LOGPROBS}),
    )


FAULTS: tuple[Callable[[], Fault], ...] = (
    processing_skipped,
    penalties_skipped,
    frequency_skips_drafts,
    stale_history,
)
