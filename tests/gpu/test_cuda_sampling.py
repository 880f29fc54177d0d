"""Fused acceptance on the GPU: the reference's law and tokens, on the same coins, without probabilities in memory.

Where a token differs from the reference's, a coin must lie within float32 rounding of the value at which the outcome
changes (`NEAR`), and such requests must be few (`MAX_NEAR`): on 64 requests of at most 6 coins, each within 2e-5 of one
of some thousand steps of weight, under one is expected, and most cases have none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput
from equivtest.kernels.checks import raise_refusal
from equivtest.kernels.contract import (
    AcceptanceRule,
    FusedBackend,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)
from equivtest.kernels.cuda import load
from equivtest.kernels.reference import ReferenceBackend
from equivtest.records import SamplingParams
from equivtest.rng import Purpose, uniforms
from tests.gpu.fused_calls import LAWS, Call, make_call
from tests.kernels.test_law_properties import cut_distance

pytestmark = pytest.mark.gpu

NEAR = 2e-5
MAX_NEAR = 3
FLAT = (
    SamplingParams(),
    SamplingParams(top_p=0.95),
    SamplingParams(top_k=20_000),
    SamplingParams(top_k=20_000, top_p=0.9),
    SamplingParams(min_p=0.01),
    SamplingParams(temperature=0.9, top_p=0.99, min_p=0.01),
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def backend() -> FusedBackend:
    return load()


def expected_of(call: Call, target: Tensor, rule: AcceptanceRule) -> SpecAccept:
    """The reference's result on its own laws."""
    if rule == "chain":
        scratch = SpecScratch(*call.drafts.shape, target.shape[-1], "cuda")
        return ReferenceBackend().spec_accept(
            call.drafts, call.num_draft, target, call.q, call.streams, scratch=scratch
        )
    batch, width = target.shape[:2]
    batch_rows, slots = call.rows()
    streams = Streams(call.streams.keys[batch_rows], call.streams.positions[batch_rows] + slots)
    drawn = torch.full((batch, width), -1, device="cuda")
    out = torch.empty(len(slots), dtype=torch.int64, device="cuda")
    drawn[batch_rows, slots] = ReferenceBackend().sample(target[batch_rows, slots], streams, out=out)
    columns = torch.arange(width, device="cuda")
    matches = (drawn[:, :-1] == call.drafts) & (columns[:-1] < call.num_draft[:, None])
    emitted = matches.cumprod(1).sum(1)
    tokens = drawn.masked_fill(columns > emitted[:, None], -1)
    return SpecAccept(tokens, emitted.int(), matches.sum(1).int())


def nearest_boundary(call: Call, target: Tensor, rule: AcceptanceRule, b: int, emitted: int) -> float:
    """Of request b: the least distance of one of its coins from the value at which the outcome changes."""
    num_draft = int(call.num_draft[b])
    key, position = call.streams.keys[b : b + 1].cpu().numpy(), int(call.streams.positions[b])
    laws = target[b].double().cpu().numpy()
    q = None if call.q is None else call.q[b].double().cpu().numpy()

    def coin(slot: int, purpose: Purpose) -> float:
        return float(uniforms(key, np.array([position + slot]), purpose)[0])

    def to_step(weights: np.ndarray, u: float) -> float:
        return float(np.abs(weights.cumsum()[:-1] / weights.sum() - u).min(initial=1.0))

    if rule == "match":
        return min(to_step(laws[slot], coin(slot, Purpose.PLAIN)) for slot in range(num_draft + 1))
    distance = 1.0
    for slot in range(num_draft):
        draft = int(call.drafts[b, slot])
        q_draft = 1.0 if q is None else q[slot, draft]
        distance = min(distance, abs(coin(slot, Purpose.ACCEPT) * q_draft - laws[slot, draft]) / q_draft)
    last, weights = emitted, laws[emitted].copy()
    purpose = Purpose.BONUS if num_draft else Purpose.PLAIN
    if last < num_draft:
        purpose = Purpose.RECOVER
        if q is None:
            weights[int(call.drafts[b, last])] = 0
        else:
            weights = np.maximum(weights - q[last], 0)
    return min(distance, to_step(weights, coin(last, purpose)))


