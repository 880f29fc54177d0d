"""Synthetic laws over tokens and samples from them, shared by the statistics tests."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Tokens = list[npt.NDArray[np.int64]]


def realistic_laws(num_cells: int, rng: np.random.Generator, vocab: int = 120) -> Floats:
    """[num_cells, vocab]: power laws of many slopes, two in five with one dominant token, as decoding shows them."""
    laws = (1.0 + np.arange(vocab)) ** -rng.uniform(0.6, 3.0, (num_cells, 1))
    laws[:, 0] += np.where(rng.random(num_cells) < 0.4, rng.uniform(1, 10, num_cells), 0.0)
    return laws / laws.sum(axis=1, keepdims=True)


def towards_the_mode(laws: Floats, epsilon: float) -> Floats:
    """What accepting the most likely token with probability min(1, p + epsilon) makes of each law."""
    mode = laws.argmax(axis=1)
    rows = np.arange(len(laws))
    accepted = np.minimum(1.0, laws[rows, mode] + epsilon)
    residual = laws.copy()
    residual[rows, mode] = 0.0
    left = residual.sum(axis=1, keepdims=True)
    biased = residual * np.divide((1 - accepted)[:, None], left, out=np.zeros_like(left), where=left > 0)
    biased[rows, mode] = accepted
    return biased


def draw(laws: Floats, num_samples: int, rng: np.random.Generator) -> Tokens:
    """One array of num_samples token ids a cell."""
    cumulative = laws.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    return [np.searchsorted(row, rng.random(num_samples), side="right") for row in cumulative]
