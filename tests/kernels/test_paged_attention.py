"""paged_attention against dense attention, and its refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from equivtest.errors import InvalidKernelInput
from equivtest.kernels.contract import AttentionBatch, AttentionShape, HostBatch, KernelBackend
from equivtest.kernels.registry import get_backend


def paged_call(
    lengths: list[int],
    rows: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """Random sequences with their pages scattered over a cache that has some to spare; unused table entries are -1."""
    generator = torch.Generator().manual_seed(seed)
    pages_each = [-(-length // page_size) for length in lengths]
    num_pages = sum(pages_each) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    table = torch.full((len(lengths), max(pages_each) + 1), -1, dtype=torch.int32)
    for b, count in enumerate(pages_each):
        for i in range(count):
            table[b, i] = order.pop()
    pages = torch.randn(num_pages, 2, page_size, num_kv_heads, head_dim, generator=generator)
    query = torch.randn(sum(rows), num_heads, head_dim, generator=generator)
    return {
        "query": query.to(dtype),
        "kv_pages": pages.to(dtype),
        "page_table": table,
        "kv_lens": torch.tensor(lengths, dtype=torch.int32),
        "query_start": torch.tensor([0, *torch.tensor(rows).cumsum(0)], dtype=torch.int32),
    }


def attend(backend: KernelBackend, call: dict[str, Any]) -> Tensor:
    """Plan and attend, for a model whose shape is the call's own."""
    query, pages = call["query"], call["kv_pages"]
    names = ("page_table", "kv_lens", "query_start")
    host = HostBatch(*(call[name].numpy() for name in names))
    batch = AttentionBatch(*(call[name] for name in names), host)
    shape = AttentionShape(
        num_heads=query.shape[-2],
        num_kv_heads=pages.shape[3],
        head_dim=query.shape[-1],
        page_size=pages.shape[2],
        num_pages=pages.shape[0],
        dtype=query.dtype,
    )
    return backend.paged_attention(query, pages, backend.plan_attention(batch, shape))


