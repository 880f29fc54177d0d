import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.multiplicity import ADJUST, harmonic

P_VALUES = np.array([
    0.838541367553, 0.642193923795, 0.680845947633, 0.967833824309, 0.71626938238,
    0.177096952723, 5.23656777208e-05, 0.0202732688798, 0.00028140506198, 0.0149877310796,
])  # fmt: skip
FROM_R = {
    # R, package multtest, mt.rawp2adjp, in the order of falling evidence; as quoted in statsmodels' test_multi.py.
    "bonferroni": [5.23656777e-04, 2.81405062e-03, 1.49877311e-01, 2.02732689e-01, 1, 1, 1, 1, 1, 1],
    "holm": [5.23656777e-04, 2.53264556e-03, 1.19901849e-01, 1.41912882e-01, 1, 1, 1, 1, 1, 1],
    "bh": [5.23656777e-04, 1.40702531e-03, 4.99591036e-02, 5.06831722e-02, 3.54193905e-01, 8.95336728e-01,
           8.95336728e-01, 8.95336728e-01, 9.31712631e-01, 9.67833824e-01],
    "by": [1.53377407e-03, 4.12113245e-03, 1.46328628e-01, 1.48449402e-01, 1, 1, 1, 1, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize("method", FROM_R)
def test_adjusted_values_are_those_of_r(method):
    assert np.sort(ADJUST[method](P_VALUES)) == pytest.approx(FROM_R[method], rel=1e-6)


def by_definition(p: np.ndarray, method: str) -> np.ndarray:
    m = len(p)
    order = np.argsort(p)
    ranks = np.arange(1, m + 1)
    if method == "bonferroni":
        return np.minimum(p * m, 1)
    if method == "holm":
        steps = np.maximum.accumulate(p[order] * (m - ranks + 1))
    else:
        cost = harmonic(m) if method == "by" else 1.0
        steps = np.minimum.accumulate((p[order] * m * cost / ranks)[::-1])[::-1]
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(steps, 1)
    return adjusted


@pytest.mark.parametrize("method", ADJUST)
@settings(deadline=None, max_examples=20)
@given(p=arrays(np.float64, st.integers(1, 40), elements=st.floats(0, 1)))
def test_adjusted_values_follow_the_definition(method, p):
    assert ADJUST[method](p) == pytest.approx(by_definition(p, method))


def test_harmonic_is_the_sum_of_reciprocals():
    assert harmonic(1) == 1
    assert harmonic(4) == pytest.approx(25 / 12)


@pytest.mark.parametrize("method", ADJUST)
def test_nothing_and_nonsense_are_refused(method):
    with pytest.raises(InsufficientSamples):
        ADJUST[method](np.array([]))
    for bad in (np.nan, -0.1, 1.1):
        with pytest.raises(InvalidSetting):
            ADJUST[method](np.array([0.5, bad]))
