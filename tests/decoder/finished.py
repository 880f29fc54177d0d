"""Decoded texts as the scorer is given them, and as the law family is given what it says."""

from __future__ import annotations

import dataclasses

import numpy as np

from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.records import Generation, LawColumns, Origin, Request, SamplingParams
from equivtest.stats.scored import ScoredTokens
from tests.decoder.scenarios import random_prompts

PROMPT = random_prompts(3)[1]
DRAWN_BLOCKS = "dflash with a Markov head"
PROCESSED = SamplingParams(
    temperature=0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.6, presence_penalty=-0.4,
    logit_bias=tuple((i, -100.0 if i % 4 == 1 else 1.0) for i in range(97) if i % 4 in (1, 2)),
)  # fmt: skip


def padded(column: np.ndarray, length: int, value: int) -> np.ndarray:
    return np.append(column, np.full(length - len(column), value, column.dtype))


def finished(requests: list[Request], generations: list[Generation]) -> FinishedSamples:
    """As samples on disk have it: after a stop token the same token to the end, and no draft."""
    length = requests[0].max_tokens
    return FinishedSamples(
        prompt_token_ids=requests[0].prompt_token_ids,
        params=requests[0].params,
        token_ids=np.stack([padded(g.token_ids, length, g.token_ids[-1]) for g in generations]),
        draft_token_ids=np.stack([padded(g.draft_token_ids, length, -1) for g in generations]),
        slots=np.stack([padded(g.slots, length, -1) for g in generations]),
        stream_keys=np.array([r.stream_key for r in requests]),
    )


def scored(law: LawColumns, generations: list[Generation]) -> ScoredTokens:
    num_samples, num_positions = law.p_token.shape
    origins = list(Origin)
    whole = {
        "origin": [[origins.index(origin) for origin in g.origins] for g in generations],
        "token_id": [g.token_ids for g in generations],
        "slot": [g.slots for g in generations],
        "num_draft": [g.num_drafts for g in generations],
        "is_draft": [g.token_ids == g.draft_token_ids for g in generations],
        "step": [g.steps for g in generations],
        "batch_row": [g.batch_rows for g in generations],
        "sample": np.repeat(np.arange(num_samples), num_positions),
        "position": np.tile(np.arange(num_positions), num_samples),
        "batch": np.zeros(law.p_token.size),
        "group": np.zeros(law.p_token.size),
    }
    columns = {f.name: getattr(law, f.name).ravel() for f in dataclasses.fields(law)}
    drafts = columns.pop("has_draft")
    del columns["p_draft"]
    for name in ("q_token", "q_mean", "q_variance"):
        columns[name] = columns[name] * drafts
    return ScoredTokens(**columns, **{name: np.array(values).ravel() for name, values in whole.items()})
