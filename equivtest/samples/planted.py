"""A bias planted in samples that exist already: the teeth of engines that no fault can be put into."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def plant_likeliest(tokens: npt.NDArray[np.int32], epsilon: float, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """A copy of token ids [num_seeds, num_positions] of one law in which each token gives way, with probability
    epsilon, to the most frequent one of its position: what an acceptance that is too generous does to good drafts.

    The lowest id counts as the most frequent of several. Only the margins are those of a biased decoder: the tokens
    after a planted one are those that followed the other.
    """
    planted = tokens.copy()
    for position, column in enumerate(tokens.T):
        values, counts = np.unique(column, return_counts=True)
        planted[rng.random(len(column)) < epsilon, position] = values[counts.argmax()]
    return planted
