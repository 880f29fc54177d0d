"""verify_probs: the backends against each other and against float64, on random rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from equivtest.kernels.reference import ReferenceBackend
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams

from .calls import law

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=1.3, top_k=700, top_p=0.999, min_p=1e-4),
    SamplingParams(temperature=3.0, top_p=0.5),
    SamplingParams(temperature=0.0),
)


def cut_distance(logits: Tensor, params: SamplingParams) -> float:
    """How far the row is from a tie of rounding: the least relative distance of any top-p or min-p cut, in float64.

    The z are the float32 ones, as the law says, so top-k has no such distance.
    """
    if params.greedy:
        return 1.0
    z = (logits / params.temperature).double()
    levels, inverse = torch.unique(z[z.isfinite()], return_inverse=True)
    e = (levels - levels.max()).exp()
    counts = torch.bincount(inverse, minlength=len(levels))
    levels, e, counts = levels.flip(0), e.flip(0), counts.flip(0)
    distance = 1.0
    if params.min_p > 0:
        distance = min(distance, float(((e - params.min_p).abs() / params.min_p).min()))
    if params.top_p < 1:
        if params.top_k:
            kept = torch.cat([torch.ones(1, dtype=torch.bool), counts.cumsum(0)[:-1] < params.top_k])
            e, counts = e[kept], counts[kept]
        mass = (e * counts).cumsum(0)
        distance = min(distance, float((mass / mass[-1] - np.float32(params.top_p)).abs().min()))
    return distance


def assert_same_law(actual: Tensor, expected: Tensor) -> None:
    """The same tokens kept, the same probabilities; below float32's normal range a backend may flush to 0."""
    assert torch.equal(actual > 1e-37, expected > 1e-37)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-37)


def rows_of(scale: float, vocab_size: int, seed: int) -> Tensor:
    """16 rows: half of them normal, half with a heavy upper tail as a language model's."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, vocab_size, generator=generator) * scale
    logits[8:, ::97] += torch.randn(logits[8:, ::97].shape, generator=generator).abs() * 3 * scale
    return logits


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize(("vocab_size", "scale"), [(1000, 3.0), (32_003, 3.0), (32_003, 0.01), (5000, 40.0)])
def test_cpp_computes_the_law_of_the_reference(params: SamplingParams, vocab_size: int, scale: float) -> None:
    logits = rows_of(scale, vocab_size, seed=vocab_size)
    safe = torch.tensor([cut_distance(row, params) > 1e-6 for row in logits])
    assert safe.sum() >= (8 if scale == 0.01 else 14)  # nearly flat rows of many tokens lie close to some cut
    actual, expected = law(get_backend("cpp"), logits, params), law(get_backend("reference"), logits, params)
    assert_same_law(actual[safe], expected[safe])


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_cpp_is_as_close_to_float64_as_torch_is(params: SamplingParams) -> None:
    logits = rows_of(3.0, 8000, seed=4)
    logits = logits[torch.tensor([cut_distance(row, params) > 1e-5 for row in logits])]
    exact = law(ReferenceBackend(torch.float64), logits, params)
    torch_error = (law(get_backend("reference"), logits, params).double() - exact).abs().max()
    cpp_error = (law(get_backend("cpp"), logits, params).double() - exact).abs().max()
    assert len(logits) >= 12
    assert cpp_error <= 2 * torch_error + 1e-7


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    # Quarters make ties, and values at or near one another that no random matrix has.
    logits=st.lists(st.integers(-60, 60).map(lambda n: n / 4) | st.floats(-30, 30, width=32), min_size=1, max_size=150),
    masked=st.sets(st.integers(0, 149), max_size=20),
    temperature=st.sampled_from([0.0, 0.125, 0.7, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 7, 20, 64, 149, 1000]),
    top_p=st.sampled_from([0.0078125, 0.3, 0.5, 0.9, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]),
)
def test_cpp_agrees_with_the_reference_whatever_the_row(
    logits: list[float], masked: set[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = torch.tensor(logits, dtype=torch.float32)
    row[[i for i in masked if i < len(row)]] = -torch.inf
    assume(bool(row.isfinite().any()))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if min_p != 1.0:  # min_p 1 is exact: only e == 1 reaches it
        assume(cut_distance(row, params) > 1e-6)
    actual, expected = law(get_backend("cpp"), row[None], params), law(get_backend("reference"), row[None], params)
    assert_same_law(actual, expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from([70, 640, 3000]),
    spread=st.sampled_from([0.0, 1e-6, 1.0, 30.0, 1e30]),
    top_k=st.integers(1, 3000),
)
def test_cpp_finds_the_kth_largest_in_rows_of_any_spread(seed: int, vocab_size: int, spread: float, top_k: int) -> None:
    row = np.random.default_rng(seed).standard_cauchy(vocab_size).round(1).astype(np.float32) * np.float32(spread)
    row = np.where(np.isfinite(row), row, 0).clip(-3e38, 3e38)
    kept = law(get_backend("cpp"), torch.tensor(row)[None], SamplingParams(top_k=top_k))[0].numpy() > 0
    cut = np.sort(row)[::-1][min(top_k, vocab_size) - 1]
    visible = row - row.max() > -80  # below that a kept token's probability is 0 in float32
    np.testing.assert_array_equal(kept[visible], (row >= cut)[visible])
