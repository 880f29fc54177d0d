import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from equivtest.errors import InsufficientSamples, InvalidSetting, ResolutionTooCoarse
from equivtest.stats.binning import count_tokens, merge_bins
from equivtest.stats.marginal import marginal_family
from tests.stats.laws import draw, realistic_laws, towards_the_mode

tokens = st.lists(st.integers(0, 6), min_size=2, max_size=60).map(np.array)
cells = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5)
WAYS = [{}, {"exact": True}, {"statistic": "max_z"}, {"dependence": "by"}]
PER_CELL = (
    "num_bins", "statistic", "df", "p_value", "q_value", "rejected", "tv", "tv_null_mean", "tv_null_q975", "tv_excess",
)  # fmt: skip


def family(off, on, **settings_):
    defaults = {"num_tv_permutations": 99, "rng": np.random.default_rng(7)}
    if settings_.get("exact") or settings_.get("statistic") == "max_z":
        defaults["num_permutations"] = 2_500
    return marginal_family(off, on, **{**defaults, **settings_})


def assert_identical(one, other):
    for field in PER_CELL:
        assert np.array_equal(getattr(one, field), getattr(other, field)), field


@pytest.mark.parametrize("way", WAYS, ids=str)
@settings(max_examples=25, deadline=None)
@given(pairs=cells, seed=st.integers(0, 2**32))
def test_sample_order_and_token_names_change_nothing_to_the_last_bit(way, pairs, seed):
    shuffle = np.random.default_rng(seed)
    renamed = []
    for off, on in pairs:
        names = shuffle.choice(50_000, size=7, replace=False)
        renamed.append((names[shuffle.permutation(off)], names[shuffle.permutation(on)]))
    assert_identical(family(*zip(*pairs, strict=True), **way), family(*zip(*renamed, strict=True), **way))


def test_token_names_change_nothing_where_many_totals_tie():
    rng = np.random.default_rng(0)
    on_counts = rng.integers(1, 30, size=40)
    off, on = np.repeat(np.arange(40), 30 - on_counts), np.repeat(np.arange(40), on_counts)
    results = []
    for _ in range(20):
        names = rng.permutation(40)
        results.append(family([names[off]], [names[on]]))
    for other in results[1:]:
        assert_identical(results[0], other)


@pytest.mark.parametrize("way", WAYS, ids=str)
@settings(max_examples=25, deadline=None)
@given(pairs=cells)
def test_swapping_the_arms_changes_nothing_to_the_last_bit(way, pairs):
    off, on = zip(*pairs, strict=True)
    assert_identical(family(off, on, **way), family(on, off, **way))


@settings(max_examples=50, deadline=None)
@given(pairs=cells)
def test_every_number_is_finite_and_in_its_range(pairs):
    result = family(*zip(*pairs, strict=True))
    for field in PER_CELL:
        assert np.isfinite(getattr(result, field)).all(), field
    for field in ("p_value", "q_value", "tv", "tv_null_mean", "tv_null_q975"):
        assert ((getattr(result, field) >= 0) & (getattr(result, field) <= 1)).all(), field
    assert np.array_equal(result.tv_excess, result.tv - result.tv_null_mean)


@pytest.mark.parametrize(("num_off", "num_on"), [(256, 256), (64, 64), (300, 120)])
def test_chi2_agrees_with_scipy_on_the_merged_tables(num_off, num_on):
    rng = np.random.default_rng(1)
    laws = realistic_laws(60, rng)
    off, on = draw(laws, num_off, rng), draw(towards_the_mode(laws, 0.05), num_on, rng)
    result = family(off, on)
    table = merge_bins(count_tokens(off, on))
    compared = 0
    for cell in range(60):
        entries = slice(table.starts[cell], table.starts[cell + 1])
        if result.num_bins[cell] < 2:
            assert result.p_value[cell] == 1
            continue
        expected = stats.chi2_contingency(np.stack([table.off[entries], table.on[entries]]), correction=False)
        assert result.statistic[cell] == pytest.approx(expected.statistic, rel=1e-12)
        assert result.df[cell] == expected.dof
        assert result.p_value[cell] == pytest.approx(expected.pvalue, rel=1e-9)
        compared += 1
    assert compared >= 40


