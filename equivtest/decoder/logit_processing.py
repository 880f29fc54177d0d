"""What requests do to the logits before the law is formed; one function for the decoder and the scorer.

In this order, z the logit of a token, in float32:

    repetition penalty r    z / r where z > 0, else z * r, for every token of prompt or text
    frequency penalty f     z - f * (times the text has the token)
    presence penalty f      z - f for every token that the text has
    logit bias b            z + b
    min_tokens              -inf for stop tokens while the text is shorter

The text of a row is everything before it: what was committed, and the drafts of its block that it follows.

Sources: Keskar et al. 2019, section 4.1 (repetition; the sign rule is transformers' RepetitionPenaltyLogitsProcessor);
the OpenAI API reference (frequency, presence, bias).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.stages import Drafts, Float32Array, Int64Array, Scored, StepInput
from equivtest.decoder.token_rules import TokenRules


class RowTexts(NamedTuple):
    """What stands before each row of logits."""

    requests: Int64Array
    """[num_rows], the request of each row, an index into the rules."""
    texts: Int64Array
    """[num_texts, width], each a prompt and what follows it; several rows may stand in one."""
    rows: Int64Array
    """[num_rows], the text of each row."""
    prompt_lengths: Int64Array
    """[num_rows]"""
    lengths: Int64Array
    """[num_rows], how much of its text comes before the row, the prompt included."""

    @property
    def positions(self) -> Int64Array:
        """[num_rows], tokens put out before the row."""
        return self.lengths - self.prompt_lengths

    def part(self, start: int, stop: int) -> RowTexts:
        """Rows start:stop."""
        kept = slice(start, stop)
        return self._replace(
            requests=self.requests[kept],
            rows=self.rows[kept],
            prompt_lengths=self.prompt_lengths[kept],
            lengths=self.lengths[kept],
        )


def row_texts(step: StepInput, drafts: Drafts, scored: Scored) -> RowTexts:
    """The texts of a step: committed tokens, then the drafts before each row's slot."""
    num_drafts, longest = drafts.token_ids.shape[1], int(step.lengths.max(initial=0))
    texts = np.zeros((step.batch, longest + num_drafts), np.int64)
    texts[:, :longest] = step.table.token_ids[step.requests, :longest]
    np.put_along_axis(texts, step.lengths[:, None] + np.arange(num_drafts), drafts.token_ids, axis=1)
    requests = step.requests[scored.batch_rows]
    return RowTexts(
        requests=requests,
        texts=texts,
        rows=scored.batch_rows,
        prompt_lengths=step.table.prompt_lengths[requests],
        lengths=step.lengths[scored.batch_rows] + scored.slots,
    )


def process_logits(logits: Tensor, rules: TokenRules, before: RowTexts) -> Tensor:
    """New logits [num_rows, vocab_size], float32 or wider; `logits` itself, in its dtype, where no row asks for any."""
    kinds = rules.kind[before.requests]
    penalised = np.flatnonzero(rules.penalised[kinds])
    biased = np.flatnonzero(rules.biased.sizes[kinds])
    too_short = np.flatnonzero(before.positions < rules.min_tokens[kinds])
    if not (len(penalised) or len(biased) or len(too_short)):
        return logits
    processed = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if len(penalised):
        rows, token_ids, counts = _occurrences(before, penalised)
        kind = kinds[rows]
        once = rules.frequency_penalty[kind] * counts + rules.presence_penalty[kind] * (counts > 0)
        place = _index(processed, rows, token_ids)
        factor, minus = (_column(processed, values) for values in (rules.repetition_penalty[kind], once))
        z = processed[place]
        processed[place] = torch.where(z > 0, z / factor, z * factor) - minus
    if len(biased):
        rows, entries = rules.biased.entries(kinds[biased])
        place = _index(processed, biased[rows], rules.biased.token_ids[entries])
        processed[place] += _column(processed, rules.bias[entries])
    if len(too_short):
        rows, entries = rules.stops.entries(kinds[too_short])
        processed[_index(processed, too_short[rows], rules.stops.token_ids[entries])] = -torch.inf
    return processed


def _occurrences(before: RowTexts, chosen: Int64Array) -> tuple[Int64Array, Int64Array, Float32Array]:
    """Every token of each chosen row's prompt and text, once: its row, its id, and how often the text has it."""
    lengths, prompt_lengths = before.lengths[chosen, None], before.prompt_lengths[chosen, None]
    columns = np.arange(int(lengths.max()))
    # The last bit tells the text from the prompt, so that one sort brings equal tokens together and keeps both apart.
    codes = 2 * before.texts[before.rows[chosen], : len(columns)] + (columns >= prompt_lengths)
    codes = np.where(columns < lengths, codes, -1).astype(np.int32)
    codes.sort(axis=1)
    token_ids, inside = codes >> 1, codes >= 0
    first = inside.copy()
    first[:, 1:] &= token_ids[:, 1:] != token_ids[:, :-1]
    counts = np.add.reduceat((inside & (codes & 1 == 1)).ravel(), np.flatnonzero(first), dtype=np.float32)
    return chosen[np.nonzero(first)[0]], token_ids[first].astype(np.int64), counts


def _index(logits: Tensor, rows: Int64Array, token_ids: Int64Array) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(token_ids).to(logits.device)


def _column(logits: Tensor, values: Float32Array) -> Tensor:
    return torch.from_numpy(values).to(logits.device)
