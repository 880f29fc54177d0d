"""From the law of each position to the columns that the statistics need."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from equivtest.decoder.dense_law import DenseLaw
from equivtest.decoder.sparse_law import Floats, SparseLaw
from equivtest.decoder.stages import Int64Array


class RowLaws(Protocol):
    """The law p of each row, normalised in float64: what `SparseLaw` and `DenseLaw` both are."""

    def take(self, which: Int64Array) -> RowLaws: ...
    def at(self, token_ids: Int64Array) -> Floats: ...
    def entropy(self) -> tuple[Floats, Floats]: ...
    def pit_rank(self, token_ids: Int64Array, coins: Floats) -> Floats: ...
    def pit_vocab(self, token_ids: Int64Array, coins: Floats) -> Floats: ...
    def moments(self, q: Tensor, q_rows: Int64Array) -> tuple[Floats, Floats]: ...


def row_laws(probs: Tensor) -> RowLaws:
    """The laws of probs [num_rows, vocab_size], reduced where they are; valid as long as `probs` does not change."""
    return SparseLaw.of(probs) if probs.device.type == "cpu" else DenseLaw.of(probs)


class DraftColumns(NamedTuple):
    """What the drafter's law q says at each token: float64 [num_rows] each."""

    q_token: Floats
    q_mean: Floats
    """Mean of q over p."""
    q_variance: Floats

    @classmethod
    def of_sure_drafts(cls, p_draft: Floats, token_ids: Int64Array, draft_ids: Int64Array) -> DraftColumns:
        """q a point mass at the draft, whose probability is p_draft; 0 where there is none (-1)."""
        return cls((token_ids == draft_ids).astype(np.float64), p_draft, p_draft * (1 - p_draft))


def law_columns(
    law: RowLaws,
    token_ids: Int64Array,  # [num_rows]
    draft_ids: Int64Array,  # [num_rows], -1 for none
    p_draft: Floats,  # [num_rows], law.at(draft_ids)
    drafts: DraftColumns,
    coins: tuple[Floats, Floats],  # [num_rows] each
) -> dict[str, np.ndarray]:
    """The columns of `LawColumns`, [num_rows] each; every token without probability counts as a violation."""
    p_token = law.at(token_ids)
    entropy, var_surprisal = law.entropy()
    return {
        "p_token": p_token,
        "has_draft": draft_ids >= 0,
        "p_draft": p_draft,
        "q_token": drafts.q_token,
        "q_mean": np.minimum(drafts.q_mean, 1.0),
        "q_variance": np.maximum(drafts.q_variance, 0.0),
        "pit_rank": law.pit_rank(token_ids, coins[0]),
        "pit_vocab": law.pit_vocab(token_ids, coins[1]),
        "entropy": np.maximum(entropy, 0.0),
        "var_surprisal": var_surprisal,
        "support_violation": p_token == 0,
    }
