"""A synthetic speculative decoder whose law depends on the prefix, shared by the tests of whole samples."""

import numpy as np
import numpy.typing as npt

from tests.stats.laws import Floats, realistic_laws

Tokens = npt.NDArray[np.int64]


def prefix_laws(num_positions: int, rng: np.random.Generator, *, vocab: int = 40, shift: float = 0.5) -> Floats:
    """[position, previous token, token]: every position has its own law, which the previous token shifts by `shift`
    in log-probability; a large shift gives every context a mode of its own."""
    shared = rng.permuted(realistic_laws(num_positions, rng, vocab=vocab), axis=1)[:, None]
    laws = shared * np.exp(rng.normal(scale=shift, size=(num_positions, vocab, vocab)))
    return laws / laws.sum(axis=-1, keepdims=True)


def draw_rows(laws: Floats, rng: np.random.Generator) -> Tokens:
    """[n, vocab] -> [n]"""
    cumulative = laws.cumsum(axis=1)
    return (rng.random((len(laws), 1)) * cumulative[:, -1:] > cumulative).sum(axis=1)


def plain(laws: Floats, num_samples: int, rng: np.random.Generator) -> Tokens:
    """[num_samples, position]: every token drawn from the target."""
    return speculative(laws, num_samples, rng, num_drafts=0)


def speculative(
    laws: Floats, num_samples: int, rng: np.random.Generator, *, epsilon: float = 0.0, num_drafts: int = 4
) -> Tokens:
    """[num_samples, position]: blocks of num_drafts drafts, each the argmax, kept with probability min(1, p + epsilon).

    The first rejection draws from the rest of p and ends the block; a block kept whole adds a bonus token.
    """
    tokens = np.empty((num_samples, len(laws)), np.int64)
    previous, slot = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.int64)
    rows = np.arange(num_samples)
    for position, by_previous in enumerate(laws):
        law = by_previous[previous]
        drawn, draft = draw_rows(law, rng), law.argmax(axis=1)
        residual = law.copy()
        residual[rows, draft] = 0.0
        recovered = draw_rows(residual, rng)
        accepted = rng.random(num_samples) < np.minimum(1.0, law[rows, draft] + epsilon)
        bonus = slot == num_drafts
        tokens[:, position] = previous = np.where(bonus, drawn, np.where(accepted, draft, recovered))
        slot = np.where(bonus | ~accepted, 0, slot + 1)
    return tokens


def coupled(laws: Floats, num_samples: int, rng: np.random.Generator, *, coupling: float) -> Tokens:
    """[num_samples, position] of laws [position, token]: odd positions reuse the coin of the position before with
    probability `coupling`. Every position keeps its marginal law exactly; only neighbours depend on each other."""
    coins = rng.random((num_samples, len(laws)))
    reused = rng.random((num_samples, len(laws) // 2)) < coupling
    coins[:, 1::2] = np.where(reused, coins[:, 0::2][:, : reused.shape[1]], coins[:, 1::2])
    cumulative = laws.cumsum(axis=1)
    return np.stack(
        [np.searchsorted(row / row[-1], coin, side="right") for row, coin in zip(cumulative, coins.T, strict=True)],
        axis=1,
    )
