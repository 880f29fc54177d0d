"""What the law family must not depend on, and what it refuses."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.records import Origin
from equivtest.stats.law import LawMargins, LawResult, law_family
from equivtest.stats.law_counts import duplicates, support_by_origin
from equivtest.stats.law_martingale import bias, lag, surprisal
from equivtest.stats.law_uniform import dkw_half_width, neighbours, pit, rows, sup_distance
from equivtest.stats.scored import ScoredTokens
from tests.stats.law_sampler import Fault, make_world, simulate

COLUMNS = tuple(field.name for field in dataclasses.fields(ScoredTokens))


@cache
def tokens(epsilon: float = 0.0) -> ScoredTokens:
    return simulate(
        make_world(5), 1, fault=Fault(epsilon=epsilon), samples_per_group=40, max_draft=2, seed=31
    ).replication(0)


def changed(scored: ScoredTokens, **columns: object) -> ScoredTokens:
    return dataclasses.replace(scored, **columns)  # type: ignore[arg-type]


def reordered(scored: ScoredTokens, order: np.ndarray) -> ScoredTokens:
    """The same samples one after the other in another order."""
    starts = np.flatnonzero(~scored.continues)
    ends = np.append(starts[1:], scored.num_tokens)
    rows_of = np.concatenate([np.arange(starts[i], ends[i]) for i in order])
    columns = {name: getattr(scored, name) for name in COLUMNS}
    return ScoredTokens(**{name: values[rows_of] for name, values in columns.items() if values is not None})


def assert_same(one: LawResult, other: LawResult) -> None:
    assert [e.name for e in one.evidence] == [e.name for e in other.evidence]
    for left, right in zip(one.evidence, other.evidence, strict=True):
        assert (left.num_tokens, left.df, left.method) == (right.num_tokens, right.df, right.method)
        for field in ("statistic", "p_value", "estimate", "ci_low", "ci_high"):
            values = getattr(left, field), getattr(right, field)
            assert values == (None, None) or values[0] == pytest.approx(values[1], rel=1e-9, abs=1e-9), left.name


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_the_order_of_samples_does_not_matter(seed: int) -> None:
    scored = tokens(0.1)
    order = np.random.default_rng(seed).permutation(int((~scored.continues).sum()))
    assert_same(law_family(scored, "on"), law_family(reordered(scored, order), "on"))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_the_names_of_tokens_samples_and_batches_do_not_matter(seed: int) -> None:
    scored = tokens(0.1)
    rng = np.random.default_rng(seed)
    renamed = changed(
        scored,
        token_id=rng.permutation(100)[scored.token_id],
        sample=rng.permutation(10_000)[scored.sample],
        batch=scored.batch + int(rng.integers(1_000)),
        group=scored.group * 7 + 3,
    )
    assert_same(law_family(scored, "on"), law_family(renamed, "on"))


@given(values=st.lists(st.floats(0, 1), min_size=100, max_size=300))
@settings(max_examples=50, deadline=None)
def test_the_supremum_distance_and_chi_squared_agree_with_scipy(values: list[float]) -> None:
    ordered = np.array(values)
    assert sup_distance(ordered) == pytest.approx(stats.kstest(ordered, "uniform").statistic, abs=1e-12)
    scored = tokens().take(np.arange(tokens().num_tokens) < len(values))
    evidence = pit(changed(scored, pit_rank=ordered), "on", order="rank")
    counts = np.histogram(np.minimum((ordered * 20).astype(int), 19), bins=np.arange(21))[0]
    expected = stats.chisquare(counts)
    assert evidence.statistic == pytest.approx(expected.statistic)
    assert evidence.p_value == pytest.approx(expected.pvalue)


def test_bias_is_the_textbook_z_when_every_draft_has_one_probability() -> None:
    scored = tokens()
    scored = changed(scored, q_mean=np.where(scored.has_draft, 0.4, 0.0), q_variance=scored.has_draft * 0.24)
    kept, offered = float(scored.q_token.sum()), int(scored.has_draft.sum())
    evidence = bias(scored, "on", margin=0.01)
    assert evidence.statistic == pytest.approx((kept - 0.4 * offered) / np.sqrt(offered * 0.24))
    assert evidence.estimate == pytest.approx(kept / offered - 0.4)
    assert (evidence.margin, evidence.num_tokens) == (0.01, offered)


def test_certain_and_impossible_drafts_neither_count_nor_break_the_bias() -> None:
    scored = tokens()
    certain = scored.has_draft & (scored.position % 2 == 0)
    padded = changed(
        scored,
        q_token=np.where(certain, 1.0, scored.q_token),
        q_mean=np.where(certain, 1.0, scored.q_mean),
        q_variance=np.where(certain, 0.0, scored.q_variance),
    )
    assert bias(padded, "on").num_tokens < bias(scored, "on").num_tokens
    assert np.isfinite(bias(padded, "on").statistic)


def test_a_token_off_the_support_is_counted_by_support_and_by_nothing_else() -> None:
    scored = tokens()
    plain = int(np.argmax(scored.slot == -1))
    one = np.arange(scored.num_tokens) == plain
    off = changed(scored, p_token=np.where(one, 0.0, scored.p_token), support_violation=one)
    result = law_family(off, "on")
    assert [e.name for e in result.flagged()] == ["support"]
    assert result.named("support").statistic == 1
    assert support_by_origin(result.named("support")) == {list(Origin)[int(scored.origin[plain])]: 1}
    assert support_by_origin(law_family(scored, "on").named("support")) == {}
    assert surprisal(off, "on", kind="plain").num_tokens == surprisal(scored, "on", kind="plain").num_tokens - 1


def test_neighbouring_rows_are_paired_within_one_step_and_place() -> None:
    scored = tokens()
    left, right = neighbours(scored)
    assert len(left) > 0
    for name in ("batch", "step"):
        assert (getattr(scored, name)[left] == getattr(scored, name)[right]).all()
    assert (np.maximum(scored.slot, 0)[left] == np.maximum(scored.slot, 0)[right]).all()
    assert (scored.batch_row[right] - scored.batch_row[left] == 1).all()
    with pytest.raises(InsufficientSamples, match="rows"):
        rows(changed(scored, batch=scored.sample), "on")


def test_equal_samples_are_counted_in_pairs_and_within_their_group_only() -> None:
    scored = tokens()
    length = int(scored.position.max()) + 1
    first = np.tile(scored.token_id[:length], 5)
    five = changed(scored.take(np.arange(scored.num_tokens) < 5 * length), token_id=first)
    five = changed(five, p_token=np.full(five.num_tokens, 0.1))
    assert duplicates(five, "on").statistic == 10
    assert duplicates(five, "on").p_value < 1e-6
    split = changed(five, group=np.repeat([0, 0, 0, 1, 1], length))
    assert duplicates(split, "on").statistic == 3 + 1
    with pytest.raises(InsufficientSamples, match="duplicates"):
        duplicates(changed(five, group=five.sample), "on")


def test_frequent_texts_are_no_duplicates() -> None:
    scored = tokens()
    length = int(scored.position.max()) + 1
    five = scored.take(np.arange(scored.num_tokens) < 5 * length)
    frequent = changed(five, token_id=np.tile(five.token_id[:length], 5), p_token=np.ones(five.num_tokens))
    assert duplicates(frequent, "on").p_value == 1


def test_small_data_is_refused_and_never_gives_a_number() -> None:
    scored = tokens()
    few = scored.take(scored.sample < 3)
    with pytest.raises(InsufficientSamples, match="law/rank"):
        law_family(few, "on")
    for test in (lambda: bias(few, "on"), lambda: surprisal(few, "on", kind="bonus"), lambda: rows(few, "on")):
        with pytest.raises(InsufficientSamples):
            test()


def test_a_bias_carried_by_a_few_rare_drafts_is_refused() -> None:
    """300 drafts of probability .002: the sum is a Poisson count, and z has no normal tails."""
    scored = tokens()
    rare = changed(scored, q_mean=scored.has_draft * 0.002, q_variance=scored.has_draft * 0.002 * 0.998)
    with pytest.raises(InsufficientSamples, match="bias"):
        bias(rare, "on")


def test_a_lag_without_contrast_is_refused() -> None:
    scored = tokens()
    with pytest.raises(InsufficientSamples, match="lag_recovered"):
        lag(changed(scored, pit_vocab=np.full(scored.num_tokens, 0.5)), "on", previous=Origin.RECOVERED)


def test_greedy_decoding_leaves_what_cannot_vary_out_and_says_so() -> None:
    scored = tokens()
    zeros, ones = np.zeros(scored.num_tokens), np.ones(scored.num_tokens)
    greedy = changed(scored, p_token=ones, entropy=zeros, var_surprisal=zeros, q_mean=scored.q_token, q_variance=zeros)
    result = law_family(greedy, "on")
    assert {"rank", "vocab", "support"} <= {e.name for e in result.evidence}
    assert {"law/bias", "law/surprisal_draft"} <= {error.test.split(" (")[0] for error in result.left_out}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("p_token", np.nan),
        ("p_token", 1.1),
        ("entropy", -1.0),
        ("q_variance", np.inf),
        ("origin", len(Origin)),
        ("token_id", -1),
    ],
)
def test_bad_columns_are_refused_by_name(column: str, value: float) -> None:
    scored = tokens()
    values = getattr(scored, column).copy()
    values[7] = value
    with pytest.raises(InvalidSetting, match=rf"{column}\[7\]"):
        changed(scored, **{column: values})


def test_scattered_samples_and_ragged_columns_are_refused() -> None:
    scored = tokens()
    with pytest.raises(InvalidSetting, match="side by side"):
        changed(scored, sample=scored.position, position=np.zeros(scored.num_tokens))
    with pytest.raises(InvalidSetting, match="rise by 1"):
        changed(scored, position=scored.position * 2)
    with pytest.raises(InvalidSetting, match="one length"):
        changed(scored, slot=scored.slot[1:])
    with pytest.raises(InsufficientSamples):
        scored.take(np.zeros(scored.num_tokens, bool))


def test_margins_reach_the_evidence_that_bears_them() -> None:
    result = law_family(tokens(), "on", margins=LawMargins(bias=0.03, pit=0.04))
    margins = {e.name: e.margin for e in result.evidence if e.margin is not None}
    assert margins == {"bias": 0.03, "rank": 0.04, "vocab": 0.04}
    with pytest.raises(InvalidSetting, match=r"LawMargins\.pit"):
        LawMargins(pit=0)
    rank = result.named("rank")
    assert rank.ci_high == pytest.approx(rank.estimate + dkw_half_width(rank.num_tokens))
