"""A rejection sampler in numpy, whole cases at a time: thousands of correct runs for the battery's calibration."""

from __future__ import annotations

import numpy as np

from equivtest.battery.evidence import evidence
from equivtest.battery.judge import acceptance_probs, judge, residuals
from equivtest.battery.laws import Case, draw_drafts, make_laws, random_orders
from equivtest.battery.play import Played
from equivtest.records import Evidence

CASES = (
    Case(kind="random", vocab_size=8, num_draft=3, batch=128, rounds=10),
    Case(kind="random", vocab_size=8, num_draft=3, batch=128, rounds=10, one_hot=True),
    Case(kind="filtered", vocab_size=6, num_draft=2, batch=128, rounds=10, ragged=True),
    Case(kind="half", vocab_size=8, num_draft=3, batch=1, rounds=200, one_hot=True),
)


def correct_run(rng: np.random.Generator) -> list[Evidence]:
    """Every test of the battery on fresh laws, drafts and coins."""
    return evidence([judge(_played(case, rng), rng) for case in CASES])


def _played(case: Case, rng: np.random.Generator) -> Played:
    laws = make_laws(case, rng)
    drafts = draw_drafts(laws, case.rounds, rng)
    accept_prob = acceptance_probs(case, laws.target[:, :-1], laws.draft, drafts)
    offered = np.arange(case.num_draft) < laws.num_draft[:, None]
    accepted = (rng.random(drafts.shape) < accept_prob) & offered
    emitted = accepted.cumprod(axis=2).sum(axis=2)
    recovers, row = emitted < laws.num_draft, np.broadcast_to(np.arange(case.batch), emitted.shape)
    weights = laws.target[row, emitted].astype(np.float64)
    slot = np.minimum(emitted, case.num_draft - 1)
    if case.one_hot:
        left = weights.copy()
        np.put_along_axis(left, np.take_along_axis(drafts, slot[..., None], 2), 0.0, 2)
    else:
        left = residuals(laws)[row, slot]
    weights = np.where(recovers[..., None], left, weights)
    cumulative = weights.cumsum(axis=2)
    last = (cumulative <= rng.random(emitted.shape)[..., None] * cumulative[..., -1:]).sum(axis=2)
    places = np.arange(case.num_draft + 1)
    tokens = np.where(places < emitted[..., None], np.pad(drafts, ((0, 0), (0, 0), (0, 1))), -1)
    np.put_along_axis(tokens, emitted[..., None], last[..., None], 2)
    return Played(case, laws, drafts, tokens, emitted, None, random_orders(case, rng), ())
