"""Wrong rules of acceptance, each fitted like the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from equivtest.battery.evidence import ALL
from equivtest.battery.fits import FITS, TELLING_KINDS, most_likely
from equivtest.battery.judge import Judged, at_drafts
from equivtest.battery.laws import Float32s, Floats
from equivtest.stats.sampler import acceptance

_MOST_Z = 4.0
"""Largest z of a wrong rule in the direction of the right one at which it fits."""

Rule = Callable[[Judged], Floats]


def explain_acceptance(judged: Sequence[Judged], *, one_hot: bool) -> str | None:
    """The wrong rule of acceptance that fits the decisions of all cases, in words; None where none does."""
    chosen = [j for j in judged if j.case.one_hot == one_hot and j.case.kind in TELLING_KINDS and j.case.num_draft > 1]
    found = {words: [_acceptance_fit(j, rule(j)) for j in chosen] for words, rule in ACCEPTANCE_RULES.items()}
    return most_likely({words: fits for words, fits in found.items() if _differs(chosen, ACCEPTANCE_RULES[words])})


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
    places = np.clip(np.arange(j.case.num_draft) + slots, 0, j.case.num_draft)
    return j.laws.target[j.neighbour(rows)[..., None], places, j.drafts].astype(np.float64)


def _moved_q(j: Judged, slots: int, rows: int) -> Floats:
    if j.case.one_hot:
        # A point mass at another row's or slot's draft.
        drafts = np.take_along_axis(j.drafts, j.neighbour(rows)[..., None], 1)
        places = np.clip(np.arange(j.case.num_draft) + slots, 0, j.case.num_draft - 1)
        point: Floats = (drafts[..., places] == j.drafts).astype(np.float64)
        return point
    places = np.clip(np.arange(j.case.num_draft) + slots, 0, j.case.num_draft - 1)
    return j.laws.draft[j.neighbour(rows)[..., None], places, j.drafts].astype(np.float64)


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
    "p is that of the row before": lambda j: _ratio(_moved(j, 0, -1), _q(j)),
    "p is that of the next row": lambda j: _ratio(_moved(j, 0, 1), _q(j)),
    "q is that of the row before": lambda j: _ratio(_p(j), _moved_q(j, 0, -1)),
    "q is that of the next row": lambda j: _ratio(_p(j), _moved_q(j, 0, 1)),
    "the ratio is of p and q sharpened once more (temperature 1/2)": _power(2.0),
    "the ratio is of p and q flattened once more (temperature 2)": _power(0.5),
}
"""What may be done instead of accepting with min(1, p/q), in words."""
