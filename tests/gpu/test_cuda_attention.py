"""Paged attention of our CUDA kernels against dense attention in float64, alone, in batches and in a graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput
from equivtest.kernels.contract import AttentionBatch, AttentionShape, Capabilities, HostBatch, KernelBackend
from equivtest.kernels.cuda_layers import CudaAttention
from tests.kernels.test_paged_attention import SHAPES, dense, paged_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
QWEN3 = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
GPU_SHAPES: dict[str, dict[str, Any]] = {
    **SHAPES,
    "decode of smollm2": {"lengths": [100] * 40 + [1, 16, 17, 128, 129], "rows": [1] * 45, **SMOLLM2},
    "verification of smollm2": {"lengths": [90, 40, 8, 300, 9], "rows": [8, 1, 8, 5, 6], **SMOLLM2},
    "rows of a prompt in pages of one": {"lengths": [72, 40, 33], "rows": [32, 32, 32], "page_size": 1, **SMOLLM2},
    "decode of qwen3": {"lengths": [130, 5, 64], "rows": [1, 1, 1], **QWEN3},
    "verification of qwen3": {"lengths": [130, 9], "rows": [9, 9], **QWEN3},
    "long context": {"lengths": [2000, 1999], "rows": [1, 4], **SMOLLM2},
    "more sequences than a warp looks at": {"lengths": [3] * 70, "rows": [1, 0, 2, 3, 0, 0, 1] * 10},
    **{
        f"group of {g}": {"lengths": [50, 20], "rows": [7, 3], "num_heads": 2 * g, "num_kv_heads": 2, "head_dim": 64}
        for g in (1, 3, 4, 7, 16, 20)
    },
}
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-6},
    # The result is rounded once (half a unit in the eighth bit); the weights, in two bfloat16 parts, are off by 2^-17
    # at most, and values are below 6.
    torch.bfloat16: {"rtol": 2**-8 * 1.001, "atol": 6 * 2.0**-17},
}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(scope="module")
def attention() -> CudaAttention:
    capabilities = Capabilities(
        min_p=True,
        per_request_seed=True,
        ragged_draft=True,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32}),
        graphs=True,
    )
    return CudaAttention(cast(KernelBackend, SimpleNamespace(name="cuda", capabilities=capabilities)))


def batch_of(call: dict[str, Any]) -> AttentionBatch:
    names = ("page_table", "kv_lens", "query_start")
    return AttentionBatch(*(call[n].cuda() for n in names), HostBatch(*(call[n].numpy() for n in names)))


def shape_of(call: dict[str, Any]) -> AttentionShape:
    query, pages = call["query"], call["kv_pages"]
    return AttentionShape(query.shape[1], pages.shape[3], query.shape[2], pages.shape[2], pages.shape[0], query.dtype)


def attend(attention: CudaAttention, call: dict[str, Any]) -> Tensor:
    plan = attention.plan_attention(batch_of(call), shape_of(call))
    out = attention.paged_attention(call["query"].cuda(), call["kv_pages"].cuda(), plan)
    assert out.dtype == call["query"].dtype
    return out.cpu()


def wrong_rows(out: Tensor, call: dict[str, Any]) -> list[int]:
    """Rows of `out` that are not dense attention."""
    close = torch.isclose(out.double(), dense(call), **TOLERANCES[call["query"].dtype])
    return (~close.flatten(1).all(dim=1)).nonzero().flatten().tolist()


@DTYPES
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_it_is_dense_attention(attention: CudaAttention, shape: str, dtype: torch.dtype) -> None:
    call = paged_call(**GPU_SHAPES[shape], dtype=dtype)
    assert wrong_rows(attend(attention, call), call) == []


@DTYPES
@pytest.mark.parametrize("fault", ["a mask that is one token early", "pages in another order", "rows of a neighbour"])
def test_a_planted_fault_is_seen_in_every_row(attention: CudaAttention, fault: str, dtype: torch.dtype) -> None:
    call = paged_call([40, 60, 33], [5, 1, 3], page_size=8, dtype=dtype, **SMOLLM2)
    planted = dict(call)
    if fault == "a mask that is one token early":
        planted["kv_lens"] = call["kv_lens"] - 1
    elif fault == "pages in another order":
        planted["page_table"] = call["page_table"].roll(1, dims=0).clamp(min=0)
    else:
        planted["query"] = call["query"].roll(1, dims=0)
    assert wrong_rows(attend(attention, planted), call) == list(range(9))


@DTYPES
def test_rows_that_belong_to_nobody_are_zero_and_change_nothing(attention: CudaAttention, dtype: torch.dtype) -> None:
    call = paged_call([40, 20, 0, 0], [3, 8, 0, 0], dtype=dtype, **SMOLLM2)
    alone = attend(attention, call)
    call["query"] = torch.cat((call["query"], torch.full_like(call["query"], torch.nan)))
    padded = attend(attention, call)
    assert torch.equal(padded[:11], alone)
    assert padded[11:].count_nonzero() == 0


@DTYPES
def test_a_row_is_bitwise_the_same_alone_among_drafts_and_in_a_batch(
    attention: CudaAttention, dtype: torch.dtype
) -> None:
    call = paged_call([70, 250, 33], [40, 5, 1], dtype=dtype, **SMOLLM2)
    together = attend(attention, call)
    for b, row, length in [(0, 0, 31), (0, 39, 70), (1, 40, 246), (1, 44, 250), (2, 45, 33)]:
        alone = {
            "query": call["query"][row : row + 1],
            "kv_pages": call["kv_pages"],
            "page_table": call["page_table"][b : b + 1],
            "kv_lens": torch.tensor([length], dtype=torch.int32),
            "query_start": torch.tensor([0, 1], dtype=torch.int32),
        }
        assert torch.equal(attend(attention, alone)[0], together[row]), f"row {row}"


@DTYPES
def test_slots_past_the_length_are_not_read(attention: CudaAttention, dtype: torch.dtype) -> None:
    call = paged_call([35], [3], dtype=dtype, **SMOLLM2)
    before = attend(attention, call)
    call["kv_pages"][int(call["page_table"][0, 2]), :, 3:] = torch.nan
    assert torch.equal(attend(attention, call), before)


@DTYPES
def test_a_graph_follows_its_plan(attention: CudaAttention, dtype: torch.dtype) -> None:
    first = paged_call([40, 60, 9], [1, 1, 1], dtype=dtype, **SMOLLM2)
    later = {**first, "kv_lens": first["kv_lens"] - 5, "page_table": first["page_table"].clone()}
    later["page_table"][1] = first["page_table"][1].flip(0).clamp(min=0)
    query, pages = first["query"].cuda(), first["kv_pages"].cuda()
    plan = attention.plan_attention(batch_of(first), shape_of(first))
    attention.paged_attention(query, pages, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.paged_attention(query, pages, plan)
    graph.replay()
    assert wrong_rows(out.cpu(), first) == []
    assert wrong_rows(out.cpu(), later) == [0, 1, 2], "the two batches must differ for this to be a test"
    attention.plan_attention(batch_of(later), shape_of(later), reuse=plan)
    graph.replay()
    assert wrong_rows(out.cpu(), later) == []


def test_a_plan_is_not_reused_for_another_shape(attention: CudaAttention) -> None:
    plan = attention.plan_attention(batch_of(call := paged_call([40], [1])), shape_of(call))
    other = paged_call([40, 3], [1, 1])
    other["page_table"].zero_()
    with pytest.raises(InvalidKernelInput, match="a batch of the same shape"):
        attention.plan_attention(batch_of(other), shape_of(call), reuse=plan)


def test_a_cache_that_is_not_contiguous_is_refused(attention: CudaAttention) -> None:
    call = paged_call([40], [1])
    pages = call["kv_pages"].cuda().transpose(2, 3).contiguous().transpose(2, 3)
    plan = attention.plan_attention(batch_of(call), shape_of(call))
    with pytest.raises(InvalidKernelInput, match="contiguous"):
        attention.paged_attention(call["query"].cuda(), pages, plan)
