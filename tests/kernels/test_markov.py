"""Drafts that depend on the one before: the definition, spelled out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equivtest.kernels.markov import STRIPES, markov_drafts, stripe_maxima


def inputs(vocab_size: int, *, batch: int = 3, places: int = 4, hidden_size: int = 16) -> tuple[Tensor, ...]:
    """logits, gates, anchors, successors, head: what is said of a successor matters about as much as the logits."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(batch, places, vocab_size, generator=generator)
    gates = torch.rand(batch, places, hidden_size, generator=generator)
    anchors = torch.randint(vocab_size, (batch,), generator=generator)
    successors = torch.randn(vocab_size, hidden_size, generator=generator)
    return logits, gates, anchors, successors, torch.randn(vocab_size, hidden_size, generator=generator)


@pytest.mark.parametrize("vocab_size", [1, 97, STRIPES, 300, 1000])
def test_each_place_takes_the_best_candidate_behind_the_one_before(vocab_size: int) -> None:
    logits, gates, anchors, successors, head = inputs(vocab_size)
    drafts = markov_drafts(logits, gates, anchors, successors, head)
    for row, anchor in enumerate(anchors.tolist()):
        previous = anchor
        for place in range(logits.shape[1]):
            best = {}
            for token in range(vocab_size):
                stripe = token % STRIPES
                if stripe not in best or logits[row, place, token] > logits[row, place, best[stripe]]:
                    best[stripe] = token
            scores = {
                token: float(logits[row, place, token] + head[token] @ (gates[row, place] * successors[previous]))
                for token in best.values()
            }
            previous = max(scores, key=lambda token: scores[token])
            assert int(drafts[row, place]) == previous


def test_a_token_that_says_nothing_leaves_the_likeliest() -> None:
    logits, gates, anchors, successors, head = inputs(1000)
    likeliest = logits.argmax(dim=-1)
    assert torch.equal(markov_drafts(logits, gates, anchors, torch.zeros_like(successors), head), likeliest)
    assert not torch.equal(markov_drafts(logits, gates, anchors, successors, head), likeliest)


def test_of_equals_in_a_stripe_the_lowest_is_the_candidate() -> None:
    values, tokens = stripe_maxima(torch.zeros(2, 3 * STRIPES + 5))
    assert torch.equal(tokens[0], torch.arange(STRIPES))
    assert float(values.abs().max()) == 0
