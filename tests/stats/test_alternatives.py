"""The gain in likelihood of another law, and its fit, on laws that are known."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.errors import InsufficientSamples
from equivtest.records import Evidence
from equivtest.stats.alternatives import MIN_ROWS, likelihood_gain

VOCAB = 40


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def line(rng: np.random.Generator, drawn_at: float, *, count: int = 2000, cut: bool = False) -> Evidence:
    """Tokens drawn at one temperature; their own law is at .8, the alternative at 1, if cut without rare tokens."""
    logits = 2 * rng.standard_normal((count, VOCAB))
    law, alternative, drawn = (softmax(logits / temperature) for temperature in (0.8, 1.0, drawn_at))
    if cut:
        alternative = np.where(alternative < 0.01, 0.0, alternative)
        alternative /= alternative.sum(axis=1, keepdims=True)
    tokens = (drawn.cumsum(axis=1) > rng.random((count, 1))).argmax(axis=1)
    rows = np.arange(count)
    surprisal = -np.log(np.where(alternative > 0, alternative, 1.0))
    entropy = (alternative * surprisal).sum(axis=1)
    p_token = alternative[rows, tokens]
    return likelihood_gain(
        "warmer",
        "draft",
        p_law=law[rows, tokens],
        p_token=p_token,
        entropy=entropy,
        var_surprisal=(alternative * surprisal**2).sum(axis=1) - entropy**2,
        off_support=p_token == 0,
        vocab_size=VOCAB,
    )


def test_the_law_that_drew_the_tokens_gains_and_fits() -> None:
    """Of 200 fits at level .01, at most 8 fail: a right one does with probability below 1e-3."""
    rng = np.random.default_rng(3)
    lines = [line(rng, 1.0) for _ in range(200)]
    assert min(one.statistic for one in lines) > 15
    assert sum(one.p_value < 0.01 for one in lines) <= 8


def test_a_law_that_did_not_loses() -> None:
    rng = np.random.default_rng(4)
    lines = [line(rng, 0.8) for _ in range(50)]
    assert max(one.statistic for one in lines) < 0
    assert max(one.p_value for one in lines) < 1e-3


def test_a_law_without_the_tokens_does_not_fit() -> None:
    one = line(np.random.default_rng(5), 1.0, cut=True)
    assert one.p_value == 0
    assert np.isfinite(one.statistic)


def test_few_rows_say_nothing() -> None:
    with pytest.raises(InsufficientSamples, match="alternative/warmer"):
        line(np.random.default_rng(6), 1.0, count=MIN_ROWS - 1)
