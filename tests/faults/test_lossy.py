"""Which drafts each lossy rule keeps, coin by coin."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.errors import InvalidSetting
from equivtest.faults.base import Fault, Nature
from equivtest.faults.lossy import FAULTS, relaxed_threshold, scaled_acceptance, top_n_acceptance, typical_acceptance
from equivtest.rng import Purpose
from tests.decoder.scenarios import build
from tests.faults import planted
from tests.faults.test_acceptance import P, one_round


def kept_by(name: str, played: planted.Round) -> np.ndarray:
    """[B, 3], whether the rule keeps each draft, as one would write it."""
    p, q, u = played.p_drafts, played.q_drafts, played.coins(Purpose.ACCEPT)
    laws = P.double().numpy()[:3]
    entropy = -(laws * np.log(np.where(laws > 0, laws, 1))).sum(axis=1)
    likelier = (laws[None] > p[:, :, None]).sum(axis=2)
    return {
        "typical_acceptance": p > np.minimum(0.09, 0.3 * np.exp(-entropy)),
        "relaxed_threshold": u * q * 0.7 < p,
        "top_n_acceptance": (likelier < 3) & (p > 0),
        "scaled_acceptance": u * q < 0.8 * p,
    }[name]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_drafts_are_kept_as_the_rule_says(fault: Fault, declared: bool) -> None:
    played = one_round(declared=declared)
    _, emitted = played.play(fault)
    _, right = played.play()
    # A coin within rounding of the threshold would do: the streams are fixed, and none is.
    np.testing.assert_array_equal(emitted, played.longest_prefix(kept_by(fault.name, played)))
    assert (emitted != right).mean() > 0.01


def test_all_trade_the_law_and_none_is_called_a_bug() -> None:
    assert {f().nature for f in FAULTS} == {Nature.LOSSY}
    assert {f().ids for f in FAULTS} == {()}


def test_parameters_out_of_range_are_refused() -> None:
    for make in (relaxed_threshold, typical_acceptance, scaled_acceptance, top_n_acceptance):
        for value in (0.0, -1.0, 1.5, float("nan"), float("inf")):
            name = {"relaxed_threshold": "threshold", "typical_acceptance": "epsilon"}.get(
                make.__name__, "n" if make is top_n_acceptance else "factor"
            )
            with pytest.raises(InvalidSetting, match=name):
                make(**{name: value})  # type: ignore[operator]
    with pytest.raises(InvalidSetting, match="delta"):
        typical_acceptance(delta=1.0)


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_the_match_rule_has_no_such_coin(fault: Fault) -> None:
    with pytest.raises(InvalidSetting, match=f"{fault.name}.*chain"):
        fault(build(planted.executor("early_exit").backend, acceptance="match").stages)


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_it_shows_in_text_and_goes_without_a_trace(fault: Fault) -> None:
    planted.check_planted(fault)
