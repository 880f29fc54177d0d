"""Prompt lookup: what followed the last time the request's own text looked like this."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from equivtest.decoder.drafters.base import StatelessDrafter
from equivtest.decoder.stages import Drafts, StepInput
from equivtest.errors import InvalidSetting

MAX_NGRAM = 3


class NgramDrafter(StatelessDrafter):
    """Finds the longest suffix n-gram (max_ngram down to 1) that occurred before in prompt and text, its most recent
    occurrence, and proposes what followed it. A row without an occurrence gets no draft.

    Source: Saxena, "Prompt lookup decoding", 2023.
    """

    name = "ngram"

    def __init__(self, *, max_ngram: int = MAX_NGRAM) -> None:
        if max_ngram < 1:
            raise InvalidSetting("max_ngram", max_ngram, "must be at least 1")
        self.max_ngram = max_ngram

    def describe(self) -> Mapping[str, object]:
        return {"max_ngram": self.max_ngram}

    def propose(self, step: StepInput) -> Drafts:
        lengths = step.lengths
        history = step.table.token_ids[step.requests, : int(lengths.max())]  # [B, width]
        columns = np.arange(history.shape[1])
        best = np.full(step.batch, -1)  # column of the last token of the chosen occurrence
        matches = columns < lengths[:, None] - 1  # occurrences must be followed by something
        for n in range(1, self.max_ngram + 1):
            # matches[b, j]: the n tokens that end at column j equal the n tokens that end the row.
            shifted = np.full_like(history, -1)
            shifted[:, n - 1 :] = history[:, : history.shape[1] - (n - 1)]
            suffix = history[np.arange(step.batch), np.maximum(lengths - n, 0)]
            matches &= (shifted == suffix[:, None]) & (lengths[:, None] >= n)
            latest = np.where(matches, columns, -1).max(axis=1)
            best = np.where(latest >= 0, latest, best)
        num_draft = np.where(best >= 0, np.minimum(step.limits, lengths - 1 - best), 0)
        width = int(num_draft.max(initial=0))
        sources = np.minimum(best[:, None] + 1 + np.arange(width), history.shape[1] - 1)
        return Drafts(np.take_along_axis(history, sources, axis=1), num_draft.astype(np.int32), None)