def test_chi2_of_a_known_table():
    # R: chisq.test(matrix(c(762, 484, 327, 239, 468, 477), 2), correct = FALSE), from the help page of chisq.test:
    # X-squared = 30.07, df = 2, p-value = 2.954e-07.
    off, on = np.repeat([0, 1, 2], [762, 327, 468]), np.repeat([0, 1, 2], [484, 239, 477])
    result = family([off], [on])
    assert result.statistic[0] == pytest.approx(30.07, abs=5e-3)
    assert result.df[0] == 2
    assert result.p_value[0] == pytest.approx(2.954e-07, rel=1e-3)


@pytest.mark.parametrize(("first", "second"), [((30, 12), (20, 25)), ((30, 12), (12, 30)), ((20, 30), (11, 9))])
def test_exact_p_agrees_with_the_enumeration_of_a_two_by_two_table(first, second):
    """Monte-Carlo error: 4 standard errors of the permutations used, a false alarm once in 15,000."""
    (a, b), (c, d) = first, second
    null = stats.hypergeom(a + b + c + d, a + c, a + b)
    counts = np.arange(a + c + 1)
    as_extreme = np.abs(counts - null.mean()) >= abs(a - null.mean()) - 1e-9
    p = null.pmf(counts)[as_extreme].sum()
    result = family([np.repeat([0, 1], [a, b])], [np.repeat([0, 1], [c, d])], exact=True, num_permutations=100_000)
    used = 1_999 if result.p_value[0] >= 51 / 2_000 else 100_000
    assert result.p_value[0] == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / used) + 1 / used)


def test_exact_and_asymptotic_p_agree_on_large_cells():
    rng = np.random.default_rng(2)
    laws = realistic_laws(40, rng)
    off, on = draw(laws, 1024, rng), draw(laws, 1024, rng)
    exact, asymptotic = family(off, on, exact=True), family(off, on)
    assert np.array_equal(exact.statistic, asymptotic.statistic)
    assert np.abs(exact.p_value - asymptotic.p_value).max() < 0.06
    assert np.corrcoef(exact.p_value, asymptotic.p_value)[0, 1] > 0.995


def test_max_z_of_one_changed_token_is_found_where_it_is_planted():
    law = np.full((12, 100), 0.9 / 99)
    law[:, 0] = 0.1
    biased = law.copy()
    biased[3] = 0.75 / 99
    biased[3, 0] = 0.25
    rng = np.random.default_rng(3)
    off = draw(law, 256, rng)
    result = family(off, draw(biased, 256, rng), statistic="max_z")
    assert np.flatnonzero(result.rejected).tolist() == [3]
    assert family(off, draw(law, 256, rng), statistic="max_z").num_rejected == 0


def test_max_z_is_the_difference_over_its_permutation_standard_deviation():
    off, on = np.repeat([0, 1, 2], [50, 30, 20]), np.repeat([0, 1, 2], [40, 20, 60])
    # Token 2: 80 of 220; the hypergeometric variance of its count in arm off.
    sd = math.sqrt(stats.hypergeom(220, 80, 100).var())
    assert family([off], [on], statistic="max_z").statistic[0] == pytest.approx(abs(20 - 80 * 100 / 220) / sd)


def test_tv_is_half_the_sum_of_frequency_differences():
    off, on = np.array([0, 0, 1, 2]), np.array([0, 1, 1, 3, 3])
    result = family([off], [on])
    assert result.tv[0] == pytest.approx(0.5 * (abs(0.5 - 0.2) + abs(0.25 - 0.4) + 0.25 + 0.4))


def test_tv_null_mean_agrees_with_its_closed_form():
    """The mean of |a_v - E a_v| under the hypergeometric law, summed over tokens; 5 standard errors."""
    rng = np.random.default_rng(4)
    laws = realistic_laws(20, rng)
    off, on = draw(laws, 96, rng), draw(laws, 64, rng)
    result = family(off, on, num_tv_permutations=4_000)
    for cell in range(20):
        pooled = np.bincount(np.concatenate([off[cell], on[cell]]))
        counts = np.arange(97)
        exact = sum(
            (stats.hypergeom(160, t, 96).pmf(counts) * np.abs(counts / 96 - (t - counts) / 64)).sum() / 2
            for t in pooled[pooled > 0]
        )
        spread = (result.tv_null_q975[cell] - exact) / 2
        assert result.tv_null_mean[cell] == pytest.approx(exact, abs=5 * spread / math.sqrt(4_000))


