"""How many drafts a step should offer: more drafts give more tokens a step and make the step dearer.

A step of `batch` requests verifies batch * (K + 1) rows. With few requests those rows are nearly free; with many, each
costs, and drafts that are seldom accepted no longer pay. The best K follows from how often the draft of each slot is
accepted and from what a step costs, both measured before a run: the length is then constant, and nothing that is drawn
in the run can reach it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting
from equivtest.records import Generation, Origin

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step costs, in seconds, from measurements: linear between them, and past the last one at its slope."""

    verify_s: tuple[tuple[int, float], ...]
    """(rows of the forward, seconds of a step without drafting), rows rising; from the smallest batch on."""
    draft_s: tuple[tuple[int, float], ...] = ((1, 0.0),)
    """(requests drafted for, seconds of proposing a block), requests rising."""

    def __post_init__(self) -> None:
        for name, points in (("verify_s", self.verify_s), ("draft_s", self.draft_s)):
            sizes, seconds = [size for size, _ in points], [second for _, second in points]
            if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
                raise InvalidSetting(name, points, "needs sizes that rise from 1 or more")
            if not all(0 <= second < np.inf for second in seconds):
                raise InvalidSetting(name, points, "needs finite seconds of at least 0")

    def of(self, batch: int, num_draft: int) -> float:
        """Seconds of a step of `batch` requests with `num_draft` drafts each; without drafts nothing is proposed."""
        verify = _interpolated(self.verify_s, batch * (num_draft + 1))
        return verify + (_interpolated(self.draft_s, batch) if num_draft else 0.0)


class DraftLength(NamedTuple):
    """A choice and what it is expected to give."""

    num_draft: int
    tokens: float
    """Expected tokens of a request in one step, the one after the accepted drafts included."""
    token_s: float
    """Expected seconds of a request's token."""


def best_draft_length(acceptance: Sequence[float], cost: StepCost, batch: int) -> DraftLength:
    """The length in 0..len(acceptance) with the least time a token; the shortest of equals.

    acceptance[k]: probability that the draft of slot k is accepted where those before it are, as `acceptance_by_slot`
    estimates it. A step with K drafts puts out 1 + sum over k < K of acceptance[0] * ... * acceptance[k] tokens
    (Leviathan et al. 2023, equation 1, with a probability of its own for each slot). Raises InvalidSetting.
    """
    rates = np.asarray(acceptance, np.float64)
    if rates.ndim != 1 or not ((rates >= 0) & (rates <= 1)).all():
        raise InvalidSetting("acceptance", list(acceptance), "needs probabilities, one a slot")
    if batch < 1:
        raise InvalidSetting("batch", batch, "must be at least 1")
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(rates))])
    token_s = np.array([cost.of(batch, num_draft) for num_draft in range(len(tokens))]) / tokens
    best = int(token_s.argmin())
    return DraftLength(best, float(tokens[best]), float(token_s[best]))


def acceptance_by_slot(generations: Iterable[Generation], num_slots: int, *, prior: float = 1.0) -> Float64Array:
    """[num_slots], how often the draft of each slot was accepted among those that were reached: all drafts before it
    accepted, and one offered.

    prior: rejections that are added to each slot, so that a slot hardly ever reached does not look sure.
    """
    # A round ends with one token that is no accepted draft: at the slot of a rejected one, or behind them all.
    accepted, rejected = np.zeros(num_slots), np.zeros(num_slots)
    for generation in generations:
        for origin, counts in ((Origin.ACCEPTED, accepted), (Origin.RECOVERED, rejected)):
            slots = generation.slots[[one is origin for one in generation.origins]]
            counts += np.bincount(slots[slots < num_slots], minlength=num_slots)
    return accepted / np.maximum(accepted + rejected + prior, np.finfo(float).tiny)


def _interpolated(points: Sequence[tuple[int, float]], size: int) -> float:
    sizes, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
    if size <= sizes[-1] or len(sizes) == 1:
        return float(np.interp(size, sizes, seconds))
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return float(seconds[-1] + max(slope, 0.0) * (size - sizes[-1]))
