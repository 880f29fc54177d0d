"""What no right sampler does, whatever its coins: ids, padding, counts, and tokens of probability 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equivtest.battery.laws import Ints
from equivtest.battery.play import Played
from equivtest.kernels.contract import PADDING

Bools = npt.NDArray[np.bool_]


_SHAPES = frozenset({"ids", "empty", "no_bonus", "padding", "past_rejection", "tail"})
"""Breaches after which other findings may say no more than that: too many rows cannot be read."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that some rows of a case break."""

    name: str
    stage: str
    what: str
    """What the rows do."""
    count: int
    of: int
    where: str
    """The case, and the first such row."""

    @property
    def unreadable(self) -> bool:
        """Whether what the tests see is no longer what the sampler was to do: rows left out, or laws changed."""
        return self.name in _SHAPES or self.name.startswith("changed_")


class Rows(NamedTuple):
    """How the rows of a case [T, B] are to be read."""

    ok: Bools
    """Accepted drafts, one token, padding."""
    slot: Ints
    """Index of the token that ends the row; the number of accepted drafts."""


def read_rows(played: Played) -> tuple[Rows, list[Breach]]:
    """The rows, and what is wrong with their shape."""
    tokens, num_draft = played.tokens, played.laws.num_draft.astype(np.int64)
    places = np.arange(tokens.shape[2])
    filled = tokens != PADDING
    outside = (tokens < PADDING) | (tokens >= played.case.vocab_size)
    length = np.where(filled.all(axis=2), tokens.shape[2], filled.argmin(axis=2))
    matches = (tokens[:, :, :-1] == played.drafts) & (places[:-1] < num_draft[None, :, None])
    prefix = matches.cumprod(axis=2).sum(axis=2)
    beyond = filled & (places > prefix[..., None])
    rows_outside, empty, longer = outside.any(axis=2), length == 0, beyond.any(axis=2)
    complete = (length == num_draft + 1) & (num_draft > 0)
    # Without a single bonus, rows that end with their last draft lack it; else that draft was put out as recovered.
    no_bonus = (length == num_draft) & (prefix == num_draft) & (num_draft > 0) & ~complete.any()
    # All tokens are drafts that the sampler says it accepted: what should end the row is missing.
    unended = np.zeros_like(empty)
    if played.emitted is not None:
        unended = (length == prefix) & (length < num_draft) & (played.emitted == length) & ~(empty | longer)
    ok = ~(rows_outside | empty | longer | no_bonus | unended)
    breaches = [
        *_breach(played, "ids", "contract", f"put out ids outside 0..{played.case.vocab_size - 1}", rows_outside),
        *_breach(played, "empty", "contract", "put out no token", empty & ~rows_outside),
        *_breach(played, *_what_follows(played, beyond), longer & ~rows_outside & ~empty),
        *_breach(played, "no_bonus", "bonus", "accept every draft and put out no bonus token", no_bonus),
        *_breach(
            played,
            "unended",
            "recover",
            "end with their accepted drafts: no token takes the place of the rejected "
            "one, as where rounding leaves the residual max(p - q, 0) empty",
            unended & ~rows_outside,
        ),
        *_counts(played, ok, length - 1),
    ]
    return Rows(ok, np.maximum(length - 1, 0)), breaches


def _what_follows(played: Played, beyond: Bools) -> tuple[str, str, str]:
    """Name, stage and words for tokens that come after the one that should end the row."""
    values = played.tokens[beyond]
    at_draft = beyond[:, :, :-1]
    kept = (played.tokens[:, :, :-1] == played.drafts) & at_draft
    if len(values) and (values == values[0]).all():
        return "padding", "contract", f"are padded with {values[0]}, which must be {PADDING}"
    if at_draft.any() and kept.sum() > 0.5 * at_draft.sum():
        return (
            "past_rejection",
            "accept",
            "put out a draft at a slot behind a rejected one: a slot is accepted independently of earlier rejections",
        )
    return "tail", "contract", "put out more tokens behind the one that ends the row"


