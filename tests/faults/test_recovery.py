"""What a rejection puts out, and a q that was spoilt before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from equivtest.errors import InvalidSetting
from equivtest.faults.base import Fault
from equivtest.faults.recovery import FAULTS
from equivtest.kernels.contract import PADDING
from tests.decoder.scenarios import build
from tests.faults import planted
from tests.faults.test_acceptance import one_round
from tests.faults.test_proposal import first_proposals


def test_q_is_divided_by_exponential_noise_and_the_drafts_stay() -> None:
    """Kolmogorov-Smirnov of the noise, 97 numbers, against the exponential law; false-alarm rate 1e-4."""
    wrong, _ = first_proposals(planted.named(FAULTS, "noised_q"), "cpp")
    right, _ = first_proposals(None, "cpp")
    assert wrong.probs is not None
    assert right.probs is not None
    assert (wrong.token_ids == right.token_ids).all()
    noise = torch.where(right.probs > 0, right.probs / wrong.probs, torch.nan).double().numpy()
    assert np.array_equal(wrong.probs > 0, right.probs > 0)
    seen = np.unique(noise[np.isfinite(noise)].round(5))
    assert len(seen) <= planted.VOCAB_SIZE  # one table, in another place for every row and slot
    assert stats.kstest(seen, "expon").pvalue > 1e-4
    places = noise[0, :, :].round(5)
    assert not (np.isclose(places[0], places[1]) & np.isfinite(places[0])).all()


@pytest.mark.parametrize("kernels", ["reference", "cpp"])
def test_one_row_in_32_puts_out_token_0_and_the_others_stay(kernels: str) -> None:
    """Binomial, false-alarm rate 1e-4."""
    played = one_round(kernels=kernels)
    tokens, emitted = played.play(planted.named(FAULTS, "nan_row_gives_zero"))
    right_tokens, right = played.play()
    changed = (tokens != right_tokens).any(axis=1) | (emitted != right)
    np.testing.assert_array_equal(tokens[changed], np.array([[0] + 3 * [PADDING]] * changed.sum()))
    assert not emitted[changed].any()
    has_drafts = played.drafts.num_draft > 0
    assert not changed[~has_drafts].any()
    # A correct row, too, may reject its first draft and recover token 0: it does not count as changed.
    unchanged_by_chance = ((right == 0) & (right_tokens[:, 0] == 0))[has_drafts].mean()
    rate = (1 - unchanged_by_chance) / 32
    assert stats.binomtest(int(changed.sum()), int(has_drafts.sum()), rate).pvalue > 1e-4


@pytest.mark.parametrize("kernels", ["reference", "cpp"])
@pytest.mark.parametrize("declared", [True, False])
def test_recovered_tokens_lose_half_the_vocabulary(declared: bool, kernels: str) -> None:
    played = one_round(declared=declared, kernels=kernels)
    tokens, emitted = played.play(planted.named(FAULTS, "wrong_block"))
    expected, right = played.play()
    np.testing.assert_array_equal(emitted, right)
    rows = np.flatnonzero(right < played.drafts.num_draft)
    upper = expected[rows, right[rows]] >= 3
    assert 0 < upper.sum() < len(rows)
    expected[rows, right[rows]] %= 3
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_the_match_rule_has_no_recovery(fault: Fault) -> None:
    stages = build(planted.executor(planted.SAMPLED).backend, planted.SAMPLED, acceptance="match").stages
    with pytest.raises(InvalidSetting, match=f"{fault.name}.*chain"):
        fault(stages)


def test_noise_needs_a_drafter_that_samples() -> None:
    with pytest.raises(InvalidSetting, match=r"noised_q.*sampled_exit"):
        planted.named(FAULTS, "noised_q")(planted.executor("early_exit").stages)


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_it_shows_in_text_and_goes_without_a_trace(fault: Fault) -> None:
    # Few rows have NaN.
    planted.check_planted(fault, count=60)
