"""The FlashInfer backend on a GPU: laws, coins, memory, attention, and where versions differ.

Each law is tested on 200,000 rows by chi-squared at every output position and rejected at p < 5e-9; no more than 60
positions are tested here, so the false-alarm rate of the file is below 1e-6. Seeds are fixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput, UnsupportedSampling
from equivtest.kernels.contract import AttentionBatch, AttentionShape, HostBatch, KernelBackend, SpecScratch, Streams
from equivtest.kernels.reference import ReferenceBackend
from equivtest.records import SamplingParams
from tests.gpu.vendor import flashinfer_backend, fresh_backend, sampling, version
from tests.kernels.chain_law import draw_drafts, p_value, position_laws, tables
from tests.kernels.test_paged_attention import dense, paged_call
from tests.kernels.vendor_calls import chain, explicit, keys, lag_correlation, law

pytestmark = pytest.mark.gpu

NUM_ROWS = 200_000
REJECT_BELOW = 5e-9
VOCAB = 7
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def backend() -> KernelBackend:
    return fresh_backend()


def smallest_p_value(output: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    laws = position_laws(p, q)
    return min(p_value(output[:, j], laws[j]) for j in range(output.shape[1]))


# laws


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
@pytest.mark.parametrize("num_draft", [1, 4])
def test_every_output_position_has_the_law_of_the_target(backend: KernelBackend, num_draft: int, one_hot: bool) -> None:
    p, q = tables(num_draft, one_hot=one_hot, vocab_size=VOCAB, seed=num_draft)
    drafts = draw_drafts(q, NUM_ROWS, np.random.default_rng(num_draft))
    output = chain(backend, drafts, p, None if one_hot else q).output_token_ids.numpy()
    assert smallest_p_value(output, p, q) > REJECT_BELOW


def test_an_inflated_draft_is_rejected(backend: KernelBackend) -> None:
    """The twin: p[d] + .02 in the tensor that the kernel reads."""
    p, q = tables(3, one_hot=True, vocab_size=VOCAB, seed=13)
    drafts = draw_drafts(q, NUM_ROWS, np.random.default_rng(13))
    inflated = p.copy()
    inflated[np.arange(3), drafts[0]] += 0.02
    assert smallest_p_value(chain(backend, drafts, inflated, None).output_token_ids.numpy(), p, q) < REJECT_BELOW


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
def test_rows_with_few_and_many_drafts_have_the_law(backend: KernelBackend, one_hot: bool) -> None:
    p, q = tables(3, one_hot=one_hot, vocab_size=VOCAB, seed=9)
    drafts = draw_drafts(q, NUM_ROWS, np.random.default_rng(9))
    num_draft = np.arange(NUM_ROWS) % 4
    drafts[np.arange(3) >= num_draft[:, None]] = -5  # what stands past num_draft may be anything
    result = chain(backend, drafts, p, None if one_hot else q, num_draft=num_draft)
    output, emitted = result.output_token_ids.numpy(), result.emitted.numpy()
    for k in range(4):
        rows = output[num_draft == k]
        assert smallest_p_value(rows[:, : k + 1], p[: k + 1], q[:k]) > REJECT_BELOW, f"rows with {k} drafts"
        assert (rows[:, k + 1 :] == -1).all()
    assert ((output >= 0).sum(axis=1) == emitted + 1).all()
    assert (result.acceptance_telemetry.numpy() >= emitted).all()
    assert (result.acceptance_telemetry.numpy() <= num_draft).all(), "counters that are not zeroed add up"


def test_sample_has_the_law_of_its_row(backend: KernelBackend) -> None:
    num_rows, vocab_size = 100_000, 3000
    p, _ = tables(1, one_hot=True, vocab_size=vocab_size, seed=10)
    probs = torch.tensor(p[1], dtype=torch.float32, device=DEVICE).expand(num_rows, vocab_size)
    streams = Streams(keys(num_rows).to(DEVICE), torch.zeros(num_rows, dtype=torch.int64, device=DEVICE))
    tokens = backend.sample(probs, streams, out=torch.empty(num_rows, dtype=torch.int64, device=DEVICE)).cpu().numpy()
    assert p_value(tokens, np.append(p[1], 0.0)) > REJECT_BELOW
    biased = p[1].copy()
    biased[:1500] *= 1.2
    assert p_value(tokens, np.append(biased, 0.0)) < REJECT_BELOW, "the twin: another law is seen"


PARAMS = (
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=50),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5),
    SamplingParams(top_k=10_000_000),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 1000, 49_152, 151_936])
def test_a_batch_of_all_kinds_has_the_law_of_each_row(
    backend: KernelBackend, vocab_size: int, dtype: torch.dtype
) -> None:
    """Total variation from the float64 law at most 1e-4, rows that sum to 1 within 1e-5."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(24, vocab_size, generator=generator) * 3).to(dtype)
    params = PARAMS * 4
    probs = law(backend, logits, params).double()
    expected = law(ReferenceBackend(torch.float64), logits, params)
    assert (probs.sum(dim=1) - 1).abs().max() <= 1e-5
    distance = (probs - expected).abs().sum(dim=1) / 2
    support = ((probs > 0) != (expected > 1e-37)).sum(dim=1)
    worst = int(distance.argmax())
    assert distance.max() <= 1e-4, f"{params[worst]}: {distance[worst]:.2e}, {support[worst]} tokens in one law only"