def test_tv_of_identical_arms_exceeds_its_null_quantile_in_one_cell_of_forty():
    """Exact binomial interval at 99.9 % around the share of cells above their own 97.5 % quantile."""
    rng = np.random.default_rng(5)
    laws = realistic_laws(2_000, rng)
    result = family(draw(laws, 64, rng), draw(laws, 64, rng), num_tv_permutations=999)
    above = int((result.tv > result.tv_null_q975).sum())
    # TV takes few values on peaked laws, so the share is at most 2.5 %, not equal to it.
    assert stats.binomtest(above, 2_000).proportion_ci(0.999).low <= 0.025
    assert above > 10
    assert abs(result.tv_excess.mean()) < 0.002
    assert result.tv.mean() > 0.1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_constant_cells_have_p_one_and_count_in_the_family(way):
    same = np.full(256, 9)
    off, on = np.repeat([0, 1], [140, 116]), np.repeat([0, 1], [100, 156])
    alone = family([off], [on], **way)
    among = family([same, off, same, same], [same, on, same, same], **way)
    assert among.p_value[[0, 2, 3]].tolist() == [1, 1, 1]
    assert among.tv[[0, 2, 3]].tolist() == [0, 0, 0]
    assert among.p_value[1] == pytest.approx(alone.p_value[0], rel=0.6)
    cost = 25 / 12 if way == {"dependence": "by"} else 1
    assert among.q_value[1] == pytest.approx(4 * cost * among.p_value[1])


def test_cell_of_single_tokens_only_has_p_one():
    result = family([np.arange(0, 64)], [np.arange(32, 96)])
    # 64 + 64 samples of 96 tokens: all share one rest bin, although the supports half differ.
    assert (result.num_bins[0], result.df[0], result.p_value[0]) == (1, 0, 1)
    assert result.tv[0] == 0.5


def test_disjoint_supports_are_rejected():
    result = family([np.repeat([0, 1], 128)], [np.repeat([2, 3], 128)])
    assert result.rejected.tolist() == [True]
    assert result.tv[0] == 1


def test_smallest_cells_are_answered_and_smaller_ones_refused():
    assert family([np.array([1, 2])], [np.array([1, 3])]).p_value[0] == 1
    with pytest.raises(InsufficientSamples, match="arm off of cell 0"):
        family([np.array([1])], [np.array([1, 3])])
    with pytest.raises(InsufficientSamples):
        family([], [])


def test_permutations_that_cannot_reject_one_cell_are_refused():
    cell = np.repeat([0, 1], 20)
    with pytest.raises(ResolutionTooCoarse, match="18 permutations cannot reject any of 1 cells"):
        family([cell], [cell], exact=True, num_permutations=18)
    for dependence, needed in (("bh", 200 - 1), ("by", math.ceil(200 * sum(1 / i for i in range(1, 11))) - 1)):
        with pytest.raises(ResolutionTooCoarse):
            family([cell] * 10, [cell] * 10, exact=True, dependence=dependence, num_permutations=needed - 1)
        off, on = [cell] * 9 + [np.zeros(40, int)], [cell] * 9 + [np.ones(40, int)]
        result = family(off, on, exact=True, dependence=dependence, num_permutations=needed)
        assert result.rejected.tolist() == [False] * 9 + [True], dependence


def test_default_permutations_suffice_for_the_family():
    cell = np.repeat([0, 1], 20)
    result = marginal_family([cell] * 300, [cell] * 300, exact=True, rng=np.random.default_rng(0))
    assert result.num_permutations + 1 == 4 * 300 / 0.05


@pytest.mark.parametrize(
    "setting", [{"q": 0.0}, {"q": 1.0}, {"num_tv_permutations": 0}, {"exact": True, "num_permutations": 0}], ids=str
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(InvalidSetting):
        family([np.array([0, 1])], [np.array([0, 1])], **setting)


def test_evidence_sums_the_family_up():
    rng = np.random.default_rng(6)
    laws = realistic_laws(20, rng)
    result = family(draw(laws, 256, rng), draw(towards_the_mode(laws, 0.2), 256, rng))
    evidence = result.evidence("off vs on / topp95")
    assert (evidence.family, evidence.name, evidence.stratum) == ("marginal", "chi2", "off vs on / topp95")
    assert evidence.statistic == result.num_rejected > 0
    assert evidence.p_value == result.q_value.min()
    assert evidence.estimate == result.tv_excess.max()
    assert evidence.num_tokens == 20 * 512
    assert "Benjamini-Hochberg at 0.05" in evidence.method
