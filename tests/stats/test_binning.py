import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats import binning
from equivtest.stats.binning import count_tokens, merge_bins

tokens = st.lists(st.integers(0, 6), min_size=2, max_size=60).map(np.array)
cells = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6)


def expand(pairs: list[tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """One cell with the given (off, on) count of token 0, 1, ..."""
    off, on = np.array(pairs).T
    return [np.repeat(np.arange(len(off)), off)], [np.repeat(np.arange(len(on)), on)]


def bins_of(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    table = merge_bins(count_tokens(*expand(pairs)))
    return list(zip(table.off.tolist(), table.on.tolist(), strict=True))


@settings(deadline=None, max_examples=50)
@given(cells)
def test_counts_are_those_of_each_cell_and_arm(pairs):
    table = count_tokens([off for off, _ in pairs], [on for _, on in pairs])
    for cell, (off, on) in enumerate(pairs):
        entries = slice(table.starts[cell], table.starts[cell + 1])
        expected = sorted((int((off == t).sum()), int((on == t).sum())) for t in set(off.tolist()) | set(on.tolist()))
        assert sorted(zip(table.off[entries].tolist(), table.on[entries].tolist(), strict=True)) == expected
        assert table.num_off[cell] == len(off)
        assert table.num_on[cell] == len(on)


@settings(deadline=None, max_examples=50)
@given(cells, st.integers(1, 40))
def test_counting_in_chunks_changes_nothing(pairs, chunk):
    off, on = [off for off, _ in pairs], [on for _, on in pairs]
    whole = count_tokens(off, on)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binning, "_CHUNK_SAMPLES", chunk)
        pieces = count_tokens(off, on)
    for field in ("num_off", "num_on", "starts", "off", "on"):
        assert np.array_equal(getattr(whole, field), getattr(pieces, field)), field


@settings(deadline=None, max_examples=50)
@given(cells)
def test_bins_hold_every_sample_and_are_large_enough(pairs):
    table = merge_bins(count_tokens([off for off, _ in pairs], [on for _, on in pairs]))
    for cell, (off, on) in enumerate(pairs):
        entries = slice(table.starts[cell], table.starts[cell + 1])
        assert table.off[entries].sum() == len(off)
        assert table.on[entries].sum() == len(on)
        if table.num_entries[cell] > 1:
            share = table.total[entries] / (len(off) + len(on))
            assert (share * min(len(off), len(on)) >= 5).all()


def test_token_expected_five_times_keeps_its_bin_and_a_large_rest_has_its_own():
    # 50 an arm: a total of 10 is expected 5 times, a total of 9 only 4.5 times; the rest 9 + 2 = 11 stands alone.
    assert bins_of([(40, 39), (5, 5), (4, 5), (1, 1)]) == [(40, 39), (5, 6), (5, 5)]


def test_small_rest_joins_the_smallest_kept_bin():
    assert bins_of([(35, 36), (12, 10), (3, 4)]) == [(35, 36), (15, 14)]


def test_small_rest_joins_the_tied_bin_that_gives_the_smaller_statistic():
    # Both kept bins total 47; the rest (5, 1) evens out (21, 26) and would widen (24, 23).
    assert sorted(bins_of([(24, 23), (21, 26), (5, 1)])) == [(24, 23), (26, 27)]


def test_without_a_kept_bin_everything_is_one_bin():
    assert bins_of([(1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (0, 1)]) == [(3, 3)]


def test_arm_sizes_decide_by_the_smaller_arm():
    # 20 against 200 samples: a total of 55 is expected 5 times in the smaller arm, a total of 54 is not.
    assert len(bins_of([(15, 150), (5, 50)])) == 2
    assert len(bins_of([(15, 151), (5, 49)])) == 1


def test_huge_token_ids_are_counted():
    ids = np.array([2**62, 5, 2**62, 5, 7])
    table = count_tokens([ids] * 3, [ids] * 3)
    assert table.off.tolist() == [2, 2, 1] * 3


def test_too_few_samples_name_the_arm_and_cell():
    good, short = np.array([1, 2, 3]), np.array([1])
    with pytest.raises(InsufficientSamples, match="arm on of cell 1: 1 samples, needs at least 2"):
        count_tokens([good, good], [good, short])
    with pytest.raises(InsufficientSamples, match="arm off of cell 0: 0 samples"):
        count_tokens([good[:0]], [good])
    with pytest.raises(InsufficientSamples, match="cells"):
        count_tokens([], [])


@pytest.mark.parametrize(
    ("off", "problem"),
    [
        ([np.array([1, -1])], "padding"),
        ([np.array([1.0, 2.0])], "integer"),
        ([np.array([[1], [2]])], "flat"),
        ([np.array([1, 2])] * 2, "same in both arms"),
    ],
)
def test_malformed_input_is_refused(off, problem):
    shape = (2, 1) if off[0].ndim == 2 else (2,)
    with pytest.raises(InvalidSetting, match=problem):
        count_tokens(off, [np.ones(shape, np.int64)])
