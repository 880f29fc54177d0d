"""The exact law of a chain's output, and a deliberately plain simulation of it that can be made wrong.

Tables are the same for every row: p [K+1, V] and q [K, V]; drafts are drawn from q, or fixed when q is one-hot.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PADDING = -1


class Fault(StrEnum):
    NONE = "none"
    INFLATED = "acceptance inflated by epsilon"
    NOT_RENORMALISED = "residual not renormalised"
    DRAFT_REMOVED = "residual with only the draft removed"
    FROM_P = "recovery drawn from p"
    BONUS_ROW_0 = "bonus from row 0"
    TELEMETRY = "commit on telemetry"
    SHARED_COIN = "recovery reuses the acceptance coin"


def position_laws(p: Floats, q: Floats) -> Floats:
    """P(output j is token x), and in the last column P(output j is padding): [K+1, V+1].

    By enumeration of what can happen at j once it is reached: draft x is offered with q(x), kept with min(1, p/q), and
    otherwise replaced by a draw from relu(p - q), renormalised.
    """
    num_slots, vocab_size = p.shape
    laws = np.zeros((num_slots, vocab_size + 1))
    reached = 1.0
    for j in range(num_slots):
        laws[j, -1] = 1 - reached
        if j == num_slots - 1:
            laws[j, :-1] = reached * p[j]
            break
        going_on = 0.0
        residual = np.maximum(p[j] - q[j], 0)
        for draft in np.flatnonzero(q[j]):
            kept = min(1.0, p[j, draft] / q[j, draft])
            laws[j, draft] += reached * q[j, draft] * kept
            if kept < 1:
                laws[j, :-1] += reached * q[j, draft] * (1 - kept) * residual / residual.sum()
            going_on += q[j, draft] * kept
        reached *= going_on
    return laws


def tables(num_draft: int, *, one_hot: bool, vocab_size: int, seed: int) -> tuple[Floats, Floats]:
    """Random p and q with some exact zeros, drafts accepted about two times in three."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(vocab_size, 1.0), num_draft + 1) + 0.02
    p[:, rng.integers(vocab_size)] = 0  # a filtered token
    p /= p.sum(axis=1, keepdims=True)
    if one_hot:
        q = np.eye(vocab_size)[p[:-1].argmax(axis=1)]
        p[:-1] = 0.5 * p[:-1] + 0.5 * q
    else:
        q = 0.6 * p[:-1] + 0.4 * rng.dirichlet(np.full(vocab_size, 1.0), num_draft)
    # The kernels see float32: the exact law is that of the rounded tables.
    return p.astype(np.float32).astype(np.float64), q.astype(np.float32).astype(np.float64)


def draw(weights: Floats, u: Floats) -> Ints:
    """Inverse distribution function: weights [..., V], u [...], relative to each row's sum."""
    cumulative = weights.cumsum(axis=-1)
    return (cumulative <= (u * cumulative[..., -1])[..., None]).sum(axis=-1)


def draw_drafts(q: Floats, num_rows: int, rng: np.random.Generator) -> Ints:
    """Drafts [num_rows, K] from the rows of q."""
    return draw(np.broadcast_to(q, (num_rows, *q.shape)), rng.random((num_rows, len(q))))


def simulate(p: Floats, q: Floats, num_rows: int, fault: Fault, rng: np.random.Generator) -> Ints:
    """Output tokens [num_rows, K+1] of a chain with that fault."""
    num_draft, vocab_size = q.shape
    drafts = draw_drafts(q, num_rows, rng)
    slots = np.arange(num_draft)
    p_draft, q_draft = p[slots, drafts], q[slots, drafts]
    epsilon = 0.05 if fault is Fault.INFLATED else 0.0
    coins = rng.random((num_rows, num_draft))
    accepted = coins < p_draft / q_draft + epsilon
    emitted = accepted.cumprod(axis=1).sum(axis=1)
    if fault is Fault.TELEMETRY:
        emitted = accepted.sum(axis=1)

    output = np.full((num_rows, num_draft + 1), PADDING)
    output[:, :-1] = np.where(slots < emitted[:, None], drafts, PADDING)
    for j in range(num_draft + 1):
        rows = np.flatnonzero(emitted == j)
        u = rng.random(len(rows))
        if j == num_draft:
            bonus = p[0 if fault is Fault.BONUS_ROW_0 else j]
            output[rows, j] = draw(np.broadcast_to(bonus, (len(rows), vocab_size)), u)
            continue
        residual = np.broadcast_to(np.maximum(p[j] - q[j], 0), (len(rows), vocab_size)).copy()
        if fault is Fault.FROM_P:
            residual[:] = p[j]
        elif fault is Fault.DRAFT_REMOVED:
            residual[:] = p[j]
            residual[np.arange(len(rows)), drafts[rows, j]] = 0
        if fault is Fault.SHARED_COIN:
            u = coins[rows, j]
        if fault is Fault.NOT_RENORMALISED:
            first = (residual.cumsum(axis=1) <= u[:, None]).sum(axis=1)
            output[rows, j] = np.minimum(first, vocab_size - 1)
        else:
            output[rows, j] = draw(residual, u)
    return output


def p_value(tokens: Ints, law: Floats) -> float:
    """Chi-squared of tokens [n] (PADDING counts as the last column) against a law [V+1].

    A token with no probability that came out is an impossible event: p = 0. Tokens expected under 5 times share a bin.
    """
    counts = np.bincount(np.where(tokens == PADDING, len(law) - 1, tokens), minlength=len(law))
    possible = law > 1e-12
    if counts[~possible].any():
        return 0.0
    observed, expected = counts[possible], law[possible] / law[possible].sum() * len(tokens)
    rare = expected < 5
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(observed, expected).pvalue) if len(observed) > 1 else 1.0
