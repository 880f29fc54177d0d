"""A synthetic decoder: laws over a small vocabulary that are known exactly, decoded plainly or speculatively.

What it puts out has the columns of a scored run, so every family can be asked about thousands of runs in minutes.
All that decoding and scoring need is tabulated by context (prompt, position, token before): a token costs a handful of
look-ups, and the samples of a run are decoded together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting
from equivtest.records import Origin
from equivtest.stats.scored import ORIGIN_CODES, ScoredTokens

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[Any]]

_TOP_P = 0.95
_NO_DRAFT_EVERY = 4
"""After a token whose id is a multiple of this no draft is offered: known before the draw, as are a drafter's gaps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SyntheticModel:
    """The target's law p and the drafter's law q in every context, and what follows from them.

    Context (prompt * num_positions + position) * vocab + token before; token 0 stands before position 0.
    """

    num_prompts: int
    num_positions: int
    vocab: int
    law: Floats
    """[contexts, vocab] p, filtered: some tokens are exact zeros."""
    draft: Floats
    """[contexts, vocab] q, a point mass for a greedy drafter."""
    draws: _Draws
    """Rows p, then relu(p - q), then q, of every context."""
    above: Floats
    """[contexts, vocab] mass of the tokens more likely than this one."""
    ties: Floats
    """[contexts, vocab] mass of the tokens as likely as this one, itself included."""
    below: Floats
    """[contexts, vocab] mass of the ids below this one."""
    entropy: Floats
    """[contexts] mean of -ln p over p."""
    var_surprisal: Floats
    """[contexts] variance of -ln p over p."""
    q_mean: Floats
    """[contexts] mean of q over p."""
    q_variance: Floats
    """[contexts] variance of q over p."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    """The samples of one arm."""

    tokens: Ints
    """[num_prompts, num_seeds, num_positions]"""
    scored: ScoredTokens
    """The same tokens with the law's columns; a prompt is a group and a batch."""


def synthetic_model(
    num_prompts: int, num_positions: int, *, vocab: int = 24, sampled_draft: bool = False, seed: int
) -> SyntheticModel:
    """Laws as decoding shows them: power laws of many slopes, two in five with one dominant token, over other tokens at
    every prompt and position, changed by the token before, cut at top_p .95.

    The drafter knows the laws but for noise and offers its most likely token, or samples. Raises InvalidSetting.
    """
    for name, value in (("num_prompts", num_prompts), ("num_positions", num_positions), ("vocab", vocab)):
        if value < 1:
            raise InvalidSetting(name, value, "must be at least 1")
    rng = np.random.default_rng(seed)
    num_cells = num_prompts * num_positions
    weights = (1.0 + np.arange(vocab)) ** -rng.uniform(0.6, 3.0, (num_cells, 1))
    weights[:, 0] += np.where(rng.random(num_cells) < 0.4, rng.uniform(1, 10, num_cells), 0.0)
    logits = np.log(rng.permuted(weights, axis=1))[:, None] + rng.normal(0, 0.5, (num_cells, vocab, vocab))
    logits = logits.reshape(-1, vocab)
    law, draft = _top_p(_softmax(logits)), _softmax(logits + rng.normal(0, 0.5, logits.shape))
    if not sampled_draft:
        draft = np.eye(vocab)[draft.argmax(axis=1)]
    p, other = law[:, :, None], law[:, None, :]
    logs = np.log(np.where(law > 0, law, 1.0))
    entropy, q_mean = -(law * logs).sum(axis=1), (law * draft).sum(axis=1)
    residual = np.maximum(law - draft, 0.0)
    certain = residual.sum(axis=1, keepdims=True) == 0  # such a draft is never rejected
    return SyntheticModel(
        num_prompts=num_prompts,
        num_positions=num_positions,
        vocab=vocab,
        law=law,
        draft=draft,
        draws=_draws(np.concatenate([law, np.where(certain, law, residual), draft])),
        above=(other * (other > p)).sum(axis=2),
        ties=(other * (other == p)).sum(axis=2),
        below=law.cumsum(axis=1) - law,
        entropy=entropy,
        var_surprisal=np.maximum((law * logs**2).sum(axis=1) - entropy**2, 0.0),
        q_mean=np.minimum(q_mean, 1.0),
        q_variance=np.maximum((law * draft**2).sum(axis=1) - q_mean**2, 0.0),
    )


