"""The C++ ops as torch's own machinery sees them: schema, mutation marks, fakes, tracing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equivtest.kernels.contract import RowParams
from equivtest.kernels.cpp import load
from equivtest.records import SamplingParams

OPS = ("verify_probs", "spec_accept", "sample", "paged_attention")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    load()


def arguments(op: str, *, variant: int) -> tuple[Tensor | int | None, ...]:
    """A valid call; variant 1 uses the optional arguments or the other dtype."""
    generator = torch.Generator().manual_seed(1)
    keys, positions = torch.arange(3), torch.arange(3)
    if op == "verify_probs":
        logits = torch.randn(3, 40, generator=generator)
        params = RowParams.of([SamplingParams(top_p=0.9)] * 3)
        if variant:
            return logits.bfloat16(), *params, torch.tensor([2, 0, 4]), torch.zeros(5, 40)
        return logits, *params, None, torch.zeros(3, 40)
    if op == "spec_accept":
        target, draft = torch.rand(3, 3, 40, generator=generator), torch.rand(3, 2, 40, generator=generator)
        ids, num_draft = torch.randint(0, 40, (3, 2), generator=generator), torch.tensor([2, 0, 1], dtype=torch.int32)
        outputs = torch.zeros(3, 3, dtype=torch.int64), *(torch.zeros(3, dtype=torch.int32) for _ in range(2))
        return ids, num_draft, target, draft if variant else None, keys, positions, *outputs
    if op == "sample":
        return torch.rand(3, 40, generator=generator), keys, positions, 4 - variant, torch.zeros(3, dtype=torch.int64)
    dtype = torch.bfloat16 if variant else torch.float32
    query = torch.randn(4, 4, 32, generator=generator).to(dtype)
    pages = torch.randn(6, 2, 4, 2, 32, generator=generator).to(dtype)
    table = torch.tensor([[0, 3], [5, 1]], dtype=torch.int32)
    lengths, starts = torch.tensor([7, 5], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    return query, pages, table, lengths, starts, torch.zeros_like(query)


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_opcheck_passes(op: str, variant: int) -> None:
    result = torch.library.opcheck(getattr(torch.ops.equivtest, op).default, arguments(op, variant=variant))
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", OPS)
def test_the_schema_marks_exactly_what_the_kernel_changes(op: str) -> None:
    args = arguments(op, variant=1)
    before = [arg.clone() if isinstance(arg, Tensor) else None for arg in args]
    overload = getattr(torch.ops.equivtest, op).default
    overload(*args)
    for argument, now, then in zip(overload._schema.arguments, args, before, strict=True):
        changed = isinstance(now, Tensor) and not torch.equal(now, then)
        assert changed == (argument.alias_info is not None and argument.alias_info.is_write), argument.name


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_no_implementation_for_a_device_it_does_not_serve(op: str) -> None:
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"equivtest::{op}", "CUDA")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"equivtest::{op}", "CPU")


def test_loading_twice_gives_the_same_backend() -> None:
    assert load() is load()