def test_a_wrong_filter_is_seen_in_the_law(backend: KernelBackend) -> None:
    """The twin: top_p .94 in place of .95."""
    logits = torch.randn(8, 49_152, generator=torch.Generator().manual_seed(1)) * 3
    expected = law(ReferenceBackend(torch.float64), logits, [SamplingParams(top_p=0.95)] * 8)
    probs = law(backend, logits, [SamplingParams(top_p=0.94)] * 8).double()
    assert ((probs - expected).abs().sum(dim=1) / 2).min() > 1e-3


@pytest.mark.parametrize("vocab_size", [5, 4099])
def test_ties_at_a_cut_are_kept_and_a_greedy_tie_goes_to_the_lowest_id(backend: KernelBackend, vocab_size: int) -> None:
    logits = torch.full((3, vocab_size), -40.0)
    logits[:, 1:4] = 2.0
    params = [SamplingParams(top_k=2), SamplingParams(top_p=0.5), SamplingParams(temperature=0.0)]
    probs = law(backend, logits, params)
    third = torch.full((3,), 1 / 3)
    for row, name in enumerate(("top-k", "top-p")):
        torch.testing.assert_close(probs[row, 1:4], third, msg=f"{name} at a tie: {probs[row, 1:4].tolist()}")
    assert probs[2].nonzero().tolist() == [[1]]


# coins


def test_a_new_backend_draws_the_same_and_a_second_call_draws_others(backend: KernelBackend) -> None:
    p, q = tables(3, one_hot=True, vocab_size=VOCAB, seed=9)
    drafts = draw_drafts(q, 500, np.random.default_rng(9))
    first, second = (chain(backend, drafts, p, None).output_token_ids for _ in range(2))
    assert torch.equal(chain(fresh_backend(), drafts, p, None).output_token_ids, first)
    assert not torch.equal(first, second)


def test_the_recovered_token_says_nothing_of_the_next_acceptance(backend: KernelBackend) -> None:
    """In every version. Fixed seeds; by chance 4 standard errors are exceeded in 1 of 16,000 streams."""
    correlation, num_pairs = lag_correlation(explicit(backend), DEVICE)
    assert abs(correlation) < 4 / num_pairs**0.5, f"{correlation:.3f} over {num_pairs} pairs"