def assert_same_tokens(call: Call, actual: SpecAccept, rule: AcceptanceRule) -> None:
    target = call.target_probs()
    expected = expected_of(call, target, rule)
    assert actual.refusal is not None
    assert actual.refusal.tolist() == [0, 0, 0]
    same = torch.ones(len(call.num_draft), dtype=torch.bool, device="cuda")
    for column, reference_column in zip(actual[:3], expected[:3], strict=True):
        same &= (column == reference_column).view(len(same), -1).all(dim=1)
    different = (~same).nonzero()[:, 0].tolist()
    told = {
        b: (
            nearest_boundary(call, target, rule, b, int(expected.emitted[b])),
            actual.output_token_ids[b].tolist(),
            expected.output_token_ids[b].tolist(),
        )
        for b in different
    }
    far = {b: entry for b, entry in told.items() if entry[0] > NEAR}
    assert far == {}, "request: (distance of its nearest coin from a boundary, tokens, tokens of the reference)"
    assert len(different) <= MAX_NEAR, told


@DTYPES
@pytest.mark.parametrize(("rule", "with_q"), [("chain", False), ("chain", True), ("match", False)])
def test_fused_acceptance_puts_out_the_reference_s_tokens(
    backend: FusedBackend, dtype: torch.dtype, rule: AcceptanceRule, with_q: bool
) -> None:
    """60 ragged requests, each of ten laws with each of 0 to 5 drafts."""
    call = make_call(49_152, 60, 5, dtype=dtype, with_q=with_q)
    result = call.fused(backend, rule)
    assert_same_tokens(call, result, rule)
    assert len(set(result.emitted.tolist())) > 2


@DTYPES
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 1021, 49_153, 151_936, 262_144])
def test_every_vocabulary_size_puts_out_the_reference_s_tokens(
    backend: FusedBackend, vocab_size: int, dtype: torch.dtype
) -> None:
    call = make_call(vocab_size, 20, 2, dtype=dtype)
    assert_same_tokens(call, call.fused(backend), "chain")
    call = make_call(vocab_size, 20, 1, dtype=dtype, with_q=True, seed=1)
    assert_same_tokens(call, call.fused(backend), "chain")


@DTYPES
@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5])
def test_flat_laws_that_no_shared_memory_holds_put_out_the_reference_s_tokens(
    backend: FusedBackend, scale: float, dtype: torch.dtype
) -> None:
    """In float32 a row of 49,152 nearly equal weights has a step within 2e-5 of every coin, so that only tokens next to
    each other may differ, and there is no limit on how many; bfloat16 has few distinct values, and ties are exact."""
    call = make_call(49_152, 24, 2, laws=FLAT, dtype=dtype, scale=scale)
    actual, expected = call.fused(backend), expected_of(call, call.target_probs(), "chain")
    assert torch.equal(actual.emitted, expected.emitted)
    assert torch.equal(actual.acceptance_telemetry, expected.acceptance_telemetry)
    kept_apart = (actual.output_token_ids - expected.output_token_ids).abs().amax(dim=1)
    assert int((kept_apart > 3).sum()) == 0, kept_apart.tolist()
    assert int((kept_apart > 0).sum()) <= 4, kept_apart.tolist()


