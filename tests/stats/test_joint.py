import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from equivtest.errors import InsufficientSamples, InvalidSetting, ResolutionTooCoarse, UnknownName
from equivtest.stats.joint import joint_family
from equivtest.stats.joint_statistics import STATISTICS, Stratum
from equivtest.stats.prefix_tree import prefix_tree

NAMES = tuple(STATISTICS)
PER_STRATUM = ("stratum_statistic", "stratum_z", "stratum_p_value")


def samples(num_positions):
    return st.integers(2, 12).flatmap(lambda n: arrays(np.int64, (n, num_positions), elements=st.integers(0, 2)))


strata = st.lists(
    st.integers(1, 4).flatmap(lambda t: st.tuples(samples(t), samples(t))), min_size=1, max_size=3
)  # fmt: skip


def family(off, on, **settings_):
    defaults = {"num_permutations": 99, "level": 0.05, "rng": np.random.default_rng(7)}
    return joint_family(off, on, **{**defaults, **settings_})


def brute_force(name, tokens, is_on):
    """Each statistic from its definition: dictionaries of prefixes, pairs of samples."""
    off, on = ([tuple(row) for row in tokens[is_on == arm].tolist()] for arm in (0, 1))
    num_positions = tokens.shape[1]

    def prefixes(rows):
        return Counter(row[:length] for row in rows for length in range(num_positions + 1))

    count_off, count_on = prefixes(off), prefixes(on)
    total = count_off + count_on
    children = {node: [child for child in total if child[:-1] == node and child] for node in total}
    inner = [node for node in total if len(node) < num_positions]
    if name == "mode":
        value = 0.0
        for node in inner:
            largest = max(total[child] for child in children[node])
            modes = [child for child in children[node] if total[child] == largest]
            value += sum(count_on[child] for child in modes) / len(modes) - count_on[node] * largest / total[node]
        return value
    if name == "tree_g":
        frequent = {node for node in total if total[node] * min(len(off), len(on)) >= 5 * len(tokens)}
        value = 0.0
        for node in inner if () in frequent else []:
            if node not in frequent:
                continue
            kept = [child for child in children[node] if child in frequent]
            for arm in (count_off, count_on):
                bins = [(arm[child], total[child]) for child in kept]
                bins.append((arm[node] - sum(o for o, _ in bins), total[node] - sum(c for _, c in bins)))
                value += sum(2 * o * math.log(o / (c * arm[node] / total[node])) for o, c in bins if o)
        return value

    def mean(kernel, rows, others=None):
        pairs = list(combinations(rows, 2)) if others is None else [(x, y) for x in rows for y in others]
        return sum(kernel(x, y) for x, y in pairs) / len(pairs)

    if name == "collisions":

        def common_prefix(x, y):
            return next((i for i in range(num_positions) if x[i] != y[i]), num_positions)

        return mean(common_prefix, on) - mean(common_prefix, off)

    def hamming(x, y):
        return sum(a == b for a, b in zip(x, y, strict=True)) / num_positions

    return mean(hamming, off) + mean(hamming, on) - 2 * mean(hamming, off, on)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_off", "num_on"), [(9, 9), (14, 7), (5, 20)])
