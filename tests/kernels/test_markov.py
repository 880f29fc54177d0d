"""Drafts that depend on the one before: the definition, spelled out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from equivtest.kernels.contract import RowParams, Streams
from equivtest.kernels.markov import STRIPES, candidate_law, markov_drafts, stripe_maxima
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams

LAWS = (
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=50),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=0.0),
)


def inputs(vocab_size: int, *, batch: int = 3, places: int = 4, hidden_size: int = 16) -> tuple[Tensor, ...]:
    """logits, gates, successors, head: what is said of a successor matters about as much as the logits."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(batch, places, vocab_size, generator=generator)
    gates = torch.rand(batch, places, hidden_size, generator=generator)
    successors = torch.randn(vocab_size, hidden_size, generator=generator)
    return logits, gates, successors, torch.randn(vocab_size, hidden_size, generator=generator)


def draws(batch: int, laws: tuple[SamplingParams, ...] = LAWS) -> tuple[RowParams, Streams]:
    """Laws and streams of so many rows."""
    law = RowParams.of([laws[row % len(laws)] for row in range(batch)])
    return law, Streams(torch.arange(batch) * 77 + 5, torch.arange(batch) % 9)


def spelled_out(logits: Tensor, gates: Tensor, successors: Tensor, head: Tensor, drafts: Tensor) -> Tensor:
    """Scores of every token of every place behind these drafts, -inf for what is no candidate: [B, K, vocab_size]."""
    scores = torch.full_like(logits, -torch.inf)
    for row, place in np.ndindex(*drafts.shape):
        best: dict[int, int] = {}
        for token in range(logits.shape[-1]):
            stripe = token % STRIPES
            if stripe not in best or logits[row, place, token] > logits[row, place, best[stripe]]:
                best[stripe] = token
        for token in best.values():
            scores[row, place, token] = logits[row, place, token]
            if place:
                scores[row, place, token] += head[token] @ (gates[row, place] * successors[drafts[row, place - 1]])
    return scores


@pytest.mark.parametrize("vocab_size", [1, 97, STRIPES, 300])
def test_each_place_takes_the_best_candidate_behind_the_one_before(vocab_size: int) -> None:
    given = inputs(vocab_size)
    drafts, candidates, probs = markov_drafts(*given)
    assert (candidates, probs) == (None, None)
    assert torch.equal(drafts, spelled_out(*given, drafts).argmax(dim=-1))


@pytest.mark.parametrize("vocab_size", [1, 97, STRIPES, 300])
def test_the_law_is_that_of_the_house_over_the_candidates(vocab_size: int) -> None:
    given = inputs(vocab_size, batch=len(LAWS))
    law, streams = draws(len(LAWS))
    drafts = markov_drafts(*given, law, streams)
    dense = drafts.dense(torch.zeros_like(given[0]))
    scores = spelled_out(*given, drafts.token_ids)
    every_place = law.take(torch.arange(len(LAWS)).repeat_interleave(scores.shape[1]))
    expected = get_backend("reference").verify_probs(
        scores.flatten(0, 1), every_place, out=torch.empty_like(scores).flatten(0, 1)
    )
    torch.testing.assert_close(dense.flatten(0, 1), expected, atol=1e-6, rtol=1e-4)
    assert (dense.gather(2, drafts.token_ids[..., None]) > 0).all()


def test_drafts_are_drawn_from_the_law_that_is_handed_on() -> None:
    """Chi-squared at a false-alarm rate of .001, fixed seeds; the twin hands on another temperature."""
    one, rows = tuple(tensor[:1].expand(20_000, *tensor.shape[1:]) for tensor in inputs(300)[:2]), 20_000
    law, _ = draws(rows, LAWS[:1])
    drafts = markov_drafts(*one, *inputs(300)[2:], law, Streams(torch.arange(rows), torch.zeros(rows).long()))
    counts = np.bincount(drafts.token_ids[:, 0].numpy(), minlength=300)
    values, candidates = stripe_maxima(one[0][:1, 0])
    for factor, is_own in ((1.0, True), (0.9, False)):
        handed_on = law.take(torch.zeros(1, dtype=torch.int64))
        probs = (
            candidate_law(values, handed_on._replace(temperature=handed_on.temperature * factor))[0].double().numpy()
        )
        assert (p_value(counts[candidates[0].numpy()], probs) > 0.001) == is_own


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of Pearson's chi-squared, rare cells pooled; 0 where what cannot be was drawn."""
    if counts[probs == 0].any():
        return 0.0
    expected = counts.sum() * probs / probs.sum()
    is_rare = expected < 5
    cells = [(counts[~is_rare], expected[~is_rare]), ([counts[is_rare].sum()], [expected[is_rare].sum()])]
    observed, wanted = (np.concatenate(column) for column in zip(*cells, strict=True))
    return float(stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue)


def test_a_token_that_says_nothing_leaves_the_likeliest() -> None:
    logits, gates, successors, head = inputs(1000)
    likeliest = logits.argmax(dim=-1)
    assert torch.equal(markov_drafts(logits, gates, torch.zeros_like(successors), head).token_ids, likeliest)
    assert not torch.equal(markov_drafts(logits, gates, successors, head).token_ids, likeliest)


def test_of_equals_in_a_stripe_the_lowest_is_the_candidate() -> None:
    values, tokens = stripe_maxima(torch.zeros(2, 3 * STRIPES + 5))
    assert torch.equal(tokens[0], torch.arange(STRIPES))
    assert float(values.abs().max()) == 0
