"""The p-values of label permutations are (b + 1) / (B + 1), for the B that was used."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.stats.binning import CountTable, count_tokens
from equivtest.stats.permutation import permutation_p_values

SCREEN = 1_999


class Scripted:
    """A statistic that the permutations, counted over all calls, reach where the script says so, and nowhere else."""

    def __init__(self, *reached: range) -> None:
        self.reached = np.concatenate([np.arange(0), *reached])
        self.seen = -1

    def __call__(self, deviation: np.ndarray, cell: int) -> np.ndarray:
        """1 for the observed table, which comes first and alone; then 1 where reached and 0 elsewhere."""
        assert cell == 0
        if self.seen < 0:
            assert deviation.shape[1] == 1
            self.seen = 0
            return np.ones(1)
        here = self.seen + np.arange(deviation.shape[1])
        self.seen += deviation.shape[1]
        return np.isin(here, self.reached).astype(float)


def squares(deviation: np.ndarray, cell: int) -> np.ndarray:
    del cell
    return (deviation.astype(float) ** 2).sum(axis=0)


def disjoint_arms() -> CountTable:
    return count_tokens([np.zeros(40, np.int64)], [np.ones(40, np.int64)])


@pytest.mark.parametrize("num_permutations", [1, 99, SCREEN, SCREEN + 1, 2_500])
def test_disjoint_arms_get_the_smallest_p_value_there_is_and_not_zero(num_permutations: int) -> None:
    """A permutation reaches the observed table with probability 2 / C(80, 40) < 2e-23."""
    (p_value,) = permutation_p_values(disjoint_arms(), squares, num_permutations, np.random.default_rng(0))
    assert p_value == 1 / (num_permutations + 1)


@pytest.mark.parametrize(
    ("reached", "p_value", "used"),
    [
        ([range(50)], 51 / 2_000, SCREEN),
        ([range(50), range(SCREEN, 9_999)], 51 / 2_000, SCREEN),
        ([range(700)], 701 / 2_000, SCREEN),
        ([range(49)], 50 / 10_000, 9_999),
        ([range(49), range(SCREEN, SCREEN + 10)], 60 / 10_000, 9_999),
        ([range(49), range(SCREEN, 9_999)], 8_050 / 10_000, 9_999),
        ([], 1 / 10_000, 9_999),
    ],
    ids=["50", "50, then all", "700", "49", "49, then 10", "49, then all", "none"],
)
def test_fifty_exceedances_of_the_screen_stop_a_cell_and_fewer_run_to_the_full_count(
    reached: list[range], p_value: float, used: int
) -> None:
    statistic = Scripted(*reached)
    assert permutation_p_values(disjoint_arms(), statistic, 9_999, np.random.default_rng(0))[0] == p_value
    assert statistic.seen == used
