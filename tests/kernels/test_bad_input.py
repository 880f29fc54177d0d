"""Every wrong call is a typed exception that names the row and the value, and leaves the outputs as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput, KernelError, ScratchTooSmall, UnsupportedSampling
from equivtest.kernels.checks import check_params_supported, check_spec_accept, check_verify_probs
from equivtest.kernels.contract import Capabilities, KernelBackend, RowParams, SpecScratch, Streams
from equivtest.kernels.reference import ReferenceBackend
from equivtest.records import SamplingParams

UNTOUCHED = 7
ROWS, VOCAB, DRAFT = 4, 50, 2
Change = Callable[[dict[str, Any]], None]


def put(name: str, index: Any, value: float) -> Change:
    """Set one entry of an argument; `params.x` and `streams.x` reach into those tuples."""

    def change(call: dict[str, Any]) -> None:
        owner, _, field = name.partition(".")
        tensor = getattr(call[owner], field) if field else call[owner]
        tensor[index] = value

    return change


def swap(name: str, new: Callable[[Tensor], Tensor]) -> Change:
    """Replace an argument by a function of it."""

    def change(call: dict[str, Any]) -> None:
        owner, _, field = name.partition(".")
        if field:
            call[owner] = call[owner]._replace(**{field: new(getattr(call[owner], field))})
        else:
            call[owner] = new(call[owner])

    return change


def verify_call() -> dict[str, Any]:
    return {
        "logits": torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)),
        "params": RowParams.of([SamplingParams(temperature=0.8, top_p=0.95)] * ROWS),
        "out": torch.full((ROWS, VOCAB), float(UNTOUCHED)),
        "out_rows": torch.arange(ROWS),
    }


VERIFY_CASES: dict[str, tuple[Change, str, int | None, float | None]] = {
    "NaN": (put("logits", (2, 7), math.nan), "NaN", 2, math.nan),
    "NaN in the tail": (put("logits", (3, VOCAB - 1), math.nan), "NaN", 3, math.nan),
    "plus infinity": (put("logits", (1, 0), math.inf), "inf", 1, math.inf),
    "no finite logit": (put("logits", 3, -math.inf), "finite", 3, -math.inf),
    "overflowing temperature": (put("params.temperature", 1, 1e-40), "overflows", 1, math.inf),
    "top_p 0": (put("params.top_p", 1, 0.0), "top_p", 1, 0.0),
    "top_p above 1": (put("params.top_p", 2, 1.5), "top_p", 2, 1.5),
    "top_p NaN": (put("params.top_p", 2, math.nan), "top_p", 2, math.nan),
    "negative temperature": (put("params.temperature", 3, -0.5), "temperature", 3, -0.5),
    "infinite temperature": (put("params.temperature", 3, math.inf), "temperature", 3, math.inf),
    "negative top_k": (put("params.top_k", 0, -1), "top_k", 0, -1),
    "min_p above 1": (put("params.min_p", 2, 2.0), "min_p", 2, 2.0),
    "negative min_p": (put("params.min_p", 2, -1.0), "min_p", 2, -1.0),
    "out row out of range": (put("out_rows", 2, ROWS), "out_rows", 2, ROWS),
    "out row negative": (put("out_rows", 1, -1), "out_rows", 1, -1),
    "out row twice": (put("out_rows", 2, 1), "out_rows", None, None),
    "out rows dtype": (swap("out_rows", lambda x: x.int()), "out_rows", None, None),
    "vocab 0": (swap("logits", lambda x: x[:, :0]), "vocab_size", None, None),
    "logits rank": (swap("logits", lambda x: x[0]), "logits", None, None),
    "logits dtype": (swap("logits", lambda x: x.half()), "dtype", None, None),
    "logits device": (swap("logits", lambda x: x.to("meta")), "device", None, None),
    "param shape": (swap("params.top_p", lambda x: x[:-1]), "top_p", None, None),
    "param dtype": (swap("params.top_k", lambda x: x.long()), "top_k", None, None),
    "param device": (swap("params.min_p", lambda x: x.to("meta")), "device", None, None),
    "out vocabulary": (swap("out", lambda x: x[:, :-1].contiguous()), "out", None, None),
    "out dtype": (swap("out", lambda x: x.bfloat16()), "out", None, None),
    "out strided": (swap("out", lambda x: x.t().contiguous().t()), "contiguous", None, None),
}


def check_refusal(raised: KernelError, problem: str, row: int | None, value: float | None) -> None:
    assert isinstance(raised, InvalidKernelInput)
    assert isinstance(raised, ValueError)
    assert problem in str(raised)
    assert raised.row == row
    if value is not None:
        assert raised.value == pytest.approx(value, nan_ok=True)
        assert f"row {row}" in str(raised)


@pytest.mark.parametrize("case", VERIFY_CASES)
def test_verify_probs_refuses(backend: KernelBackend, case: str) -> None:
    change, problem, row, value = VERIFY_CASES[case]
    call = verify_call()
    change(call)
    with pytest.raises(InvalidKernelInput) as caught:
        backend.verify_probs(**call)
    check_refusal(caught.value, problem, row, value)
    assert (call["out"] == UNTOUCHED).all()


def test_verify_probs_takes_the_call_that_the_cases_spoil(backend: KernelBackend) -> None:
    call = verify_call()
    backend.verify_probs(**call)
    assert (call["out"] != UNTOUCHED).all()


def accept_call() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    scratch = SpecScratch(ROWS, DRAFT, VOCAB)
    for buffer in (scratch.output_token_ids, scratch.emitted, scratch.acceptance_telemetry, scratch.token_ids):
        buffer.fill_(UNTOUCHED)
    return {
        "draft_token_ids": torch.randint(0, VOCAB, (ROWS, DRAFT), generator=generator),
        "num_draft": torch.full((ROWS,), DRAFT, dtype=torch.int32),
        "target_probs": torch.rand(ROWS, DRAFT + 1, VOCAB, generator=generator) + 0.01,
        "draft_probs": torch.rand(ROWS, DRAFT, VOCAB, generator=generator) + 0.01,
        "streams": Streams(torch.arange(ROWS), torch.arange(ROWS)),
        "scratch": scratch,
    }


def small_scratch(**size: int) -> Change:
    def change(call: dict[str, Any]) -> None:
        fits = {"max_batch": ROWS, "max_draft": DRAFT, "vocab_size": VOCAB}
        call["scratch"] = SpecScratch(**{**fits, **size})

    return change


ACCEPT_CASES: dict[str, tuple[Change, str, int | None, float | None]] = {
    "NaN target": (put("target_probs", 2, math.nan), "finite", 2, math.nan),
    "negative target": (put("target_probs", 1, -0.25), "at least 0", 1, -0.25),
    "infinite target": (put("target_probs", 3, math.inf), "finite", 3, math.inf),
    "target without mass": (put("target_probs", 0, 0.0), "must not all be 0", 0, 0.0),
    "NaN q": (put("draft_probs", 2, math.nan), "draft probabilities", 2, math.nan),
    "negative q": (put("draft_probs", 1, -0.25), "draft probabilities", 1, -0.25),
    "draft id too large": (put("draft_token_ids", (2, 1), VOCAB), "draft id", 2, VOCAB),
    "draft id negative": (put("draft_token_ids", (1, 0), -1), "draft id", 1, -1),
    "num_draft too large": (put("num_draft", 3, DRAFT + 1), "num_draft", 3, DRAFT + 1),
    "num_draft negative": (put("num_draft", 0, -1), "num_draft", 0, -1),
    "position negative": (put("streams.positions", 2, -1), "positions", 2, -1),
    "position past 32 bits": (put("streams.positions", 2, 2**32), "positions", 2, 2**32),
    "last draft past 32 bits": (put("streams.positions", 2, 2**32 - DRAFT), "positions", 2, 2**32 - DRAFT),
    "position that wraps around": (put("streams.positions", 2, 2**63 - 1), "positions", 2, 2**63 - 1),
    "vocab 0": (swap("target_probs", lambda x: x[..., :0]), "vocab_size", None, None),
    "target rank": (swap("target_probs", lambda x: x[0]), "target_probs", None, None),
    "target dtype": (swap("target_probs", lambda x: x.bfloat16()), "target_probs", None, None),
    "target device": (swap("target_probs", lambda x: x.to("meta")), "device", None, None),
    "q shape": (swap("draft_probs", lambda x: x[:, :1]), "draft_probs", None, None),
    "q dtype": (swap("draft_probs", lambda x: x.double()), "draft_probs", None, None),
    "drafts shape": (swap("draft_token_ids", lambda x: x[:, :1]), "draft_token_ids", None, None),
    "drafts dtype": (swap("draft_token_ids", lambda x: x.int()), "draft_token_ids", None, None),
    "num_draft dtype": (swap("num_draft", lambda x: x.long()), "num_draft", None, None),
    "num_draft device": (swap("num_draft", lambda x: x.to("meta")), "device", None, None),
    "keys dtype": (swap("streams.keys", lambda x: x.int()), "keys", None, None),
    "positions shape": (swap("streams.positions", lambda x: x[:-1]), "positions", None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPT_CASES)
def test_spec_accept_refuses(backend: KernelBackend, case: str) -> None:
    change, problem, row, value = ACCEPT_CASES[case]
    call = accept_call()
    change(call)
    with pytest.raises(InvalidKernelInput) as caught:
        backend.spec_accept(**call)
    check_refusal(caught.value, problem, row, value)
    scratch = call["scratch"]
    for buffer in (scratch.output_token_ids, scratch.emitted, scratch.acceptance_telemetry):
        assert (buffer == UNTOUCHED).all()


@pytest.mark.parametrize("size", [{"max_batch": ROWS - 1}, {"max_draft": DRAFT - 1}], ids=str)
def test_spec_accept_refuses_an_undersized_scratch(backend: KernelBackend, size: dict[str, int]) -> None:
    call = accept_call()
    small_scratch(**size)(call)
    with pytest.raises(ScratchTooSmall, match=f"batch {ROWS}, draft {DRAFT}"):
        backend.spec_accept(**call)


def test_spec_accept_takes_the_call_that_the_cases_spoil(backend: KernelBackend) -> None:
    result = backend.spec_accept(**accept_call())
    assert ((result.output_token_ids >= -1) & (result.output_token_ids < VOCAB)).all()


def test_spec_accept_takes_the_last_position_whose_drafts_fit(backend: KernelBackend) -> None:
    call = accept_call()
    call["streams"].positions[2] = 2**32 - DRAFT - 1
    assert (backend.spec_accept(**call).output_token_ids < VOCAB).all()


def test_the_lowest_wrong_row_is_named_first(backend: KernelBackend) -> None:
    call = accept_call()
    call["target_probs"][[1, 3]] = math.nan
    with pytest.raises(InvalidKernelInput, match="row 1"):
        backend.spec_accept(**call)


SAMPLE_CASES: dict[str, tuple[Change, str, int | None, float | None]] = {
    "NaN": (put("target_probs", (2, 3), math.nan), "finite", 2, math.nan),
    "negative": (put("target_probs", (1, VOCAB - 1), -0.25), "at least 0", 1, -0.25),
    "without mass": (put("target_probs", 3, 0.0), "must not all be 0", 3, 0.0),
    "vocab 0": (swap("target_probs", lambda x: x[:, :0]), "vocab_size", None, None),
    "rank": (swap("target_probs", lambda x: x[0]), "target_probs", None, None),
    "dtype": (swap("target_probs", lambda x: x.half()), "target_probs", None, None),
    "device": (swap("target_probs", lambda x: x.to("meta")), "device", None, None),
    "out dtype": (swap("out", lambda x: x.int()), "out", None, None),
    "out shape": (swap("out", lambda x: x[:-1]), "out", None, None),
    "out strided": (swap("out", lambda x: x.repeat_interleave(2)[::2]), "contiguous", None, None),
    "keys shape": (swap("streams.keys", lambda x: x[:-1]), "keys", None, None),
    "position negative": (put("streams.positions", 1, -3), "positions", 1, -3),
    "position past 32 bits": (put("streams.positions", 1, 2**32), "positions", 1, 2**32),
    "position at the end of 64 bits": (put("streams.positions", 1, 2**63 - 1), "positions", 1, 2**63 - 1),
}


@pytest.mark.parametrize("case", SAMPLE_CASES)
def test_sample_refuses(backend: KernelBackend, case: str) -> None:
    change, problem, row, value = SAMPLE_CASES[case]
    call = {
        "target_probs": torch.rand(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)) + 0.01,
        "streams": Streams(torch.arange(ROWS), torch.arange(ROWS)),
        "out": torch.full((ROWS,), UNTOUCHED),
    }
    change(call)
    with pytest.raises(InvalidKernelInput) as caught:
        backend.sample(**call)
    check_refusal(caught.value, problem, row, value)
    assert (call["out"] == UNTOUCHED).all()


class Limited(ReferenceBackend):
    """A backend that says it lacks min_p, per-request seeds and ragged drafts."""

    name = "limited"

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities(
            min_p=False,
            per_request_seed=False,
            ragged_draft=False,
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32}),
        )


def test_what_a_backend_cannot_represent_it_refuses_before_any_work() -> None:
    limited = Limited()
    call = verify_call()
    call["params"] = RowParams.of([SamplingParams(min_p=0.1)] * ROWS)
    with pytest.raises(UnsupportedSampling, match="min_p"):
        check_verify_probs(limited, **call)
    call = accept_call()
    call["num_draft"][1] = 1
    with pytest.raises(UnsupportedSampling, match="num_draft"):
        check_spec_accept(limited, **call)
    with pytest.raises(UnsupportedSampling, match="seed"):
        check_params_supported(limited, SamplingParams(), seeded=True)
    with pytest.raises(UnsupportedSampling, match="min_p"):
        check_params_supported(limited, SamplingParams(min_p=0.1), seeded=False)


def test_both_backends_represent_min_p_and_seeds(backend: KernelBackend) -> None:
    check_params_supported(backend, SamplingParams(min_p=0.1), seeded=True)