@pytest.mark.parametrize("params", [*LAWS, *FLAT], ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "scale"), [(1000, 3.0), (32_003, 3.0), (32_003, 0.01), (5000, 40.0), (151_936, 3.0)]
)
def test_the_law_is_the_reference_s(
    backend: FusedBackend, params: SamplingParams, vocab_size: int, scale: float
) -> None:
    """The same tokens kept, and probabilities within what float32's rounding of z, up to 250 here, does to exp(z)."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(16, vocab_size, generator=generator) * scale
    logits[8:, ::97] += torch.randn(logits[8:, ::97].shape, generator=generator).abs() * 3 * scale
    logits = logits[torch.tensor([cut_distance(row, params) > 1e-6 for row in logits])]
    assert len(logits) >= 4
    rows = RowParams.of([params] * len(logits), "cuda")
    actual = backend.verify_probs(logits.cuda(), rows, out=torch.full(logits.shape, torch.nan, device="cuda"))
    expected = ReferenceBackend().verify_probs(logits.cuda(), rows, out=torch.empty(logits.shape, device="cuda"))
    assert torch.equal(actual > 1e-36, expected > 1e-36)
    torch.testing.assert_close(actual, expected, rtol=4e-5, atol=1e-36)
    torch.testing.assert_close(actual.double().sum(dim=1).cpu(), torch.ones(len(logits)).double(), rtol=0, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("params", [SamplingParams(top_k=10), SamplingParams(top_p=0.3), SamplingParams(top_k=1)])
def test_tokens_that_tie_at_the_cut_are_all_kept(
    backend: FusedBackend, params: SamplingParams, dtype: torch.dtype
) -> None:
    """3 tokens at 2, 5,000 at 1 and 20,000 at 0: the cut falls among the first two kinds."""
    row = torch.zeros(49_152)
    order = torch.randperm(49_152, generator=torch.Generator().manual_seed(1))
    row[order[:3]], row[order[3:5003]], row[order[25_003:]] = 2.0, 1.0, -30.0
    logits = row[None].to("cuda", dtype)
    rows = RowParams.of([params], "cuda")
    out = backend.verify_probs(logits, rows, out=torch.empty(1, 49_152, device="cuda"))
    expected = ReferenceBackend().verify_probs(logits, rows, out=torch.empty(1, 49_152, device="cuda"))
    assert int((out > 0).sum()) == {10: 5003, 1: 3}.get(params.top_k, int((expected > 0).sum()))
    assert torch.equal(out > 0, expected > 0)


@DTYPES
@pytest.mark.parametrize("vocab_size", [31, 1021, 49_152])
def test_masked_tokens_are_never_put_out(backend: FusedBackend, vocab_size: int, dtype: torch.dtype) -> None:
    """A third of each row is left, fewer than top_k in the first two laws."""
    laws = tuple(SamplingParams(top_k=vocab_size // 2, top_p=top_p) for top_p in (1.0, 0.9)) + LAWS
    call = make_call(vocab_size, 24, 2, laws=laws, dtype=dtype)
    masked = torch.arange(vocab_size, device="cuda") % 3 != 1
    call.logits[:, masked] = -math.inf
    result = call.fused(backend)
    assert_same_tokens(call, result, "chain")
    tokens = result.output_token_ids[result.output_token_ids >= 0]
    assert not masked[tokens].any()


def test_greedy_takes_the_lowest_id_of_a_tie(backend: FusedBackend) -> None:
    call = make_call(49_152, 4, 1, laws=(SamplingParams(temperature=0.0),), dtype=torch.bfloat16)
    call.logits[:, [48_000, 40_001, 31]] = 60.0
    call.drafts[:] = torch.tensor([[31], [31], [31], [40_001]])
    result = call.fused(backend)
    assert result.output_token_ids.tolist() == [[31, -1], [31, 31], [31, -1], [31, -1]]


def test_dense_acceptance_and_sampling_put_out_the_reference_s_tokens(backend: FusedBackend) -> None:
    """spec_accept and sample take the same float32 probabilities here, so every token is the same."""
    call = make_call(49_152, 48, 3, with_q=True)
    target = call.target_probs()
    for q in (None, call.q):
        args = (call.drafts, call.num_draft, target, q, call.streams)
        actual = backend.spec_accept(*args, scratch=call.scratch)
        expected = ReferenceBackend().spec_accept(*args, scratch=SpecScratch(48, 3, 49_152, "cuda"))
        for column, reference_column in zip(actual[:3], expected[:3], strict=True):
            assert torch.equal(column, reference_column)
    for purpose in Purpose:
        drawn = [
            way.sample(
                target[:, 0].contiguous(), call.streams, out=torch.empty_like(call.drafts[:, 0]), purpose=purpose
            )
            for way in (backend, ReferenceBackend())
        ]
        assert torch.equal(*drawn)


REFUSED: dict[str, tuple[Callable[[Call], None], str, int, float]] = {
    "NaN": (lambda call: put(call.logits, (4, 777), math.nan), "NaN", 4, math.nan),
    "NaN in the last place": (lambda call: put(call.logits, (4, -1), math.nan), "NaN", 4, math.nan),
    "plus infinity": (lambda call: put(call.logits, (3, 0), math.inf), "inf", 3, math.inf),
    "no finite logit": (lambda call: put(call.logits, 5, -math.inf), "finite", 5, -math.inf),
    "overflow": (lambda call: put(call.params.temperature, 0, 1e-40), "overflows", 0, math.inf),
    "draft id too large": (lambda call: put(call.drafts, (1, 0), 1021), "draft id", 1, 1021),
    "draft id negative": (lambda call: put(call.drafts, (1, 0), -1), "draft id", 1, -1),
    "too many drafts": (lambda call: put(call.num_draft, 2, 3), "num_draft", 2, 3),
    "negative drafts": (lambda call: put(call.num_draft, 2, -1), "num_draft", 2, -1),
    "row past the end": (lambda call: put(call.row_start, 1, 10**6), "row_start", 1, 10**6),
    "negative row": (lambda call: put(call.row_start, 1, -5), "row_start", 1, -5),
    "NaN q": (lambda call: put(call.q, 1, math.nan), "draft probabilities", 1, math.nan),
}


def put(tensor: Tensor | None, index: Any, value: float) -> None:
    assert tensor is not None
    tensor[index] = value


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_values_are_told_with_their_row_and_harm_no_other_request(backend: FusedBackend, case: str) -> None:
    """Requests have 0, 1, 2 and 0 drafts: rows 0; 1, 2; 3, 4, 5; 6 of the logits. The last request is never wrong."""
    change, problem, row, value = REFUSED[case]
    plain = (SamplingParams(temperature=0.8, top_p=0.95),)
    good = make_call(1021, 4, 2, laws=plain, with_q=True).fused(backend)
    call = make_call(1021, 4, 2, laws=plain, with_q=True)
    change(call)
    result = call.fused(backend)
    assert result.refusal is not None
    with pytest.raises(InvalidKernelInput, match=problem) as caught:
        raise_refusal("accept_logits", result.refusal.cpu().numpy())
    assert caught.value.row == row
    assert caught.value.value == pytest.approx(value, nan_ok=True)
    assert ((result.output_token_ids >= -1) & (result.output_token_ids < 1021)).all()
    assert torch.equal(result.output_token_ids[3], good.output_token_ids[3])
    again = make_call(1021, 4, 2, laws=plain, with_q=True).fused(backend)
    assert again.refusal is not None
    assert again.refusal.tolist() == [0, 0, 0]
    assert torch.equal(again.output_token_ids, good.output_token_ids)


def test_the_lowest_wrong_row_is_told(backend: FusedBackend) -> None:
    call = make_call(1021, 40, 2)
    call.logits[[9, 33, 70]] = math.nan
    refusal = call.fused(backend).refusal
    assert refusal is not None
    assert refusal[:2].tolist() == [1, 9]


@DTYPES
def test_a_call_gives_the_same_bits_every_time_and_a_request_the_same_tokens_alone(
    backend: FusedBackend, dtype: torch.dtype
) -> None:
    call = make_call(49_152, 30, 2, dtype=dtype, laws=(*LAWS, *FLAT))
    first = call.fused(backend)
    for _ in range(5):
        for column, before in zip(call.fused(backend), first, strict=True):
            assert torch.equal(column, before)
    for b in range(30):
        start, rows = int(call.row_start[b]), int(call.num_draft[b]) + 1
        alone = dataclasses.replace(
            call,
            logits=call.logits[start : start + rows].clone(),
            row_start=torch.zeros_like(call.row_start[:1]),
            params=RowParams(*(column[b : b + 1] for column in call.params)),
            drafts=call.drafts[b : b + 1],
            num_draft=call.num_draft[b : b + 1],
            streams=Streams(*(column[b : b + 1] for column in call.streams)),
        ).fused(backend)
        assert torch.equal(alone.output_token_ids[0], first.output_token_ids[b])
    out = [
        backend.verify_probs(
            call.logits, call.params.take(call.rows()[0]), out=torch.empty(call.logits.shape, device="cuda")
        )
        for _ in range(2)
    ]
    assert torch.equal(*out)


@pytest.mark.parametrize("rule", ["chain", "match"])
def test_a_graph_replays_on_new_inputs(backend: FusedBackend, rule: AcceptanceRule) -> None:
    """Captured on one batch, replayed on another in the same memory, also after one that is refused."""
    held, other = (make_call(49_152, 16, 3, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    expected = other.fused(backend, rule)
    held.fused(backend, rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = backend.accept_logits(
            held.logits, held.row_start, held.params, held.drafts, held.num_draft, None, held.streams,
            rule=rule, scratch=held.scratch,
        )  # fmt: skip
    assert result.refusal is not None
    held.logits.fill_(math.nan)
    graph.replay()
    assert result.refusal[0].item() == 1
    held.logits.copy_(other.logits)
    held.drafts.copy_(other.drafts)
    graph.replay()
    for column, eager in zip(result, expected, strict=True):
        assert column is not None
        assert torch.equal(column, eager)