def dense(call: dict[str, Any]) -> Tensor:
    """The same by torch's attention on each sequence's gathered keys and values, in float64."""
    query, pages, table = call["query"].double(), call["kv_pages"].double(), call["page_table"]
    group = query.shape[1] // pages.shape[3]
    out = torch.empty_like(query)
    starts = call["query_start"].tolist()
    for b, length in enumerate(call["kv_lens"].tolist()):
        rows = slice(starts[b], starts[b + 1])
        if rows.start == rows.stop:
            continue
        tokens = [(int(table[b, t // pages.shape[2]]), t % pages.shape[2]) for t in range(length)]
        keys, values = (torch.stack([pages[page, i, slot] for page, slot in tokens]) for i in (0, 1))
        keys, values = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (keys, values))
        num_rows = rows.stop - rows.start
        mask = torch.ones(num_rows, length, dtype=torch.bool).tril(length - num_rows)
        out[rows] = scaled_dot_product_attention(query[rows].transpose(0, 1), keys, values, mask).transpose(0, 1)
    return out


SHAPES = {
    "decode": {"lengths": [60, 1, 17, 16, 33], "rows": [1] * 5},
    "verify": {"lengths": [60, 5, 17, 21], "rows": [5, 5, 1, 3]},
    "prefill": {"lengths": [100, 37], "rows": [100, 37]},
    "later chunk": {"lengths": [150], "rows": [40]},
    "a sequence without rows": {"lengths": [20, 9, 0, 20], "rows": [2, 0, 0, 1]},
    "one head": {"lengths": [40, 3], "rows": [2, 3], "num_heads": 1, "num_kv_heads": 1},
    "as many kv heads": {"lengths": [40], "rows": [3], "num_heads": 3, "num_kv_heads": 3},
    "group of three": {"lengths": [61], "rows": [5], "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "pages of one": {"lengths": [19, 4], "rows": [2, 4], "page_size": 1},
    "pages of seven": {"lengths": [50, 14], "rows": [2, 4], "page_size": 7},
    **{f"head_dim {d}": {"lengths": [35, 4], "rows": [3, 4], "head_dim": d} for d in (1, 16, 24, 48, 80, 96, 112, 128)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_dense_attention(backend: KernelBackend, shape: str) -> None:
    call = paged_call(**SHAPES[shape])
    out = attend(backend, call)
    assert out.dtype == torch.float32
    assert out.shape == call["query"].shape
    torch.testing.assert_close(out.double(), dense(call), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", ["decode", "verify", "a sequence without rows"])
def test_the_reference_gives_the_same_in_blocks(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = paged_call(**SHAPES[shape])
    whole = attend(get_backend("reference"), call)
    monkeypatch.setattr("equivtest.kernels.reference._MAX_ATTENTION_ENTRIES", 1)
    torch.testing.assert_close(attend(get_backend("reference"), call), whole)


@pytest.mark.parametrize("shape", ["decode", "verify", "prefill", "group of three", "head_dim 24"])
def test_bfloat16_is_dense_attention_rounded_once(backend: KernelBackend, shape: str) -> None:
    call = paged_call(**SHAPES[shape], dtype=torch.bfloat16)
    out = attend(backend, call)
    assert out.dtype == torch.bfloat16
    # Half a unit in bfloat16's eighth bit: the one rounding of the result; everything before it is float32.
    torch.testing.assert_close(out.double(), dense(call), rtol=2**-8 * 1.001, atol=2e-6)


@pytest.mark.parametrize("head_dim", [1, 24])
def test_a_narrow_head_never_meets_what_an_earlier_call_left_in_memory(backend: KernelBackend, head_dim: int) -> None:
    """Working memory is as wide as the vectors: its unused lanes must not reach a sum, whatever they hold."""
    wide = paged_call([35, 4], [3, 4], head_dim=-(-head_dim // 16) * 16)
    wide["kv_pages"].fill_(torch.nan)
    for _ in range(4):
        attend(backend, wide)
        call = paged_call([35, 4], [3, 4], head_dim=head_dim)
        torch.testing.assert_close(attend(backend, call).double(), dense(call), rtol=1e-5, atol=2e-6)


def test_large_scores_do_not_overflow(backend: KernelBackend) -> None:
    call = paged_call([50], [4])
    call["query"] *= 300
    torch.testing.assert_close(attend(backend, call).double(), dense(call), rtol=1e-3, atol=1e-3)


def test_later_tokens_change_nothing(backend: KernelBackend) -> None:
    call = paged_call([40], [6], page_size=8)
    before = attend(backend, call)
    last_page = int(call["page_table"][0, 4])
    call["kv_pages"][last_page, :, 7] += 100.0  # token 39, which only row 5 sees
    after = attend(backend, call)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5], after[5])


def test_slots_past_the_length_are_not_read(backend: KernelBackend) -> None:
    call = paged_call([35], [3])
    before = attend(backend, call)
    call["kv_pages"][int(call["page_table"][0, 2]), :, 3:] = math.nan
    assert torch.equal(attend(backend, call), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_the_same_alone_among_drafts_and_in_a_batch(dtype: torch.dtype) -> None:
    """What plain decoding computes for a position is what verification computes for it."""
    backend = get_backend("cpp")
    call = paged_call([70, 50, 33], [40, 5, 1], num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype)
    together = attend(backend, call)
    for b, row, length in [(0, 0, 31), (0, 39, 70), (1, 40, 46), (1, 44, 50), (2, 45, 33)]:
        alone = {
            "query": call["query"][row : row + 1],
            "kv_pages": call["kv_pages"],
            "page_table": call["page_table"][b : b + 1],
            "kv_lens": torch.tensor([length], dtype=torch.int32),
            "query_start": torch.tensor([0, 1], dtype=torch.int32),
        }
        assert torch.equal(attend(backend, alone)[0], together[row])


def test_a_nan_shows_in_the_rows_that_see_it_and_no_others(backend: KernelBackend) -> None:
    call = paged_call([20, 20], [2, 2])
    call["kv_pages"][int(call["page_table"][1, 0]), 0, 3] = math.nan
    out = attend(backend, call)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()


BAD_CALLS = {
    "page id too large": ("page_table", lambda x: x.index_fill(0, torch.tensor([1]), 999), "page id", 1),
    "page id negative": ("page_table", lambda x: x.index_fill(0, torch.tensor([0]), -1), "page id", 0),
    "length past its pages": ("kv_lens", lambda x: x + torch.tensor([0, 1000], dtype=torch.int32), "kv_lens", 1),
    "length below its rows": ("kv_lens", lambda x: x * torch.tensor([1, 0], dtype=torch.int32), "kv_lens", 1),
    "rows that go back": ("query_start", lambda x: torch.tensor([0, 7, 5], dtype=torch.int32), "must not decrease", 1),
    "rows that do not start at 0": ("query_start", lambda x: x.clamp(min=1), "query_start must start at 0", 0),
    "rows that end early": (
        "query_start",
        lambda x: torch.tensor([0, 2, 4], dtype=torch.int32),
        "query must have 4 rows",
        None,
    ),
    "table dtype": ("page_table", lambda x: x.long(), "page_table", None),
    "lengths dtype": ("kv_lens", lambda x: x.long(), "kv_lens", None),
    "starts shape": ("query_start", lambda x: x[:-1], "query_start", None),
    "query dtype": ("query", lambda x: x.double(), "no attention in this dtype", None),
    "query rank": ("query", lambda x: x[0], "query", None),
    "query device": ("query", lambda x: x.to("meta"), "device", None),
    "pages dtype": ("kv_pages", lambda x: x.bfloat16(), "kv_pages", None),
    "pages shape": ("kv_pages", lambda x: x[:, :1], "kv_pages", None),
    "heads": ("query", lambda x: x[:, :3], "num_heads must be a multiple", None),
    "no heads": ("query", lambda x: x[:, :0], "num_heads, num_kv_heads and page_size must be above 0", None),
    "no kv heads": ("kv_pages", lambda x: x[:, :, :, :0], "num_heads, num_kv_heads and page_size", None),
    "pages of nothing": ("kv_pages", lambda x: x[:, :, :0], "num_heads, num_kv_heads and page_size", None),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_call_is_refused(backend: KernelBackend, case: str) -> None:
    name, change, problem, row = BAD_CALLS[case]
    call = paged_call([40, 20], [2, 3])
    call[name] = change(call[name])
    if case == "rows that end early" and backend.capabilities.graphs:
        assert attend(backend, call).isfinite().all(), "rows that belong to nobody are allowed"
        return
    with pytest.raises(InvalidKernelInput, match=problem) as caught:
        attend(backend, call)
    assert caught.value.row == row


def test_a_head_that_is_too_wide_is_refused(backend: KernelBackend) -> None:
    with pytest.raises(InvalidKernelInput, match=r"head_dim must be in 1\.\.128"):
        attend(backend, paged_call([5], [1], head_dim=129))


def test_a_cache_that_is_not_contiguous_is_refused_rather_than_copied() -> None:
    call = paged_call([40, 20], [2, 3])
    call["kv_pages"] = call["kv_pages"].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(InvalidKernelInput, match="contiguous"):
        attend(get_backend("cpp"), call)
