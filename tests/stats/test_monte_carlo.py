import numpy as np
import pytest
from scipy import stats

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.monte_carlo import detector, monte_carlo_power, power_curve, search_smallest_bias
from tests.stats.sequences import plain, prefix_laws, speculative

LAWS = [prefix_laws(6, np.random.default_rng(80 + index), vocab=6) for index in range(2)]
FAMILIES = ("marginal", "max_z", "mmd", "joint")


def simulate(bias, rng):
    off = [plain(law, 60, rng) for law in LAWS]
    return off, [speculative(law, 60, rng, epsilon=bias) for law in LAWS]


def coin(bias, rng):
    """Not samples: one number that the detector below reads."""
    return [np.array([[bias]])], [np.array([[rng.random()]])]


def finds_with_probability_of_bias(off, on, rng):
    return bool(on[0][0, 0] < off[0][0, 0])


def test_every_family_misses_no_bias_and_finds_a_gross_one():
    """30 correct runs are flagged at 5 % (marginal) or 1 % each: more than six come once in 500 draws for the former.
    A bias of .6 is found in every one of 10."""
    detectors = {name: detector(name, num_permutations=999) for name in FAMILIES}
    rng = np.random.default_rng(81)
    curve = power_curve(simulate, detectors, (0.0, 0.6), num_replications=30, rng=rng)
    for name, (correct, gross) in curve.items():
        assert (correct.bias, gross.bias) == (0.0, 0.6)
        assert correct.num_found <= 6, name
        assert gross.power > 0.9, name


def test_intervals_are_the_exact_ones_and_cover():
    """300 points of 20 replications: the exact 95 % interval covers in at least 91 % of them (once in 2,000 draws)."""
    rng = np.random.default_rng(82)
    covered = 0
    for _ in range(300):
        point = monte_carlo_power(coin, {"coin": finds_with_probability_of_bias}, 0.7, num_replications=20, rng=rng)[
            "coin"
        ]
        assert point.power == point.num_found / 20
        covered += point.ci_low <= 0.7 <= point.ci_high
    assert covered >= 0.91 * 300
    exact = stats.binomtest(point.num_found, 20).proportion_ci(0.95)
    assert (point.ci_low, point.ci_high) == (exact.low, exact.high)


def test_the_search_ends_where_the_power_curve_crosses():
    """Power equals the bias, so .6 is where it crosses .6: 4,000 replications a point, deviation .008, five of them."""
    search = search_smallest_bias(
        coin,
        finds_with_probability_of_bias,
        high=1.0,
        power=0.6,
        tolerance=0.01,
        num_replications=4_000,
        rng=np.random.default_rng(83),
    )
    assert search.missed < search.found <= search.missed + 0.01
    assert search.found == pytest.approx(0.6, abs=0.05)
    assert [point.bias for point in search.points] == sorted(point.bias for point in search.points)
    by_bias = {point.bias: point.power for point in search.points}
    assert by_bias[search.found] >= 0.6


def test_detectors_share_the_samples():
    seen = {"one": [], "other": []}

    def recorder(name):
        def finds(off, on, rng):
            seen[name].append(float(on[0][0, 0]))
            return False

        return finds

    rng = np.random.default_rng(84)
    monte_carlo_power(coin, {name: recorder(name) for name in seen}, 0.5, num_replications=5, rng=rng)
    assert seen["one"] == seen["other"]
    assert len(set(seen["one"])) == 5


def test_a_bias_that_is_never_found_is_refused_and_so_is_nonsense():
    rng = np.random.default_rng(85)
    settings_ = {"num_replications": 20, "rng": rng}
    with pytest.raises(InsufficientSamples):
        search_smallest_bias(coin, finds_with_probability_of_bias, high=0.1, **settings_)
    with pytest.raises(InvalidSetting):
        search_smallest_bias(coin, finds_with_probability_of_bias, low=0.2, high=0.1, **settings_)
    with pytest.raises(InvalidSetting):
        monte_carlo_power(coin, {}, 0.1, num_replications=0, rng=rng)
