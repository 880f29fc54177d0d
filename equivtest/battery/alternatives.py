"""Which known mistake explains what was seen: wrong rules, each fitted like the right one.

A mistake is named only where it fits: what it makes impossible did not happen, and the tests that the right rule failed
do not fail under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from equivtest.battery.evidence import ALL
from equivtest.battery.judge import Judged, at_drafts
from equivtest.battery.laws import Float32s, Floats, Ints
from equivtest.stats.law_table import LawTable
from equivtest.stats.sampler import acceptance, draws

FITS = 1e-4
"""p-value above which a wrong rule fits."""
_MOST_Z = 4.0
"""Largest z of a wrong rule in the direction of the right one at which it fits."""
_LARGEST_VOCAB = 256
_FEWEST_ROWS = 400
_MOST_ROWS = 4000
"""Of a case, that are looked at for wrong laws of the last token; a case with fewer than the fewest says nothing."""
_KINDS = ("random", "peaked", "filtered")
"""Cases on which mistakes look different from each other."""

Rule = Callable[[Judged], Floats]


def explain_acceptance(judged: Sequence[Judged], *, one_hot: bool) -> str | None:
    """The wrong rule of acceptance that fits the decisions of all cases, in words; None where none does."""
    chosen = [j for j in judged if j.case.one_hot == one_hot and j.case.kind in _KINDS and j.case.num_draft > 1]
    found = {words: [_acceptance_fit(j, rule(j)) for j in chosen] for words, rule in ACCEPTANCE_RULES.items()}
    return _most_likely({words: fits for words, fits in found.items() if _differs(chosen, ACCEPTANCE_RULES[words])})


def _most_likely(found: Mapping[str, Sequence[float | None]]) -> str | None:
    """The rule that fits everywhere (a log-likelihood is there) and is the most likely of them."""
    likely = {words: sum(fits) for words, fits in found.items() if fits and None not in fits}  # type: ignore[arg-type]
    return max(likely, key=lambda words: likely[words]) if likely else None


def _acceptance_fit(j: Judged, accept_prob: Floats) -> float | None:
    """Log-likelihood of a rule, None where it does not fit."""
    a, kept = np.clip(accept_prob, 0, 1)[j.reached], j.accepted[j.reached]
    happened = np.where(kept, a, 1 - a)
    if (happened <= 0).any():
        return None
    found = acceptance(kept, a, name="fit", stratum=ALL)
    right = j.accept_prob[j.reached]
    # In the direction of the right rule as well: a wrong one must not only be right on average.
    spread = float(((right - a) ** 2 * a * (1 - a)).sum())
    z = float(((right - a) * (kept - a)).sum()) / np.sqrt(spread) if spread else 0.0
    if (found is not None and found.p_value < FITS) or abs(z) > _MOST_Z:
        return None
    return float(np.log(happened).sum())


def _differs(judged: Sequence[Judged], rule: Rule) -> bool:
    return any(np.abs(rule(j) - j.accept_prob)[j.reached].max(initial=0) > 1e-3 for j in judged)


def _ratio(p: Floats, q: Floats) -> Floats:
    return np.where(p >= q, 1.0, p / np.where(q > 0, q, 1.0)) * (p > 0)


def _p(j: Judged) -> Floats:
    return at_drafts(j.laws.target[:, :-1], j.drafts)


def _q(j: Judged) -> Floats:
    return np.ones(j.drafts.shape) if j.case.one_hot else at_drafts(j.laws.draft, j.drafts)


def _moved(j: Judged, slots: int, rows: int) -> Floats:
    """p of another slot or another row of the batch, at the drafts."""
    target = np.roll(j.laws.target, rows, axis=0)
    places = np.clip(np.arange(j.case.num_draft) + slots, 0, j.case.num_draft)
    return at_drafts(target[:, places], j.drafts)


def _moved_q(j: Judged, slots: int, rows: int) -> Floats:
    if j.case.one_hot:
        return _q(j)
    places = np.clip(np.arange(j.case.num_draft) + slots, 0, j.case.num_draft - 1)
    return at_drafts(np.roll(j.laws.draft, rows, axis=0)[:, places], j.drafts)


def _sharpened(law: Float32s, power: float) -> Floats:
    raised: Floats = law.astype(np.float64) ** power
    raised /= raised.sum(axis=2, keepdims=True)
    return raised


def _power(power: float) -> Rule:
    def rule(j: Judged) -> Floats:
        p = at_drafts(_sharpened(j.laws.target[:, :-1], power), j.drafts)
        return _ratio(p, _q(j) if j.case.one_hot else at_drafts(_sharpened(j.laws.draft, power), j.drafts))

    return rule


def _one_coin(j: Judged) -> Floats:
    smallest = np.minimum.accumulate(j.accept_prob, axis=2)
    result = j.accept_prob.copy()
    result[..., 1:] = np.minimum(1, j.accept_prob[..., 1:] / np.maximum(smallest[..., :-1], 1e-300))
    return result


ACCEPTANCE_RULES: Mapping[str, Rule] = {
    "every draft is accepted": lambda j: np.ones(j.drafts.shape),
    "every draft that is possible at all is accepted, as with a coin that is always 0": lambda j: (_p(j) > 0).astype(
        np.float64
    ),
    "a draft is accepted if p is at least q, without a coin": lambda j: (_p(j) >= _q(j)).astype(np.float64),
    "drafts are accepted with probability p, as if q were a point mass (right with a recovery from p without the "
    "draft, but q would let more drafts through)": _p,
    "drafts are accepted with probability 1 - p/q: the comparison is turned round": lambda j: 1 - j.accept_prob,
    "drafts are accepted with probability min(1, q/p): the ratio is upside down": lambda j: _ratio(_q(j), _p(j)),
    "one coin serves all slots of a row": _one_coin,
    "p is read one slot too far": lambda j: _ratio(_moved(j, 1, 0), _q(j)),
    "p is read one slot too early": lambda j: _ratio(_moved(j, -1, 0), _q(j)),
    "q is read one slot too far": lambda j: _ratio(_p(j), _moved_q(j, 1, 0)),
    "q is read one slot too early": lambda j: _ratio(_p(j), _moved_q(j, -1, 0)),
    "p is that of the row before": lambda j: _ratio(_moved(j, 0, 1), _q(j)),
    "p is that of the next row": lambda j: _ratio(_moved(j, 0, -1), _q(j)),
    "q is that of the row before": lambda j: _ratio(_p(j), _moved_q(j, 0, 1)),
    "q is that of the next row": lambda j: _ratio(_p(j), _moved_q(j, 0, -1)),
    "the ratio is of p and q sharpened once more (temperature 1/2)": _power(2.0),
    "the ratio is of p and q flattened once more (temperature 2)": _power(0.5),
}
"""What may be done instead of accepting with min(1, p/q), in words."""


Law = Callable[[Judged, Ints, Ints, Ints], Floats]
"""(judged, row, slot, draft), each [n] -> weights [n, vocab_size]."""


def explain_last(judged: Sequence[Judged], kind: str, *, one_hot: bool) -> str | None:
    """The wrong law of the recovered (or bonus) token that fits in all cases, in words; None where none does."""
    chosen = [
        j
        for j in judged
        if j.case.one_hot == one_hot and j.case.kind in _KINDS and j.case.vocab_size <= _LARGEST_VOCAB
        and j.case.num_draft > 1
    ]  # fmt: skip
    rules = RECOVERED_LAWS if kind == "recovered" else BONUS_LAWS
    last = [rows for rows in (_last_rows(j, kind) for j in chosen) if len(rows.row) >= _FEWEST_ROWS]
    right = _right_residual if kind == "recovered" else _right_bonus
    found = {}
    for words, law in rules.items():
        fits = [_law_fit(rows, law, right) for rows in last]
        if any(fit is None or fit.differs for fit in fits):
            found[words] = [None if fit is None else fit.likelihood for fit in fits]
    return _most_likely(found)


class _LastRows(NamedTuple):
    """Rows that end in a token of one kind, arrays [n]."""

    judged: Judged
    row: Ints
    slot: Ints
    draft: Ints
    token: Ints


def _last_rows(j: Judged, kind: str) -> _LastRows:
    where = np.argwhere(j.recovered if kind == "recovered" else j.bonus)[:_MOST_ROWS]
    step, row = where.T
    slot = j.slot[step, row]
    draft = j.drafts[step, row, np.minimum(slot, j.case.num_draft - 1)]
    return _LastRows(j, row, slot, draft, j.last[step, row])


class _LawFit(NamedTuple):
    likelihood: float
    """Its logarithm."""
    differs: bool
    """Whether it is not the right law."""


def _law_fit(rows: _LastRows, law: Law, right_law: Law) -> _LawFit | None:
    """None where the law does not fit."""
    weights, right = (made(rows.judged, rows.row, rows.slot, rows.draft) for made in (law, right_law))
    # A law without mass says nothing: a sampler then does something else.
    possible = (weights.sum(axis=1) > 0) & (right.sum(axis=1) > 0)
    if possible.mean() < 0.9:
        return None
    weights, right = (w[possible] / w[possible].sum(axis=1, keepdims=True) for w in (weights, right))
    token, index = rows.token[possible], np.arange(int(possible.sum()))
    if (weights[index, token] <= 0).any():
        return None
    coins = np.random.default_rng(0).random((2, len(token)))
    both = LawTable.of(weights).spread(index, token).transforms(coins)
    found = [draws(values, name="fit", stratum=ALL) for values in both]
    if any(item is not None and item.p_value < FITS for item in found):
        return None
    return _LawFit(float(np.log(weights[index, token]).sum()), bool(np.abs(weights - right).max() > 1e-3))


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


def _point(vocab_size: int, ids: Ints) -> Floats:
    point: Floats = (np.arange(vocab_size) == ids[:, None]).astype(np.float64)
    return point


def _target(j: Judged, row: Ints, slot: Ints, *, rows: int = 0, slots: int = 0) -> Floats:
    place = np.clip(slot + slots, 0, j.case.num_draft)
    return j.laws.target[(row + rows) % j.case.batch, place].astype(np.float64)


def _q_law(j: Judged, row: Ints, slot: Ints, draft: Ints, *, rows: int = 0, slots: int = 0) -> Floats:
    if j.case.one_hot:
        return _point(j.case.vocab_size, draft)
    place = np.clip(slot + slots, 0, j.case.num_draft - 1)
    return j.laws.draft[(row + rows) % j.case.batch, place].astype(np.float64)


def _without(law: Floats, draft: Ints) -> Floats:
    law = law.copy()
    law[np.arange(len(law)), draft] = 0.0
    return law


def _residual(j: Judged, row: Ints, slot: Ints, draft: Ints, **moved: int) -> Floats:
    return np.maximum(_target(j, row, slot, **moved) - _q_law(j, row, slot, draft, **moved), 0.0)


def _right_residual(j: Judged, row: Ints, slot: Ints, draft: Ints) -> Floats:
    return _without(_target(j, row, slot), draft) if j.case.one_hot else _residual(j, row, slot, draft)


def _right_bonus(j: Judged, row: Ints, slot: Ints, draft: Ints) -> Floats:
    return _target(j, row, slot)


def _mode(law: Floats) -> Floats:
    mode: Floats = (law == law.max(axis=1, keepdims=True)).astype(np.float64)
    return mode


RECOVERED_LAWS: Mapping[str, Law] = {
    "recovered tokens are drawn from p, not from the residual max(p - q, 0)": lambda j, r, s, d: _target(j, r, s),
    "recovered tokens are drawn from p without the rejected draft, not from the residual max(p - q, 0)": (
        lambda j, r, s, d: _without(_target(j, r, s), d)
    ),
    "recovered tokens are the most likely of the residual: nothing is drawn": lambda j, r, s, d: _mode(
        _residual(j, r, s, d)
    ),
    "recovered tokens are drawn from q": lambda j, r, s, d: _q_law(j, r, s, d),
    "recovered tokens are drawn from max(q - p, 0): the difference is turned round": (
        lambda j, r, s, d: np.maximum(_q_law(j, r, s, d) - _target(j, r, s), 0.0)
    ),
    "recovered tokens are drawn from |p - q|: what is negative is not cut off": (
        lambda j, r, s, d: np.abs(_target(j, r, s) - _q_law(j, r, s, d))
    ),
    "recovered tokens are drawn from the residual of the slot before": lambda j, r, s, d: _residual(
        j, r, s, d, slots=-1
    ),
    "recovered tokens are drawn from the residual of the next slot": lambda j, r, s, d: _residual(j, r, s, d, slots=1),
    "recovered tokens are drawn from p of the next slot": lambda j, r, s, d: _target(j, r, s, slots=1),
    "recovered tokens are drawn from the residual of the next row": lambda j, r, s, d: _residual(j, r, s, d, rows=1),
    "recovered tokens are drawn from the residual of the row before": lambda j, r, s, d: _residual(j, r, s, d, rows=-1),
    "the residual is made of p and q sharpened once more (temperature 1/2)": (
        lambda j, r, s, d: np.maximum(_raised(_target(j, r, s)) - _raised(_q_law(j, r, s, d)), 0.0)
    ),
    "recovered tokens are drawn evenly from the vocabulary": lambda j, r, s, d: np.ones((len(r), j.case.vocab_size)),
}
"""What a recovered token may be drawn from instead of the residual, in words."""

BONUS_LAWS: Mapping[str, Law] = {
    "the bonus is drawn from the row before the last, one slot too early": lambda j, r, s, d: _target(
        j, r, s, slots=-1
    ),
    "the bonus is drawn from row 0": lambda j, r, s, d: _target(j, r, np.zeros_like(s)),
    "the bonus is the most likely token: nothing is drawn": lambda j, r, s, d: _mode(_target(j, r, s)),
    "the bonus is drawn from another request's law, that of the next row": lambda j, r, s, d: _target(j, r, s, rows=1),
    "the bonus is drawn from another request's law, that of the row before": lambda j, r, s, d: _target(
        j, r, s, rows=-1
    ),
    "the bonus is drawn from the residual of the last slot": lambda j, r, s, d: _residual(j, r, s - 1, d),
    "the bonus is drawn from p less q of the last slot": (
        lambda j, r, s, d: np.maximum(_target(j, r, s) - _q_law(j, r, s - 1, d), 0.0)
    ),
    "the bonus is drawn from q of the last slot": lambda j, r, s, d: _q_law(j, r, s - 1, d),
    "the bonus is drawn from p sharpened once more (temperature 1/2)": lambda j, r, s, d: _raised(_target(j, r, s)),
    "the bonus is drawn evenly from the vocabulary": lambda j, r, s, d: np.ones((len(r), j.case.vocab_size)),
}
"""What a bonus may be drawn from instead of row num_draft of p, in words."""


def _raised(law: Floats) -> Floats:
    raised: Floats = law**2 / (law**2).sum(axis=1, keepdims=True)
    return raised