def _counts(played: Played, ok: Bools, emitted: Ints) -> Iterator[Breach]:
    if played.emitted is not None:
        wrong = ok & (played.emitted != emitted)
        excess = played.emitted - emitted
        what = "report a number of accepted drafts that is not that of the row"
        if wrong.any() and (excess[ok] == 1).all():
            what = "count the token that ends the row among the accepted drafts"
        elif wrong.any() and (excess[ok] >= 0).all():
            what = "count drafts past the first rejection: this is telemetry, nothing to commit on"
        yield from _breach(played, "count", "count", what, wrong)
        if played.telemetry is not None:
            low = ok & (played.telemetry < played.emitted)
            yield from _breach(played, "telemetry", "count", "report less telemetry than accepted drafts", low)


def impossible(
    played: Played, rows: Rows, accept_prob: npt.NDArray[np.float64], reached: Bools, accepted: Bools
) -> list[Breach]:
    """Outcomes of probability 0. accept_prob, reached and accepted are [T, B, K]."""
    laws, case = played.laws, played.case
    p_drafts = np.take_along_axis(laws.target[None, :, :-1], played.drafts[..., None], 3)[..., 0]
    batch = np.arange(case.batch)[None, :]
    last = np.take_along_axis(played.tokens, rows.slot[..., None], 2)[..., 0].clip(0, case.vocab_size - 1)
    recovered = rows.ok & (rows.slot < laws.num_draft)
    p_last = laws.target[batch, rows.slot, last]
    slot = np.minimum(rows.slot, case.num_draft - 1)
    drafts = np.take_along_axis(played.drafts, slot[..., None], 2)[..., 0]
    is_draft = recovered & (last == drafts)
    removed = recovered & ~is_draft & (p_last == 0)
    q_last = np.zeros_like(p_last) if case.one_hot else laws.draft[batch, slot, last]
    spare = np.maximum(laws.target[:, :-1] - laws.draft, 0).sum(axis=2)[batch, slot] > 0
    no_residual = recovered & ~is_draft & ~removed & (q_last >= p_last) & (case.one_hot | spare)
    off_law = rows.ok & ~recovered & (p_last == 0)
    refused = (reached & ~accepted & (accept_prob >= 1)).any(axis=2)
    return [
        *_breach(played, "accepted_zero", "accept", "accept a draft of target probability 0",
                 (accepted & (p_drafts == 0) & reached).any(axis=2)),
        *_breach(played, "rejected_sure", "accept", "reject a draft whose target probability is at least q", refused),
        *_breach(played, "recovered_draft", "recover", "put out the very draft that was rejected", is_draft & ~refused),
        *_breach(played, "recovered_zero", "recover", "recover a token of target probability 0", removed),
        *_breach(played, "recovered_residual", "recover", "recover a token that the residual max(p - q, 0) lacks",
                 no_residual & ~refused),
        *_breach(played, "bonus_zero", "bonus", "draw a bonus token of target probability 0", off_law),
    ]  # fmt: skip


def inputs(played: Played) -> list[Breach]:
    """What the sampler was handed and changed."""
    return [
        Breach(f"changed_{name}", "contract", f"change {name} in place", played.case.rounds, played.case.rounds,
               played.case.name)
        for name in played.changed
    ]  # fmt: skip


def _breach(played: Played, name: str, stage: str, what: str, wrong: npt.ArrayLike) -> Iterator[Breach]:
    wrong = np.asarray(wrong)
    if wrong.any():
        step, row = (int(index) for index in np.argwhere(wrong)[0])
        shown = f"round {step}, row {row}: drafts {played.drafts[step, row]}, output {played.tokens[step, row]}"
        yield Breach(name, stage, what, int(wrong.sum()), wrong.size, f"{played.case.name}; {shown}")
