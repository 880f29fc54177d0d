"""How many changes are more than rounding makes."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.errors import InsufficientSamples
from equivtest.stats.identity import DRAFT_RATE, TEXT_RATE, same


def p_value(changed: int, compared: int, rate: float) -> float:
    line = same("x", "s", num_changed=changed, num_compared=compared, num_tokens=1, rate=rate, method="m")
    return line.p_value


def test_one_changed_text_may_be_rounding_and_three_are_not() -> None:
    assert p_value(0, 32, TEXT_RATE) == 1
    assert p_value(1, 32, TEXT_RATE) > 0.01
    assert p_value(3, 32, TEXT_RATE) < 1e-5
    assert p_value(20, 10_000, DRAFT_RATE) < 1e-9


def test_the_level_holds_at_the_stated_rate() -> None:
    """Exact, so at most alpha whatever n; 20,000 draws each, five standard errors above alpha = .01 allowed."""
    rng = np.random.default_rng(5)
    for compared in (8, 32, 5000):
        draws = rng.binomial(compared, TEXT_RATE, 20_000)
        levels = np.array([p_value(changed, compared, TEXT_RATE) for changed in range(draws.max() + 1)])[draws]
        assert (levels <= 0.01).mean() <= 0.01 + 5 * (0.01 / 20_000) ** 0.5


def test_nothing_to_compare_is_said() -> None:
    with pytest.raises(InsufficientSamples, match="identity/x"):
        p_value(0, 0, TEXT_RATE)
