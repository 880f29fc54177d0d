"""Wrong laws of the token that ends a row, each fitted like the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from equivtest.battery.evidence import ALL
from equivtest.battery.fits import FITS, TELLING_KINDS, most_likely
from equivtest.battery.judge import Judged
from equivtest.battery.laws import Floats, Ints
from equivtest.stats.law_table import LawTable
from equivtest.stats.sampler import draws

_LARGEST_VOCAB = 256
_FEWEST_ROWS = 400
_MOST_ROWS = 4000
"""Of a case, that are looked at; a case with fewer than the fewest says nothing."""


class Last(NamedTuple):
    """Rows of a case that end in a token of one kind, arrays [n]."""

    judged: Judged
    step: Ints
    row: Ints
    slot: Ints
    draft: Ints
    """At that slot, of a bonus at the last one."""
    token: Ints


Law = Callable[[Last], Floats]
"""Weights [n, vocab_size] that the tokens may have been drawn from."""


def explain_last(judged: Sequence[Judged], kind: str, *, one_hot: bool) -> str | None:
    """The wrong law of the recovered (or bonus) token that fits in all cases, in words; None where none does."""
    chosen = [
        _last(j, kind)
        for j in judged
        if j.case.one_hot == one_hot and j.case.kind in TELLING_KINDS and j.case.vocab_size <= _LARGEST_VOCAB
        and j.case.num_draft > 1
    ]  # fmt: skip
    last = [rows for rows in chosen if len(rows.row) >= _FEWEST_ROWS]
    right = _right_residual if kind == "recovered" else _target
    found = {}
    for words, law in (RECOVERED_LAWS if kind == "recovered" else BONUS_LAWS).items():
        fits = [_fit(rows, law, right) for rows in last]
        if any(fit is None or fit.differs for fit in fits):
            found[words] = [None if fit is None else fit.likelihood for fit in fits]
    return most_likely(found)


def _last(j: Judged, kind: str) -> Last:
    step, row = np.argwhere(j.recovered if kind == "recovered" else j.bonus)[:_MOST_ROWS].T
    slot = j.slot[step, row]
    draft = j.drafts[step, row, slot - (kind == "bonus")]
    return Last(j, step, row, slot, draft, j.last[step, row])


class _Fit(NamedTuple):
    likelihood: float
    """Its logarithm."""
    differs: bool
    """Whether it is not the right law."""


def _fit(last: Last, law: Law, right_law: Law) -> _Fit | None:
    """None where the law does not fit."""
    weights, right = law(last), right_law(last)
    # A law without mass says nothing: a sampler then does something else.
    possible = (weights.sum(axis=1) > 0) & (right.sum(axis=1) > 0)
    if possible.mean() < 0.9:
        return None
    weights, right = (w[possible] / w[possible].sum(axis=1, keepdims=True) for w in (weights, right))
    token, index = last.token[possible], np.arange(int(possible.sum()))
    if (weights[index, token] <= 0).any():
        return None
    coins = np.random.default_rng(0).random((2, len(token)))
    both = LawTable.of(weights).spread(index, token).transforms(coins)
    found = [draws(values, name="fit", stratum=ALL) for values in both]
    if any(item is not None and item.p_value < FITS for item in found):
        return None
    return _Fit(float(np.log(weights[index, token]).sum()), bool(np.abs(weights - right).max() > 1e-3))


def coin_of_the_decision(judged: Sequence[Judged], kind: str, *, one_hot: bool) -> bool:
    """Whether every last draw may have inverted its law at the coin of the last decision.

    A rejection says that this coin is above a, an acceptance that it is below.
    """
    possible = []
    for j in judged:
        if j.case.one_hot == one_hot and j.case.kind == "random" and j.case.num_draft > 1:
            there = j.recovered if kind == "recovered" else j.bonus
            slot = np.clip(j.slot - (kind == "bonus"), 0, j.case.num_draft - 1)
            a = np.take_along_axis(j.accept_prob, slot[..., None], 2)[..., 0][there]
            low, high = j.spread.low[there], (j.spread.low + j.spread.mass)[there]
            possible.append(high >= a - 1e-6 if kind == "recovered" else low <= a + 1e-6)
    return bool(possible) and bool(np.concatenate(possible).all())


def _target(last: Last, *, rows: int = 0, slots: int = 0) -> Floats:
    """p of a row of the batch and a slot so many further."""
    j = last.judged
    law = j.neighbour(rows)[last.step, last.row] if rows else last.row
    return j.laws.target[law, np.clip(last.slot + slots, 0, j.case.num_draft)].astype(np.float64)


def _draft(last: Last, *, rows: int = 0, slots: int = 0) -> Floats:
    """q likewise; a point mass at the row's own draft where drafts are one-hot."""
    j = last.judged
    if j.case.one_hot:
        point: Floats = (np.arange(j.case.vocab_size) == last.draft[:, None]).astype(np.float64)
        return point
    law = j.neighbour(rows)[last.step, last.row] if rows else last.row
    return j.laws.draft[law, np.clip(last.slot + slots, 0, j.case.num_draft - 1)].astype(np.float64)


