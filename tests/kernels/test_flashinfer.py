"""The FlashInfer backend with a fake FlashInfer: how it is wired. What the kernels do: tests/gpu/test_flashinfer.py.

Laws are tested as in test_chain_law.py, 100,000 rows against the exact one at each output position, rejected at
p < 5e-9; at most 60 positions are tested here, so the false-alarm rate of the file is below 1e-6. Seeds are fixed.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from equivtest.errors import InvalidKernelInput, KernelUnavailable, UnsupportedSampling
from equivtest.kernels import flashinfer
from equivtest.kernels.checks import check_attention_batch, check_params_supported
from equivtest.kernels.contract import AttentionBatch, AttentionShape, HostBatch, RowParams, SpecScratch, Streams
from equivtest.kernels.reference import ReferenceBackend
from equivtest.records import SamplingParams

from .chain_law import draw_drafts, p_value, position_laws, tables
from .fake_flashinfer import VERSIONS, OnCpu
from .vendor_calls import chain, explicit, keys, lag_correlation, law

NUM_ROWS = 100_000
REJECT_BELOW = 5e-9
VOCAB = 7


@pytest.fixture(params=VERSIONS)
def backend(request: pytest.FixtureRequest) -> OnCpu:
    return OnCpu(request.param)


def smallest_p_value(output: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    laws = position_laws(p, q)
    return min(p_value(output[:, j], laws[j]) for j in range(output.shape[1]))


def test_without_a_cuda_device_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelUnavailable, match=r"flashinfer.*no usable CUDA device"):
        flashinfer.load()


@pytest.mark.parametrize("error", [ImportError("no module"), RuntimeError("no compiler"), OSError("no driver")])
def test_a_flashinfer_that_cannot_be_imported_is_unavailable_with_the_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    class Failing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.startswith("flashinfer"):
                raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    with pytest.raises(KernelUnavailable, match=rf"{type(error).__name__}: {error}.*equivtest\[cuda\]"):
        flashinfer.load()


def test_a_flashinfer_that_can_be_imported_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    package = ModuleType("flashinfer")
    package.sampling, package.__version__ = OnCpu("0.7.4").fake, "0.7.4"  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", package.sampling)
    assert flashinfer.load().version == "0.7.4"


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
def test_rows_with_few_and_many_drafts_have_the_law(backend: OnCpu, one_hot: bool) -> None:
    p, q = tables(3, one_hot=one_hot, vocab_size=VOCAB, seed=9)
    drafts = draw_drafts(q, NUM_ROWS, np.random.default_rng(9))
    num_draft = np.arange(NUM_ROWS) % 4
    # What stands past num_draft may be anything.
    drafts[np.arange(3) >= num_draft[:, None]] = -5
    result = chain(backend, drafts, p, None if one_hot else q, num_draft=num_draft)
    output, emitted = result.output_token_ids.numpy(), result.emitted.numpy()
    for k in range(4):
        rows = output[num_draft == k]
        assert smallest_p_value(rows[:, : k + 1], p[: k + 1], q[:k]) > REJECT_BELOW
        assert (rows[:, k + 1 :] == -1).all()
    assert ((output >= 0).sum(axis=1) == emitted + 1).all()
    assert (result.acceptance_telemetry.numpy() >= emitted).all()
    assert (result.acceptance_telemetry.numpy() <= num_draft).all()


def test_an_inflated_draft_is_rejected(backend: OnCpu) -> None:
    """The twin: p[d] + .03 in the tensor that the kernel reads."""
    p, q = tables(3, one_hot=True, vocab_size=VOCAB, seed=9)
    drafts = draw_drafts(q, NUM_ROWS, np.random.default_rng(9))
    inflated = p.copy()
    inflated[np.arange(3), drafts[0]] += 0.03
    assert smallest_p_value(chain(backend, drafts, inflated, None).output_token_ids.numpy(), p, q) < REJECT_BELOW


ONE = np.array([0, 1, 0, 0, 0, 0, 0], np.float32)
NEARLY = {eps: np.array([eps, 1, eps, eps, eps, eps, eps], np.float32) for eps in (1e-9, 1e-8)}


@pytest.mark.parametrize(
    ("draft", "p", "q", "coin", "count"),
    [
        (1, ONE, None, 1.0, 2),
        (1, ONE * (1 - 2**-24), None, 1.0, 2),  # as a renormalised law may have it
        (1, ONE, ONE, 1.0, 2),
        (1, NEARLY[1e-8], NEARLY[1e-8], 1.0, 2),
        (0, NEARLY[1e-9], NEARLY[1e-8], 0.5, 0),  # the draft is rejected, and q is larger wherever p is not 1
    ],
)
def test_a_token_is_put_out_where_p_and_q_leave_nothing_to_draw_from(
    backend: OnCpu, draft: int, p: np.ndarray, q: np.ndarray | None, coin: float, count: int
) -> None:
    """The twin: with q as it is the kernel puts out none."""
    backend.fake.coin = coin
    drafts, laws = np.full((3, 2), draft), np.tile(p, (3, 1))
    accepted = chain(backend, drafts, laws, None if q is None else np.tile(q, (2, 1)))
    assert accepted.emitted.tolist() == [count] * 3
    assert accepted.output_token_ids[:, : count + 1].eq(1).all()
    rows = torch.tensor(np.tile(ONE if q is None else q, (1, 2, 1)))
    plain, _, emitted = backend.fake.chain_speculative_sampling(
        rows,
        torch.tensor(drafts[:1]),
        torch.tensor(laws)[None],
        seed=torch.zeros(1).long(),
        offset=torch.zeros(1).long(),
    )
    assert (emitted.item(), plain[0, 0].item()) == (0, -1)


def test_point_masses_of_a_call_are_gone_in_the_next(backend: OnCpu) -> None:
    """Rows, widths and vocabularies that change reuse the memory; a mass left there would take from the residual."""
    scratch = SpecScratch(NUM_ROWS, 3, VOCAB)
    for width, batch in ((3, NUM_ROWS), (1, NUM_ROWS), (2, NUM_ROWS // 2), (3, NUM_ROWS // 4)):
        p, q = tables(width, one_hot=True, vocab_size=VOCAB, seed=20 + width)
        drafts = draw_drafts(q, batch, np.random.default_rng(width))
        output = chain(backend, drafts, p, None, scratch=scratch).output_token_ids.numpy()
        assert smallest_p_value(output, p, q) > REJECT_BELOW


def test_sample_has_the_law_of_its_row(backend: OnCpu) -> None:
    p, _ = tables(1, one_hot=True, vocab_size=300, seed=10)
    probs = torch.tensor(p[1], dtype=torch.float32).expand(20_000, 300)
    streams = Streams(keys(20_000), torch.zeros(20_000, dtype=torch.int64))
    tokens = backend.sample(probs, streams, out=torch.empty(20_000, dtype=torch.int64))
    assert p_value(tokens.numpy(), np.append(p[1], 0.0)) > REJECT_BELOW


def test_no_two_calls_share_a_coin(backend: OnCpu) -> None:
    p, q = tables(3, one_hot=True, vocab_size=VOCAB, seed=9)
    drafts = draw_drafts(q, 8, np.random.default_rng(9))
    streams = Streams(keys(8), torch.zeros(8, dtype=torch.int64))
    for _ in range(3):
        chain(backend, drafts, p, None, num_draft=np.arange(8) % 4)
        backend.sample(torch.full((8, VOCAB), 1 / VOCAB), streams, out=torch.empty(8, dtype=torch.int64))
    assert {name for name, *_ in backend.fake.calls} == {"chain", "sample"}
    used: set[int] = set()
    for _, seeds, offsets, count in backend.fake.calls:
        assert len(seeds) == len(offsets)
        assert len(set(offsets)) == 1
        coins = set(range(offsets[0], offsets[0] + count))
        assert not coins & used
        used |= coins


def test_the_seeds_are_the_rows_keys(backend: OnCpu) -> None:
    streams = Streams(keys(4), torch.zeros(4, dtype=torch.int64))
    backend.sample(torch.full((4, VOCAB), 1 / VOCAB), streams, out=torch.empty(4, dtype=torch.int64))
    assert backend.fake.calls[0][1] == streams.keys.tolist()


def test_the_recovered_token_says_nothing_of_the_next_acceptance(backend: OnCpu) -> None:
    """Fixed seeds; by chance |correlation| exceeds 4 standard errors in 1 of 16,000 streams."""
    correlation, num_pairs = lag_correlation(explicit(backend), "cpu")
    assert abs(correlation) < 4 / num_pairs**0.5


def test_a_new_backend_draws_the_same_and_a_second_call_draws_others(backend: OnCpu) -> None:
    p, q = tables(3, one_hot=True, vocab_size=VOCAB, seed=9)
    drafts = draw_drafts(q, 200, np.random.default_rng(9))
    first, again = (chain(backend, drafts, p, None).output_token_ids for _ in range(2))
    other = chain(OnCpu(backend.version), drafts, p, None).output_token_ids
    assert torch.equal(first, other)
    assert not torch.equal(first, again)


PARAMS = (
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(top_k=10_000),
)


def test_a_batch_of_all_kinds_has_the_law_of_each_row(backend: OnCpu) -> None:
    logits = torch.randn(60, 40, generator=torch.Generator().manual_seed(1)) * 3
    params = PARAMS * 10
    expected = law(ReferenceBackend(), logits, params)
    torch.testing.assert_close(law(backend, logits, params), expected, rtol=1e-5, atol=1e-7)
    heated = [dataclasses.replace(one, temperature=1.01 * one.temperature) for one in params]
    assert (law(backend, logits, heated) - expected).abs().max() > 1e-3, "the twin: another temperature is seen"


def test_ties_at_a_cut_are_kept_and_a_greedy_tie_goes_to_the_lowest_id(backend: OnCpu) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, -1.0]]).expand(3, 5)
    params = [SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(temperature=0.0)]
    third = [0, 1 / 3, 1 / 3, 1 / 3, 0]
    torch.testing.assert_close(law(backend, logits, params), torch.tensor([third, third, [0, 1.0, 0, 0, 0]]))


def test_out_rows_go_to_their_places_and_leave_the_others(backend: OnCpu) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    out = torch.full((4, VOCAB), 7.0)
    backend.verify_probs(logits, RowParams.of([SamplingParams()] * 2), out=out, out_rows=torch.tensor([3, 0]))
    torch.testing.assert_close(out[[3, 0]], logits.softmax(dim=1))
    assert (out[1:3] == 7).all()


@pytest.mark.parametrize(
    ("values", "problem"),
    [([1.0, np.nan], "NaN"), ([1.0, np.inf], "inf"), ([-np.inf, -np.inf], "at least one finite"), ([1e38, 0], "over")],
)
def test_logits_that_have_no_law_are_refused_with_their_row(backend: OnCpu, values: list[float], problem: str) -> None:
    logits = torch.tensor([[0.0, 1.0], values])
    with pytest.raises(InvalidKernelInput, match=problem) as caught:
        law(backend, logits, [SamplingParams(temperature=0.1)] * 2)
    assert caught.value.row == 1


def test_what_it_cannot_represent_it_refuses(backend: OnCpu) -> None:
    with pytest.raises(UnsupportedSampling, match="min_p"):
        check_params_supported(backend, SamplingParams(min_p=0.1), seeded=False)
    with pytest.raises(UnsupportedSampling, match="seed"):
        check_params_supported(backend, SamplingParams(), seeded=True)
    with pytest.raises(UnsupportedSampling, match="min_p"):
        law(backend, torch.zeros(1, 3), [SamplingParams(min_p=0.1)])
    batch = AttentionBatch(
        *(torch.tensor(v, dtype=torch.int32) for v in ([[0]], [1], [0, 1])),
        HostBatch(*(np.array(v, np.int32) for v in ([[0]], [1], [0, 1]))),
    )
    shape = AttentionShape(num_heads=3, num_kv_heads=1, head_dim=64, page_size=16, num_pages=1, dtype=torch.float32)
    with pytest.raises(InvalidKernelInput, match="no attention in this dtype"):
        check_attention_batch(backend, batch, shape)
    check_attention_batch(backend, batch, shape._replace(dtype=torch.bfloat16))


def test_a_batch_past_the_kernels_index_is_refused_before_any_work(backend: OnCpu) -> None:
    """2**16 rows of 4 laws over 2**14 tokens are one too many."""
    batch, vocab_size = 2**16, 2**14
    call: dict[str, Any] = {
        "draft_token_ids": torch.zeros(batch, 3, dtype=torch.int64),
        "num_draft": torch.full((batch,), 3, dtype=torch.int32),
        "target_probs": torch.zeros(1, 1, 1).expand(batch, 4, vocab_size),
        "draft_probs": None,
        "streams": Streams(keys(batch), torch.zeros(batch, dtype=torch.int64)),
        "scratch": SpecScratch(batch, 3, 1),
    }
    with pytest.raises(InvalidKernelInput, match=r"2\*\*32"):
        backend.spec_accept(**call)
    call["draft_token_ids"][5, 1] = vocab_size
    with pytest.raises(InvalidKernelInput, match="draft id out of range") as caught:
        backend.spec_accept(**call)
    assert caught.value.row == 5
    assert backend.fake.calls == []
