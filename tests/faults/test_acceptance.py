"""Which drafts each rule keeps, coin by coin, and what a rejection draws from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from equivtest.errors import InvalidSetting
from equivtest.faults.acceptance import FAULTS
from equivtest.faults.base import Fault
from equivtest.rng import Purpose
from tests.decoder.scenarios import build
from tests.faults import planted

P = torch.tensor(
    [
        [0.05, 0.30, 0.20, 0.00, 0.25, 0.20],
        [0.40, 0.05, 0.05, 0.30, 0.00, 0.20],
        [0.10, 0.10, 0.40, 0.10, 0.10, 0.20],
        [0.20, 0.10, 0.10, 0.20, 0.40, 0.00],
    ]
)
Q = torch.tensor(
    [
        [0.40, 0.10, 0.10, 0.20, 0.20, 0.00],
        [0.10, 0.20, 0.10, 0.10, 0.20, 0.30],
        [0.30, 0.20, 0.10, 0.20, 0.10, 0.10],
    ]
)


def one_round(*, declared: bool = True, kernels: str = "cpp", num_rows: int = 8000) -> planted.Round:
    """Rows of 0 to 3 drafts drawn from Q, judged by Q or, where it is not declared, as sure drafts."""
    return planted.Round(P, planted.sampled_drafts(Q, num_rows, declared=declared), kernels=kernels)


def kept_by(name: str, played: planted.Round) -> np.ndarray:
    """[B, 3], whether the rule keeps each draft, as one would write it."""
    p, q, u = played.p_drafts, played.q_drafts, played.coins(Purpose.ACCEPT)
    return {
        "inflated_acceptance": u * q < np.minimum(p + np.float32(0.1), 1),
        "accept_all": np.ones_like(u, bool),
        "coin_at_zero": p > 0,
        "coarse_coin": np.floor(32 * u) / 32 * q <= p,
    }[name]


@pytest.mark.parametrize("kernels", ["reference", "cpp"])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", ["inflated_acceptance", "accept_all", "coin_at_zero", "coarse_coin"])
def test_drafts_are_kept_as_the_rule_says(name: str, declared: bool, kernels: str) -> None:
    played = one_round(declared=declared, kernels=kernels)
    tokens, emitted = played.play(planted.named(FAULTS, name))
    right_tokens, right = played.play()
    expected = played.longest_prefix(kept_by(name, played))
    np.testing.assert_array_equal(emitted, expected)
    assert (emitted != right).mean() > 0.01
    # Whoever keeps as many as a correct decoder puts out the same, plain rows and the draws after it included.
    same = emitted == right
    np.testing.assert_array_equal(tokens[same], right_tokens[same])


def test_a_coarse_coin_at_zero_keeps_an_impossible_draft() -> None:
    """One in 32 of the drafts that have no probability; binomial, false-alarm rate 1e-4."""
    played = one_round()
    _, emitted = played.play(planted.named(FAULTS, "coarse_coin"))
    impossible = (played.p_drafts[:, 0] == 0) & (played.drafts.num_draft > 0)
    assert stats.binomtest(int((emitted[impossible] > 0).sum()), int(impossible.sum()), 1 / 32).pvalue > 1e-4
    _, right = played.play()
    assert not right[impossible].any()


def left_over(slot: int, draft: int | None) -> np.ndarray:
    """relu(p - q), or p without a sure draft."""
    left = P[slot].double().numpy().copy()
    if draft is None:
        left = np.maximum(left - Q[slot].double().numpy(), 0)
    else:
        left[draft] = 0
    return left / left.sum()


@pytest.mark.parametrize("declared", [True, False])
def test_a_later_rejection_draws_from_the_residual_before(declared: bool) -> None:
    """Chi-squared of the tokens of rows that reject in slot 1 or 2, false-alarm rate 1e-4 a case; the twin is a
    correct decoder, whose tokens are far off that law."""
    played = one_round(declared=declared, num_rows=60_000)
    tokens, emitted = played.play(planted.named(FAULTS, "stale_residual"))
    right_tokens, right = played.play()
    np.testing.assert_array_equal(emitted, right)
    later = (emitted > 0) & (emitted < played.drafts.num_draft)
    np.testing.assert_array_equal(tokens[~later], right_tokens[~later])
    for slot in (1, 2):
        rows = np.flatnonzero(later & (emitted == slot))
        before = played.drafts.token_ids[rows, slot - 1]
        laws = [left_over(slot - 1, None if declared else int(draft)) for draft in before]
        expected, possible = np.sum(laws, axis=0), np.sum(laws, axis=0) > 0
        assert len(rows) > 200
        counts = np.bincount(tokens[rows, slot], minlength=6)
        assert counts[~possible].sum() == 0
        assert stats.chisquare(counts[possible], expected[possible]).pvalue > 1e-4
        honest = np.bincount(right_tokens[rows, slot], minlength=6)
        assert honest[~possible].sum() > 0 or stats.chisquare(honest[possible], expected[possible]).pvalue < 1e-9


@pytest.mark.parametrize("fault", [f() for f in FAULTS if f().name != "inflated_acceptance"], ids=lambda f: f.name)
def test_the_match_rule_has_no_such_coin(fault: Fault) -> None:
    with pytest.raises(InvalidSetting, match=f"{fault.name}.*chain"):
        fault(build(planted.executor("early_exit").backend, acceptance="match").stages)


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_it_shows_in_text_and_goes_without_a_trace(fault: Fault) -> None:
    # A coarse coin changes one verdict in fifty.
    planted.check_planted(fault, count=60 if fault.name == "coarse_coin" else 18)
