"""Probability integral transforms of draws from tabulated laws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Spread(NamedTuple):
    """Intervals of the two distribution functions that tokens [n] fill."""

    low: Floats
    """In vocabulary order: mass of the ids below."""
    mass: Floats
    above: Floats
    """In rank order: mass of what is more likely."""
    ties: Floats

    def transforms(self, coins: Floats) -> tuple[Floats, Floats]:
        """Uniform where the tokens are draws: in vocabulary order, in rank order. coins: [2, n] uniforms."""
        vocabulary, rank = self.low + coins[0] * self.mass, self.above + coins[1] * self.ties
        return np.clip(vocabulary, 0.0, 1.0), np.clip(rank, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawTable:
    """Laws over a vocabulary, each with its two distribution functions: arrays [num_laws, vocab_size]."""

    probs: Floats
    below: Floats
    """Mass of the ids below."""
    above: Floats
    """Mass of what is more likely."""
    ties: Floats
    """Mass of what is as likely, the token itself included."""

    @classmethod
    def of(cls, weights: npt.NDArray[np.floating]) -> LawTable:
        """weights [num_laws, vocab_size], at least 0, no row without mass; made to sum to 1 in float64."""
        probs = weights.astype(np.float64)
        probs /= probs.sum(axis=1, keepdims=True)
        order = np.argsort(-probs, axis=1, kind="stable")
        falling = np.take_along_axis(probs, order, axis=1)
        through = falling.cumsum(axis=1)
        place = np.arange(probs.shape[1])
        opens = np.ones(probs.shape, np.bool_)
        opens[:, 1:] = falling[:, 1:] < falling[:, :-1]
        first = np.maximum.accumulate(np.where(opens, place, 0), axis=1)
        closes = np.ones(probs.shape, np.bool_)
        closes[:, :-1] = opens[:, 1:]
        last = np.minimum.accumulate(np.where(closes, place, len(place))[:, ::-1], axis=1)[:, ::-1]
        above, ties = np.empty_like(probs), np.empty_like(probs)
        start = np.take_along_axis(through - falling, first, axis=1)
        np.put_along_axis(above, order, start, axis=1)
        np.put_along_axis(ties, order, np.take_along_axis(through, last, axis=1) - start, axis=1)
        return cls(probs=probs, below=probs.cumsum(axis=1) - probs, above=above, ties=ties)

    def spread(self, law: Ints, token: Ints, without: Ints | None = None) -> Spread:
        """Where the mass of tokens [n] lies, token i under law[i].

        without: [n] tokens whose mass is taken out of the law first, which must leave some.
        """
        mass = self.probs[law, token]
        below, above, ties = self.below[law, token], self.above[law, token], self.ties[law, token]
        if without is None:
            return Spread(below, mass, above, ties)
        gone = self.probs[law, without]
        below = below - np.where(without < token, gone, 0.0)
        above = above - np.where(gone > mass, gone, 0.0)
        ties = ties - np.where(gone == mass, gone, 0.0)
        return Spread(*(column / (1 - gone) for column in (below, mass, above, ties)))
