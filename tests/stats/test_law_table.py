"""Transforms of draws from tabulated laws are uniform, in both orders, and of other laws they are not."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.stats.law_table import LawTable
from equivtest.stats.sampler import draws

TIED = np.array([[0.0, 0.3, 0.2, 0.3, 0.2], [1.0, 0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1, 0.6]])


def test_the_spread_of_a_token_is_the_mass_before_it_and_its_own() -> None:
    table = LawTable.of(TIED)
    spread = table.spread(np.array([0, 0, 2]), np.array([2, 3, 4]))
    assert spread.low == pytest.approx([0.3, 0.5, 0.4])
    assert spread.mass == pytest.approx([0.2, 0.3, 0.6])
    assert spread.above == pytest.approx([0.6, 0.0, 0.0])
    assert spread.ties == pytest.approx([0.4, 0.6, 0.6])


def test_a_token_taken_out_leaves_a_law() -> None:
    """As a table of the law without that token has it."""
    law = TIED[:1].copy()
    law[0, 1] = 0
    tokens = np.array([2, 3, 4])
    zeros = np.zeros(3, np.int64)
    taken_out = LawTable.of(TIED[:1]).spread(zeros, tokens, np.full(3, 1))
    for column, expected in zip(taken_out, LawTable.of(law).spread(zeros, tokens), strict=True):
        assert column == pytest.approx(expected)


@pytest.mark.parametrize("order", [0, 1])
def test_transforms_are_uniform_under_the_right_law_only(order: int) -> None:
    """Fixed seed; the right law fails with probability 1e-3, and one with two tokens changed is seen at 1e-12."""
    rng = np.random.default_rng(2)
    law = rng.dirichlet(np.ones(12), 1)
    tokens = rng.choice(12, 20_000, p=law[0])
    zeros = np.zeros(len(tokens), np.int64)
    other = law.copy()
    other[0, [law[0].argmax(), law[0].argmin()]] = law[0, [law[0].argmin(), law[0].argmax()]]
    coins = rng.random((2, len(tokens)))
    right, wrong = (
        draws(LawTable.of(each).spread(zeros, tokens).transforms(coins)[order], name="x", stratum="y")
        for each in (law, other)
    )
    assert right is not None
    assert right.p_value > 1e-3
    assert wrong is not None
    assert wrong.p_value < 1e-12