def _residual(last: Last, *, rows: int = 0, slots: int = 0) -> Floats:
    return np.maximum(_target(last, rows=rows, slots=slots) - _draft(last, rows=rows, slots=slots), 0.0)


def _without_draft(last: Last) -> Floats:
    law = _target(last)
    law[np.arange(len(law)), last.draft] = 0.0
    return law


def _right_residual(last: Last) -> Floats:
    return _without_draft(last) if last.judged.case.one_hot else _residual(last)


def _mode(law: Floats) -> Floats:
    mode: Floats = (law == law.max(axis=1, keepdims=True)).astype(np.float64)
    return mode


def _sharpened(law: Floats) -> Floats:
    raised: Floats = law**2 / (law**2).sum(axis=1, keepdims=True)
    return raised


RECOVERED_LAWS: Mapping[str, Law] = {
    "recovered tokens are drawn from p, not from the residual max(p - q, 0)": _target,
    "recovered tokens are drawn from p without the rejected draft, not from the residual max(p - q, 0)": _without_draft,
    "recovered tokens are the most likely of the residual: nothing is drawn": lambda r: _mode(_right_residual(r)),
    "recovered tokens are drawn from q": _draft,
    "recovered tokens are drawn from max(q - p, 0): the difference is turned round": lambda r: np.maximum(
        _draft(r) - _target(r), 0.0
    ),
    "recovered tokens are drawn from |p - q|: what is negative is not cut off": lambda r: np.abs(
        _target(r) - _draft(r)
    ),
    "recovered tokens are drawn from the residual of the slot before": lambda r: _residual(r, slots=-1),
    "recovered tokens are drawn from the residual of the next slot": lambda r: _residual(r, slots=1),
    "recovered tokens are drawn from p of the next slot": lambda r: _target(r, slots=1),
    "recovered tokens are drawn from the residual of the row before": lambda r: _residual(r, rows=-1),
    "recovered tokens are drawn from the residual of the next row": lambda r: _residual(r, rows=1),
    "the residual is made of p and q sharpened once more (temperature 1/2)": lambda r: np.maximum(
        _sharpened(_target(r)) - _sharpened(_draft(r)), 0.0
    ),
}
"""What a recovered token may be drawn from instead of the residual, in words."""

BONUS_LAWS: Mapping[str, Law] = {
    "the bonus is drawn from the row before the last, one slot too early": lambda r: _target(r, slots=-1),
    "the bonus is drawn from row 0": lambda r: _target(r._replace(slot=np.zeros_like(r.slot))),
    "the bonus is the most likely token: nothing is drawn": lambda r: _mode(_target(r)),
    "the bonus is drawn from another request's law, that of the row before": lambda r: _target(r, rows=-1),
    "the bonus is drawn from another request's law, that of the next row": lambda r: _target(r, rows=1),
    "the bonus is drawn from the residual of the last slot": lambda r: _residual(r, slots=-1),
    "the bonus is drawn from p less q of the last slot": lambda r: np.maximum(_target(r) - _draft(r, slots=-1), 0.0),
    "the bonus is drawn from q of the last slot": lambda r: _draft(r, slots=-1),
    "the bonus is drawn from p sharpened once more (temperature 1/2)": lambda r: _sharpened(_target(r)),
}
"""What a bonus may be drawn from instead of row num_draft of p, in words."""
