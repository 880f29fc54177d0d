"""Finished samples with what the target's law said at each of their tokens: the input of the law family."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.records import Origin

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ORIGIN_CODES = {origin: code for code, origin in enumerate(Origin)}
"""Code of each origin in `ScoredTokens.origin`."""

_WHOLE = ("sample", "position", "token_id", "origin", "slot", "num_draft", "batch", "step", "batch_row", "group")
_UNIT = ("p_token", "pit_rank", "pit_vocab", "q_token", "q_mean")
_FLAGS = ("is_draft", "support_violation")
_AT_LEAST_ZERO = ("entropy", "var_surprisal", "q_variance")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTokens:
    """One entry per token, arrays [num_tokens]: the tokens of a sample side by side, position after position.

    With p the target's filtered law at the token's prefix, y the token, and q the law the draft was drawn from (a point
    mass at the draft of a greedy drafter). Where no draft was offered the three q columns are 0.
    """

    sample: Ints
    """Which sample; any distinct numbers."""
    position: Ints
    token_id: Ints
    origin: Ints
    """Index into records.Origin. Positions after the end of a text are no tokens; one of origin `ended` is the end of a
    text that its law does not have."""
    slot: Ints
    """Index in the draft block: 0..num_draft-1, num_draft for bonus, -1 for plain."""
    num_draft: Ints
    """Drafts offered in the round."""
    is_draft: Bools
    """The token equals the draft that was offered at it; False where none was."""
    batch: Ints
    """Which `generate` call; step and batch_row count within it."""
    step: Ints
    batch_row: Ints
    group: Ints
    """Samples of one group share prompt and parameters: they are drawn from one law over sequences."""
    p_token: Floats
    """p(y); 0 where a filter removes y."""
    pit_rank: Floats
    """Uniform on [0, 1] under H0: mass of the tokens above y in descending p, plus a random part of its ties' mass."""
    pit_vocab: Floats
    """Uniform on [0, 1] under H0: mass of the ids below y, plus a random part of its own mass."""
    entropy: Floats
    """Nats: mean of -ln p over p."""
    var_surprisal: Floats
    """Squared nats: variance of -ln p over p."""
    q_token: Floats
    """q(y)."""
    q_mean: Floats
    """Mean of q over p; p(draft) for a greedy drafter."""
    q_variance: Floats
    """Variance of q over p."""
    support_violation: Bools
    """p(y) = 0, beyond the scorer's tolerance at the cut."""
    logprob: Floats | None = None
    """Nats, as the engine reported it: NaN where it reported none, -inf where what it reported is no finite number.
    None where it reported none at all."""

    def __post_init__(self) -> None:
        for name, values in self._columns().items():
            kind = np.bool_ if name in _FLAGS else np.int64 if name in _WHOLE else np.float64
            object.__setattr__(self, name, np.asarray(values).astype(kind, copy=False))
        columns = self._columns()
        if self.sample.ndim != 1 or any(values.shape != self.sample.shape for values in columns.values()):
            shapes = {name: values.shape for name, values in columns.items()}
            raise InvalidSetting("ScoredTokens", shapes, "must be flat arrays of one length")
        if not len(self.sample):
            raise InsufficientSamples("law family (tokens)", 0, 1)
        for name in _UNIT:
            _require(name, getattr(self, name), 0.0, 1.0)
        for name in _AT_LEAST_ZERO:
            _require(name, getattr(self, name), 0.0, np.inf)
        _require("origin", self.origin, 0, len(ORIGIN_CODES) - 1)
        _require("token_id", self.token_id, 0, np.inf)
        inside = self.continues
        follows = np.diff(self.position, prepend=self.position[0] - 1) == 1
        if (inside & ~follows).any():
            raise InvalidSetting("position", int(np.argmax(inside & ~follows)), "must rise by 1 within a sample")
        in_order = (self.sample[1:] >= self.sample[:-1]).all()
        if not in_order and len(np.unique(self.sample)) != int((~inside).sum()):
            raise InvalidSetting("sample", "scattered", "the tokens of a sample must stand side by side")

    @property
    def num_tokens(self) -> int:
        return len(self.sample)

    @property
    def continues(self) -> Bools:
        """Whether the entry before is the token before, of the same sample."""
        return np.concatenate([[False], self.sample[1:] == self.sample[:-1]])

    @property
    def has_draft(self) -> Bools:
        """Whether a draft was offered for this very token: slots 0..num_draft-1."""
        return np.asarray((self.slot >= 0) & (self.slot < self.num_draft))

    @property
    def is_bonus_slot(self) -> Bools:
        """Whether every draft of the round was accepted before this token."""
        return np.asarray((self.num_draft > 0) & (self.slot == self.num_draft))

    def take(self, chosen: Bools) -> ScoredTokens:
        """The chosen tokens (bool [num_tokens]); whole samples, or leading parts of them."""
        return ScoredTokens(**{name: values[chosen] for name, values in self._columns().items()})

    def _columns(self) -> dict[str, Any]:
        """The columns that are there, by name."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: values for name, values in columns.items() if values is not None}


def _require(name: str, values: Floats | Ints, low: float, high: float) -> None:
    if low <= values.min() and values.max() <= high and np.isfinite(values.max()):  # the least of NaN is NaN
        return
    wrong = ~((values >= low) & (values <= high) & np.isfinite(values))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise InvalidSetting(f"{name}[{index}]", values[index].item(), f"must be finite and in [{low}, {high}]")