def test_a_generator_left_to_itself_uses_a_coin_twice_before_0_7_4() -> None:
    """Rank correlation -sqrt(3) / 2 before 0.7.4, none from then on; see equivtest.faults.generator_offset."""
    flashinfer_sampling = sampling()
    generator = torch.Generator(DEVICE).manual_seed(11)

    def accept(draft_token_ids: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.zeros_like(target_probs[:, :-1]).scatter_(2, draft_token_ids[:, :, None], 1.0)
        tokens, _, emitted = flashinfer_sampling.chain_speculative_sampling(
            q, draft_token_ids.int(), target_probs, generator=generator
        )
        return tokens.long(), emitted

    correlation, num_pairs = lag_correlation(accept, DEVICE)
    expected = -(3**0.5) / 2 if version() < (0, 7, 4) else 0.0
    assert abs(correlation - expected) < 4 / num_pairs**0.5, f"{correlation:.3f} over {num_pairs} pairs"


def test_seeds_of_later_rows_count_from_0_7_2_on() -> None:
    """0.6.13 reads the first seed for the whole batch; the row itself is a part of the stream in every version."""
    num_rows = 2000
    probs = torch.full((num_rows, 1000), 1e-3, device=DEVICE)
    offset = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    seeds = [keys(num_rows, name).to(DEVICE) for name in ("one", "other")]
    seeds[1][0] = seeds[0][0]
    ids = torch.zeros(num_rows, 1, dtype=torch.int32, device=DEVICE)
    q = torch.zeros(num_rows, 1, 1000, device=DEVICE)
    q[..., 0] = 1
    laws = probs[:, None].expand(num_rows, 2, 1000).contiguous()

    def drawn(seed: Tensor) -> Tensor:
        tokens, *_ = sampling().chain_speculative_sampling(q, ids, laws, seed=seed, offset=offset)
        first: Tensor = tokens[:, 0]
        return first

    one, other = map(drawn, seeds)
    assert one[0] == other[0]
    if version() >= (0, 7, 2):
        assert float((one[1:] == other[1:]).double().mean()) < 0.02, "rows draw with seeds of their own"
    else:
        assert torch.equal(one, other), "only the first seed is read"
    shared = drawn(seeds[0][:1].expand(num_rows).contiguous())
    assert float((shared == shared[0]).double().mean()) < 0.02, "rows of one seed draw by their place"


def test_a_rejected_draft_is_counted_again_in_old_telemetry() -> None:
    """With one draft that is kept half the time, 0.6.13 counts it by a second coin; 0.7.4 by its own alone."""
    p = torch.full((4000, 2, 3), 0.25, device=DEVICE)
    p[..., 0] = 0.5
    q = torch.tensor([1.0, 0.0, 0.0], device=DEVICE).expand(4000, 1, 3).contiguous()
    ids = torch.zeros(4000, 1, dtype=torch.int32, device=DEVICE)
    seed, offset = (torch.full((1,), value, dtype=torch.int64, device=DEVICE) for value in (5, 0))
    _, telemetry, emitted = sampling().chain_speculative_sampling(q, ids, p, seed=seed, offset=offset)
    over = float((telemetry > emitted).double().mean())
    if version() < (0, 7, 4):
        assert 0.2 < over < 0.3
    else:
        assert over == 0.0


def test_a_token_is_put_out_where_p_and_q_leave_nothing_to_draw_from(backend: KernelBackend) -> None:
    """q is larger than p wherever p is not 1."""
    p, q = (np.array([[eps, 1, eps, eps]], np.float32) for eps in (1e-9, 1e-8))
    accepted = chain(backend, np.zeros((10_000, 1), np.int64), np.repeat(p, 2, axis=0), q)
    rejected = accepted.output_token_ids[accepted.emitted == 0]
    assert 0.88 < len(rejected) / 10_000 < 0.92
    assert rejected[:, 0].eq(1).all()


def test_with_q_as_it_is_the_token_that_can_be_drawn_is_missed() -> None:
    """The twin of the test above. 0.7.4 puts out no token, 0.6.13 whatever its memory held."""
    p, q = (
        torch.tensor([eps, 1, eps, eps], device=DEVICE).expand(10_000, rows, 4).contiguous()
        for eps, rows in ((1e-9, 2), (1e-8, 1))
    )
    ids = torch.zeros(10_000, 1, dtype=torch.int32, device=DEVICE)
    seed, offset = (torch.full((1,), value, dtype=torch.int64, device=DEVICE) for value in (5, 0))
    counters = torch.zeros(2, 10_000, dtype=torch.int32, device=DEVICE)
    tokens, *_ = sampling().chain_speculative_sampling(q, ids, p, *counters, seed=seed, offset=offset)
    rejected = tokens[counters[1] == 0, 0]
    assert float(rejected.eq(1).double().mean()) < 0.9
    assert bool(rejected.lt(0).all()) or version() < (0, 7, 4)


# memory


def test_point_masses_of_a_call_are_gone_in_the_next(backend: KernelBackend) -> None:
    """Rows and widths that change reuse the memory; a mass left there would take from the residual."""
    scratch = SpecScratch(NUM_ROWS, 3, VOCAB, DEVICE)
    for width, batch in ((3, NUM_ROWS), (1, NUM_ROWS), (2, NUM_ROWS // 2), (3, NUM_ROWS // 4)):
        p, q = tables(width, one_hot=True, vocab_size=VOCAB, seed=20 + width)
        drafts = draw_drafts(q, batch, np.random.default_rng(width))
        output = chain(backend, drafts, p, None, scratch=scratch).output_token_ids.numpy()
        assert smallest_p_value(output, p, q) > REJECT_BELOW, f"{batch} rows of {width} drafts"


def test_the_second_call_takes_no_more_memory(backend: KernelBackend) -> None:
    """What one call leaves allocated, the next uses again."""
    p, q = tables(3, one_hot=True, vocab_size=5000, seed=9)
    drafts = draw_drafts(q, 64, np.random.default_rng(9))
    scratch = SpecScratch(64, 3, 5000, DEVICE)
    used = []
    for _ in range(3):
        chain(backend, drafts, p, None, scratch=scratch)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[1] == used[2]


# refusals


def test_what_it_cannot_represent_it_refuses(backend: KernelBackend) -> None:
    with pytest.raises(UnsupportedSampling, match="min_p"):
        law(backend, torch.zeros(1, 3), [SamplingParams(min_p=0.1)])
    with pytest.raises(InvalidKernelInput, match="no attention in this dtype"):
        attend(backend, paged_call([5], [1], head_dim=64, dtype=torch.float32))
    batch = 2**16
    zeros = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    call: dict[str, Any] = {
        "draft_token_ids": torch.zeros(batch, 3, dtype=torch.int64, device=DEVICE),
        "num_draft": torch.full((batch,), 3, dtype=torch.int32, device=DEVICE),
        "target_probs": torch.zeros(1, 1, 1, device=DEVICE).expand(batch, 4, 2**14),
        "draft_probs": None,
        "streams": Streams(zeros, zeros),
        "scratch": SpecScratch(batch, 3, 1, DEVICE),
    }
    with pytest.raises(InvalidKernelInput, match=r"2\*\*32"):
        backend.spec_accept(**call)
    call["draft_token_ids"][5, 1] = -1
    with pytest.raises(InvalidKernelInput, match="draft id out of range") as caught:
        backend.spec_accept(**call)
    assert caught.value.row == 5


# attention


def batch_of(call: dict[str, Any]) -> tuple[AttentionBatch, AttentionShape]:
    names = ("page_table", "kv_lens", "query_start")
    batch = AttentionBatch(*(call[n].to(DEVICE) for n in names), HostBatch(*(call[n].numpy() for n in names)))
    shape = AttentionShape(
        num_heads=call["query"].shape[1],
        num_kv_heads=call["kv_pages"].shape[3],
        head_dim=call["query"].shape[2],
        page_size=call["kv_pages"].shape[2],
        num_pages=call["kv_pages"].shape[0],
        dtype=call["query"].dtype,
    )
    return batch, shape


def attend(backend: KernelBackend, call: dict[str, Any]) -> Tensor:
    plan = backend.plan_attention(*batch_of(call))
    return backend.paged_attention(call["query"].to(DEVICE), call["kv_pages"].to(DEVICE), plan).cpu()


SHAPES = {
    "decode": {"lengths": [60, 1, 17, 16, 33], "rows": [1] * 5},
    "verify": {"lengths": [60, 5, 17, 21], "rows": [5, 5, 1, 3]},
    "prefill": {"lengths": [100, 37], "rows": [100, 37]},
    "later chunk": {"lengths": [150], "rows": [40]},
    "a long text": {"lengths": [3000, 7], "rows": [1, 4]},
    "a sequence without rows": {"lengths": [20, 9, 0, 20, 0], "rows": [2, 0, 0, 1, 0]},
}
HEADS = {"group of three": (9, 3), "group of four": (32, 8)}


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_dense_attention(
    backend: KernelBackend, shape: str, heads: str, head_dim: int, page_size: int
) -> None:
    """Weights and result are rounded to bfloat16, 2^-9 of each term at most; values are standard normal."""
    num_heads, num_kv_heads = HEADS[heads]
    call = paged_call(
        **SHAPES[shape],  # type: ignore[arg-type]
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
    )
    out = attend(backend, call)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), dense(call), rtol=2**-7, atol=2**-7)


def test_a_token_too_few_is_seen(backend: KernelBackend) -> None:
    """The twin: one sequence is told to be a token shorter than it is."""
    call = paged_call([60, 33], [1, 1], num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    expected = dense(call)
    call["kv_lens"] = call["kv_lens"] - torch.tensor([1, 0], dtype=torch.int32)
    error = (attend(backend, call).double() - expected).abs().amax(dim=(1, 2))
    assert error[0] > 2**-5
    assert error[1] < 2**-6


def test_a_captured_plan_follows_new_lengths() -> None:
    """Planned for five sequences, captured, and planned again in the same memory for others, empty ones at the end."""
    backend = flashinfer_backend()
    size: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.bfloat16}
    first = paged_call([60, 20, 17, 16, 33], [2] * 5, **size)
    batch, shape = batch_of(first)
    query, pages = first["query"].to(DEVICE), first["kv_pages"].to(DEVICE)
    plan = backend.plan_attention(batch, shape, for_graph=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.paged_attention(query, pages, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.paged_attention(query, pages, plan)
    graph.replay()
    torch.testing.assert_close(out.cpu().double(), dense(first), rtol=2**-7, atol=2**-7)

    later = dict(first)
    later["kv_lens"] = torch.tensor([44, 7, 17, 0, 0], dtype=torch.int32)
    later["query_start"] = torch.tensor([0, 2, 4, 5, 5, 5], dtype=torch.int32)
    backend.plan_attention(batch_of(later)[0], shape, reuse=plan)
    graph.replay()
    later["query"] = first["query"][:5]
    torch.testing.assert_close(out[:5].cpu().double(), dense(later), rtol=2**-7, atol=2**-7)
    assert out.isfinite().all()


def test_rows_that_belong_to_nobody_are_finite(backend: KernelBackend) -> None:
    """Whatever the memory of the result held before."""
    call = paged_call([60, 20], [2, 2], num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    plan = backend.plan_attention(*batch_of(call))
    query = torch.cat([call["query"], torch.ones(60, 9, 64, dtype=torch.bfloat16)]).to(DEVICE)
    pages = call["kv_pages"].to(DEVICE)
    for _ in range(3):
        left = [torch.full_like(query, torch.nan) for _ in range(8)]
        del left
        out = backend.paged_attention(query, pages, plan)
        assert out.isfinite().all(), f"{int((~out.isfinite()).any(dim=(1, 2)).sum())} rows are not"
        torch.testing.assert_close(out[:4].cpu().double(), dense(call), rtol=2**-7, atol=2**-7)


def test_a_plan_made_while_the_device_is_behind_leaves_the_one_before_alone(backend: KernelBackend) -> None:
    """FlashInfer copies a plan to the device from pinned memory that the next plan of the same wrapper overwrites."""
    size: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "dtype": torch.bfloat16}
    calls = [paged_call([700, 20, 90], [1, 9, 4], **size), paged_call([33, 2000], [3, 1], **size, seed=1)]
    given = [(call["query"].to(DEVICE), call["kv_pages"].to(DEVICE), batch_of(call)) for call in calls]
    busy = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for _ in range(40):
        busy = busy @ busy * 1e-3
    outs = [backend.paged_attention(query, pages, backend.plan_attention(*both)) for query, pages, both in given]
    for call, out in zip(calls, outs, strict=True):
        torch.testing.assert_close(out.cpu().double(), dense(call), rtol=2**-7, atol=2**-7)