def test_every_statistic_equals_its_definition_for_any_labels(name, num_off, num_on):
    rng = np.random.default_rng(1)
    for _ in range(8):
        tokens = rng.integers(0, 3, (num_off + num_on, 4)) * (rng.random((num_off + num_on, 4)) < 0.5)
        tree = prefix_tree(tokens)
        tokens = tokens[tree.order]
        values = STATISTICS[name](Stratum(tree=tree, tokens=tokens, num_off=num_off, num_on=num_on))
        labels = rng.permuted(np.tile(np.arange(num_off + num_on) < num_on, (6, 1)), axis=1).T.astype(float)
        expected = [brute_force(name, tokens, column) for column in labels.T]
        assert values(labels) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_p_values_agree_with_the_enumeration_of_all_labellings(seed):
    """Monte-Carlo error: 4.5 standard errors for each of 12 comparisons, a false alarm once in 10,000."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2, (9, 3))
    result = family([tokens[:4]], [tokens[4:]], num_permutations=19_999)
    for name in NAMES:
        values = []
        for chosen in combinations(range(9), 5):
            values.append(brute_force(name, tokens, np.isin(np.arange(9), chosen).astype(int)))
        observed, values = values[-1], np.array(values)
        if name in ("mode", "collisions"):
            observed, values = abs(observed), np.abs(values)
        p = float((values >= observed - 1e-9).mean())
        assert result[name].p_value == pytest.approx(p, abs=4.5 * math.sqrt(p * (1 - p) / 20_000) + 1e-4), name


def test_tree_g_of_whole_samples_would_be_constant():
    """Why rare tokens share a bin: the chain rule makes the sum over all nodes the table of whole samples by arm."""
    rng = np.random.default_rng(2)
    tokens = np.unique(rng.integers(0, 4, (40, 5)), axis=0)[:30]  # all distinct
    total = 0.0
    for labels in rng.permuted(np.tile(np.arange(30) < 15, (5, 1)), axis=1):
        counts = [Counter(tuple(row[:n]) for row in tokens[labels == arm].tolist() for n in range(6)) for arm in (0, 1)]
        value = 0.0
        for arm in counts:
            for prefix, count in arm.items():
                if prefix:
                    node = prefix[:-1]
                    both = [sum(c[key] for c in counts) for key in (prefix, node)]
                    value += 2 * count * math.log(count * both[1] / (both[0] * arm[node]))
        total = total or value
        assert value == pytest.approx(total)


@settings(max_examples=100, deadline=None)
@given(pairs=strata, seed=st.integers(0, 2**32))
def test_sample_order_changes_nothing_to_the_last_bit(pairs, seed):
    shuffle = np.random.default_rng(seed)
    shuffled = [(shuffle.permutation(off), shuffle.permutation(on)) for off, on in pairs]
    one, other = family(*zip(*pairs, strict=True)), family(*zip(*shuffled, strict=True))
    for name in NAMES:
        assert one[name].p_value == other[name].p_value
        for field in PER_STRATUM:
            assert np.array_equal(getattr(one[name], field), getattr(other[name], field)), (name, field)


@settings(max_examples=100, deadline=None)
@given(pairs=strata, seed=st.integers(0, 2**32))
def test_token_names_change_nothing_even_if_every_prefix_has_its_own(pairs, seed):
    renamed = [(np.empty_like(off), np.empty_like(on)) for off, on in pairs]
    for before, after in zip(pairs, renamed, strict=True):
        for old, new in zip(before, after, strict=True):
            for row, tokens in enumerate(old.tolist()):
                for position, token in enumerate(tokens):
                    prefix = np.random.default_rng([seed, position, *tokens[:position]])
                    new[row, position] = prefix.choice(50, size=3, replace=False)[token]
    names = ("mode", "tree_g", "collisions")
    one = family(*zip(*pairs, strict=True), statistics=names)
    other = family(*zip(*renamed, strict=True), statistics=names)
    for name in names:
        assert one[name].p_value == other[name].p_value
        assert np.array_equal(one[name].stratum_p_value, other[name].stratum_p_value)
        assert one[name].stratum_statistic == pytest.approx(other[name].stratum_statistic, abs=1e-9)


def test_mmd_needs_ids_by_position_only():
    """Its p-values come from different permutations: 4.5 standard errors each, a false alarm once in 70,000."""
    rng = np.random.default_rng(3)
    off, on = rng.integers(0, 5, (30, 6)), rng.integers(0, 4, (20, 6))
    names = np.stack([rng.permutation(900)[:5] for _ in range(6)])
    one = family([off], [on], num_permutations=4_999)["mmd"]
    other = family([names[np.arange(6), off]], [names[np.arange(6), on]], num_permutations=4_999)["mmd"]
    assert one.statistic == other.statistic
    p = one.p_value
    assert other.p_value == pytest.approx(p, abs=4.5 * math.sqrt(2 * p * (1 - p) / 5_000))


@settings(max_examples=100, deadline=None)
@given(pairs=strata)
def test_swapping_the_arms_changes_the_signs_alone(pairs):
    off, on = zip(*pairs, strict=True)
    assume(len({len(first) == len(second) for first, second in pairs}) == 1)
    one, other = family(off, on), family(on, off)
    for name in NAMES:
        sign = -1 if name in ("mode", "collisions") else 1
        assert one[name].stratum_statistic == pytest.approx(sign * other[name].stratum_statistic, abs=1e-9)
        assert one[name].stratum_z == pytest.approx(sign * other[name].stratum_z, abs=1e-7)
        assert one[name].p_value == other[name].p_value
        assert np.array_equal(one[name].stratum_p_value, other[name].stratum_p_value)


@settings(max_examples=100, deadline=None)
@given(pairs=strata)
def test_every_number_is_finite_and_in_its_range(pairs):
    result = family(*zip(*pairs, strict=True))
    for test in result.tests:
        numbers = [test.statistic, test.z, *test.stratum_statistic, *test.stratum_z]
        assert np.isfinite(numbers).all()
        assert ((test.stratum_p_value >= 0.01) & (test.stratum_p_value <= 1)).all()
        assert 0.01 <= test.p_value <= test.adjusted_p_value <= 1
    assert [line.name for line in result.evidence("off vs on")] == list(NAMES)


@pytest.mark.parametrize("tokens", [np.zeros((6, 4), np.int64), np.full((5, 1), 3)], ids=["constant", "single token"])
def test_samples_that_cannot_differ_give_no_evidence(tokens):
    result = family([tokens], [tokens])
    assert [test.p_value for test in result.tests] == [1.0] * 4
    assert [test.z for test in result.tests] == [0.0] * 4


@given(tokens=samples(3))
@settings(max_examples=100, deadline=None)
def test_the_permutation_deviation_of_mode_is_that_of_a_finite_population(tokens):
    """Closed form: num_off num_on / (N (N - 1)) sum of squared scores; 4 standard errors of a deviation from B = 1,999,
    loosely for scores with heavy tails."""
    other = np.roll(tokens, 1, axis=0)
    result = family([tokens], [other], statistics=("mode",), num_permutations=1_999)["mode"]
    both = np.concatenate([tokens, other])
    scores = np.array([brute_force("mode", both, np.arange(len(both)) == i) for i in range(len(both))])
    deviation = math.sqrt(len(tokens) ** 2 / (len(both) * (len(both) - 1)) * (scores**2).sum())
    assume(deviation > 0)
    if result.z:
        assert result.statistic / result.z == pytest.approx(deviation, rel=0.15)


def test_the_estimate_of_mode_is_the_excess_of_its_frequency():
    """One position, p = .5 against .6: the excess is .1 with a standard error of .007; 5 of them."""
    rng = np.random.default_rng(4)
    off, on = (rng.random((10_000, 1)) >= p for p in (0.5, 0.6))
    result = family([off.astype(int)], [on.astype(int)], statistics=("mode",), num_permutations=199)
    assert result["mode"].estimate == pytest.approx(0.1, abs=0.035)
    assert result["mode"].estimate == pytest.approx(off.mean() - on.mean())


def test_strata_are_summed_and_localised():
    rng = np.random.default_rng(5)
    off = [rng.integers(0, 4, (60, 3)) for _ in range(4)]
    on = [rng.integers(0, 4, (60, 3)) for _ in range(4)]
    on[2] = rng.integers(0, 2, (60, 3))
    result = family(off, on, num_permutations=999)
    for name in ("mode", "tree_g", "collisions", "mmd"):
        test = result[name]
        assert test.statistic == pytest.approx(test.stratum_statistic.sum())
        assert test.stratum_p_value.argmin() == 2
        assert test.p_value <= 0.005
        assert np.delete(test.stratum_p_value, 2).min() > 0.001
    assert result.p_value == 0.004  # the smallest p-value of B = 999, Holm over four


def test_one_statistic_alone_says_what_it_says_in_the_family():
    rng = np.random.default_rng(6)
    off, on = [rng.integers(0, 3, (20, 4))], [rng.integers(0, 3, (25, 4))]
    whole = family(off, on)
    for name in NAMES:
        assert family(off, on, statistics=(name,))[name].p_value == whole[name].p_value


@pytest.mark.parametrize(
    ("off", "on", "settings_", "error"),
    [
        ([], [], {}, InsufficientSamples),
        ([np.zeros((1, 3), int)], [np.zeros((4, 3), int)], {}, InsufficientSamples),
        ([np.zeros((4, 3), int)], [], {}, InvalidSetting),
        ([np.zeros((4, 3), int)], [np.zeros((4, 2), int)], {}, InvalidSetting),
        ([np.zeros((4, 0), int)], [np.zeros((4, 0), int)], {}, InvalidSetting),
        ([np.zeros(4, int)], [np.zeros(4, int)], {}, InvalidSetting),
        ([np.zeros((4, 3))], [np.zeros((4, 3))], {}, InvalidSetting),
        ([np.full((4, 3), -1)], [np.zeros((4, 3), int)], {}, InvalidSetting),
        ([np.zeros((4, 3), int)], [np.zeros((4, 3), int)], {"statistics": ()}, InvalidSetting),
        ([np.zeros((4, 3), int)], [np.zeros((4, 3), int)], {"statistics": ("mode", "mode")}, InvalidSetting),
        ([np.zeros((4, 3), int)], [np.zeros((4, 3), int)], {"statistics": ("chi2",)}, UnknownName),
        ([np.zeros((4, 3), int)], [np.zeros((4, 3), int)], {"num_permutations": 0}, InvalidSetting),
        ([np.zeros((4, 3), int)], [np.zeros((4, 3), int)], {"num_permutations": 78}, ResolutionTooCoarse),
        ([np.zeros((4, 3), int)], [np.zeros((4, 3), int)], {"level": 1.0}, InvalidSetting),
    ],
)
def test_what_cannot_be_tested_is_refused(off, on, settings_, error):
    with pytest.raises(error):
        family(off, on, **settings_)


def test_the_coarsest_resolution_that_can_reject_is_enough():
    tokens = np.arange(80).reshape(20, 4) % 7
    assert family([tokens], [tokens], num_permutations=79).num_permutations == 79