def decode(
    model: SyntheticModel, num_seeds: int, *, max_draft: int = 0, epsilon: float = 0.0, rng: np.random.Generator
) -> Decoded:
    """Decode `num_seeds` samples of every prompt.

    max_draft: drafts of a round, fewer where fewer still fit and none after one token in four; 0 decodes plainly.
    epsilon: a draft d is kept with probability min(1, p(d)/q(d) + epsilon); 0 is right.
    """
    num_samples = model.num_prompts * num_seeds
    prompt = np.repeat(np.arange(model.num_prompts), num_seeds)
    slot, num_draft, step = np.full(num_samples, -1), np.zeros(num_samples, np.int64), np.full(num_samples, -1)
    token = np.zeros(num_samples, np.int64)
    num_contexts = len(model.law)
    coins = rng.random((model.num_positions, 3, num_samples))
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    for position, (draft_coin, accept_coin, draw_coin) in enumerate(coins):
        opens = slot < 0
        step = step + opens
        offered = np.where(token % _NO_DRAFT_EVERY > 0, min(max_draft, model.num_positions - position - 1), 0)
        num_draft, slot = np.where(opens, offered, num_draft), np.where(opens, 0, slot)
        has_draft = slot < num_draft

        context = (prompt * model.num_positions + position) * model.vocab + token
        draft = model.draws.draw(context + 2 * num_contexts, draft_coin)
        keep = model.law[context, draft] / model.draft[context, draft] + epsilon
        accepted = has_draft & (accept_coin < keep)
        recovered = has_draft & ~accepted
        token = np.where(accepted, draft, model.draws.draw(context + recovered * num_contexts, draw_coin))

        is_bonus = (slot == num_draft) & (num_draft > 0)
        row = {
            "context": context,
            "token_id": token,
            "is_draft": has_draft & (token == draft),
            "origin": np.select([accepted, recovered, is_bonus], _ORIGINS, ORIGIN_CODES[Origin.PLAIN]),
            "slot": np.where(num_draft > 0, slot, -1),
            "num_draft": num_draft,
            "step": step,
        }
        for name, values in row.items():
            columns.setdefault(name, []).append(values)
        slot = np.where(accepted, slot + 1, -1)
    flat = {name: np.stack(rows, axis=1).ravel() for name, rows in columns.items()}
    whole = {"sample": np.arange(num_samples), "batch_row": np.arange(num_samples), "batch": prompt, "group": prompt}
    flat |= {name: np.repeat(values, model.num_positions) for name, values in whole.items()}
    flat["position"] = np.tile(np.arange(model.num_positions), num_samples)
    context = flat.pop("context")
    shape = (model.num_prompts, num_seeds, model.num_positions)
    return Decoded(
        tokens=flat["token_id"].reshape(shape),
        scored=ScoredTokens(**flat, **_law_columns(model, context, flat, rng)),
    )


_ORIGINS = [ORIGIN_CODES[origin] for origin in (Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS)]


def _law_columns(model: SyntheticModel, context: Ints, tokens: Columns, rng: np.random.Generator) -> Columns:
    """What a scorer records of every token."""
    token = tokens["token_id"]
    p_token, coins = model.law[context, token], rng.random((2, len(context)))
    has_draft = (tokens["slot"] >= 0) & (tokens["slot"] < tokens["num_draft"])
    return {
        "p_token": p_token,
        "pit_rank": np.minimum(model.above[context, token] + coins[0] * model.ties[context, token], 1.0),
        "pit_vocab": np.minimum(model.below[context, token] + coins[1] * p_token, 1.0),
        "entropy": model.entropy[context],
        "var_surprisal": model.var_surprisal[context],
        "q_token": model.draft[context, token] * has_draft,
        "q_mean": model.q_mean[context] * has_draft,
        "q_variance": model.q_variance[context] * has_draft,
        "support_violation": p_token == 0,
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draws:
    """Laws whose draws invert the distribution function, all rows with one search."""

    cumulative: Floats
    """[rows * vocab] row r runs from r to r + 1."""
    last: Ints
    """[rows] last token with mass."""

    def draw(self, row: Ints, coin: Floats) -> Ints:
        """[n] of rows [n] with coins [n] in [0, 1): the first token whose cumulative mass exceeds the coin."""
        vocab = len(self.cumulative) // len(self.last)
        found = np.searchsorted(self.cumulative, row + coin, side="right") - row * vocab
        drawn: Ints = np.minimum(found, self.last[row])
        return drawn


def _draws(laws: Floats) -> _Draws:
    num_rows, vocab = laws.shape
    cumulative = laws.cumsum(axis=1)
    cumulative = cumulative / cumulative[:, -1:] + np.arange(num_rows)[:, None]
    return _Draws(cumulative=cumulative.ravel(), last=vocab - 1 - (laws[:, ::-1] > 0).argmax(axis=1))


def _softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax: Floats = weights / weights.sum(axis=1, keepdims=True)
    return softmax


def _top_p(law: Floats) -> Floats:
    ordered = -np.sort(-law, axis=1)
    kept = (ordered.cumsum(axis=1) < _TOP_P).sum(axis=1)
    cut = np.take_along_axis(ordered, kept[:, None], axis=1)
    filtered = np.where(law >= cut, law, 0.0)
    top_p: Floats = filtered / filtered.sum(axis=1, keepdims=True)
    return top_p
