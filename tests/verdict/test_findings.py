import numpy as np
import pytest

from equivtest.errors import InvalidSetting
from equivtest.records import Comparison
from equivtest.stats.marginal import marginal_family
from equivtest.verdict.facts import Place
from equivtest.verdict.findings import confirmation, flagged_cells, flagged_strata, marginal_finding

CELLS = [("topp95", "code", 0), ("topp95", "code", 1), ("topp95", "list", 0), ("topk50", "code", 0)]
SAME = np.repeat([0, 1], [100, 100])
MOVED = np.repeat([0, 1], [150, 50])
FAR = np.repeat([0, 1], [190, 10])


def result(*on):
    return marginal_family([SAME] * 4, on, num_tv_permutations=99, rng=np.random.default_rng(0))


def test_a_finding_counts_flags_by_config_and_puts_the_worst_first():
    found = marginal_finding(Comparison.OFF_ON, result(SAME, MOVED, SAME, FAR), CELLS)
    assert [flag.place for flag in found.flagged] == [Place("topk50", "code", 0), Place("topp95", "code", 1)]
    assert (found.flags_in("topp95"), found.flags_in("topk50")) == (1, 1)
    assert found.num_tests == {"topp95": 3, "topk50": 1}
    assert found.num_all == 4
    assert found.flagged[0].effect == pytest.approx(0.45)
    assert found.flagged[0].effect_by_chance < 0.1
    assert [(extreme.place, round(extreme.value, 2)) for extreme in found.extremes] == [
        (Place("topk50", "code", 0), 0.45)
    ] * 2


def test_equal_arms_flag_nothing():
    found = marginal_finding(Comparison.OFF_ON, result(SAME, SAME, SAME, SAME), CELLS)
    assert found.flagged == ()
    assert found.smallest_p == 1


def test_stage_two_collects_the_strata_of_flagged_cells_only():
    tested = result(SAME, MOVED, SAME, FAR)
    assert flagged_cells(tested, CELLS) == (("topp95", "code", 1), ("topk50", "code", 0))
    assert flagged_strata(tested, CELLS) == {("topp95", "code"), ("topk50", "code")}


def test_confirmation_is_bonferroni_over_the_tested_cells():
    rng = np.random.default_rng(1)
    stage_2 = confirmation([SAME, SAME], [MOVED, SAME], CELLS[:2], rng=rng)
    assert [flag.place for flag in stage_2.confirmed] == [Place(*CELLS[0])]
    assert stage_2.tested == (Place(*CELLS[0]), Place(*CELLS[1]))
    assert (stage_2.num_samples, stage_2.alpha) == (200, 0.01)
    # X^2 of 118/82 against 100/100 gives p = .071, of 127/73 gives p = .0064: enough alone, not among two.
    near = np.repeat([0, 1], [127, 73])
    assert confirmation([SAME], [near], CELLS[:1], rng=rng).confirmed
    assert not confirmation([SAME, SAME], [near, near], CELLS[:2], rng=rng).confirmed
    assert not confirmation([SAME], [np.repeat([0, 1], [118, 82])], CELLS[:1], rng=rng).confirmed


def test_confirmation_by_permutation_resolves_its_level():
    stage_2 = confirmation([SAME] * 3, [MOVED, SAME, SAME], CELLS[:3], exact=True, rng=np.random.default_rng(2))
    assert [flag.place for flag in stage_2.confirmed] == [Place(*CELLS[0])]
    # No permutation of 9,999 comes near this cell, and its p-value is not 0 for that.
    assert stage_2.smallest_p == pytest.approx(3 / 10_000)


def test_cells_must_name_the_result():
    tested = result(SAME, SAME, SAME, SAME)
    for use in (flagged_cells, flagged_strata, lambda r, c: marginal_finding(Comparison.OFF_ON, r, c)):
        with pytest.raises(InvalidSetting, match="each of the 4 tested cells"):
            use(tested, CELLS[:3])
