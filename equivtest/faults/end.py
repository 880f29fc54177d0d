"""Faults of where a text ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from equivtest.decoder.logit_processing import RowTexts
from equivtest.decoder.stages import Int64Array, Scored, Stages, StepInput
from equivtest.decoder.standard_stages import CommitEmitted
from equivtest.decoder.token_rules import TokenRules
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.history import process_otherwise
from equivtest.faults.wrappers import rows_with_drafts


class RunsPastEnd(CommitEmitted):
    """Commits all that a block puts out: a stop token ends the text only where it comes last."""

    def crop(self, step: StepInput, output_token_ids: Int64Array, counts: Int64Array) -> Int64Array:
        return counts


def _masked_too_far(rules: TokenRules, before: RowTexts, scored: Scored) -> tuple[TokenRules, RowTexts]:
    return dataclasses.replace(rules, min_tokens=rules.min_tokens + (rules.min_tokens > 0)), before


def runs_past_end() -> Fault:
    """Calling it raises InvalidSetting for a commit stage that is not the standard one, which it takes the place of."""

    def wrap(stages: Stages) -> Stages:
        if type(stages.commit) is not CommitEmitted:
            raise InvalidSetting("fault", "runs_past_end", "goes with the standard commit stage")
        return dataclasses.replace(stages, commit=RunsPastEnd())

    return Fault(
        name="runs_past_end",
        stage="commit",
        kind="end",
        ids=(52,),
        reports=("transformers#47912",),
        description="a text goes on past a stop token that was accepted inside a draft block",
        wrap=wrap,
        setting=Setting(config="stops"),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.DUPLICATES, Family.IDENTITY}
        ),
    )


def min_tokens_off_by_one() -> Fault:
    return Fault(
        name="min_tokens_off_by_one",
        stage="process",
        kind="end",
        ids=(53,),
        reports=("vllm#41768",),
        description="where drafts are verified, min_tokens keeps stop tokens out for one token too many",
        wrap=process_otherwise(_masked_too_far, rows_with_drafts),
        setting=Setting(config="stops"),
        expected=frozenset({Family.SUPPORT, Family.LOGPROBS}),
    )


FAULTS: tuple[Callable[[], Fault], ...] = (runs_past_end, min_tokens_off_by_one)
