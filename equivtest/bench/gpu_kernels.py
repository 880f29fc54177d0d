"""From logits to accepted tokens on a device: every backend, and the vendor's pipeline in pieces."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from equivtest.bench.device_clock import Call, copy_bandwidth, l2_bytes, num_inputs, time_calls
from equivtest.bench.kernels import realistic_logits
from equivtest.bench.measured import Measured, describe_device
from equivtest.errors import KernelUnavailable
from equivtest.kernels.contract import FusedBackend, KernelBackend, RowParams, SpecScratch, Streams
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams

LAW = SamplingParams(temperature=0.8, top_p=0.95)
FUSED, VENDOR = "cuda fused", "vendor pipeline"
ALL = "all"
"""The operation that stands for a whole way."""
_BACKENDS = ("cuda", "flashinfer", "reference")

Vendor = Callable[[Tensor, Tensor, float, float], Mapping[str, Call]]
"""(logits [B * (K + 1), vocab_size], B, K, temperature, top_p) to the pipeline's pieces, to be called in this order."""


class Case(NamedTuple):
    """One size: B requests of K drafts each."""

    vocab: int
    batch: int
    draft: int

    @property
    def num_rows(self) -> int:
        return self.batch * (self.draft + 1)

    @property
    def logits_bytes(self) -> int:
        """bfloat16."""
        return 2 * self.num_rows * self.vocab

    @property
    def probs_bytes(self) -> int:
        """float32."""
        return 4 * self.num_rows * self.vocab


class Operation(NamedTuple):
    """One step of a way, on every input set."""

    calls: Sequence[Call]
    bytes_read: int
    """Its dense inputs, each once."""


Ways = Mapping[str, Mapping[str, Operation]]
"""Ways of going from logits to accepted tokens, each as its operations by name, in order."""


def bench_gpu_kernels(
    *,
    device: str = "cuda",
    vocabs: Sequence[int] = (49_152, 151_936),
    batches: Sequence[int] = (1, 8, 16, 64),
    drafts: Sequence[int] = (7, 15),
    backends: Sequence[str] = _BACKENDS,
    vendor: Vendor | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Measured:
    """Time verification and acceptance of sure drafts at T .8 top_p .95 from bfloat16 logits.

    Columns: `us` the median of one call and `how` it was timed (`device_clock.Timing`); `sets` how many inputs were
    taken in turn, more than one where one would stay in the cache; `bytes_read` the dense inputs, each once;
    `share_of_copy` how fast those were read, against a large copy in the same run; `logits_reads` the time in units of
    the time to read the logits once at the copy's speed; `vendor_ratio` how many times as long the vendor pipeline took
    for the same. A way of several operations has a row for each, and the row `all` is their sum.

    vendor: default the FlashInfer pipeline. Backends and a pipeline that do not work here are left out and named in the
    settings.
    """
    tell = on_progress or (lambda line: None)
    refused: dict[str, str] = {}
    usable = list(_usable(backends, device, refused))
    pipeline = vendor or _flashinfer_pipeline(refused)
    bandwidth = copy_bandwidth(device)
    rows = []
    for vocab in vocabs:
        for batch in batches:
            for draft in drafts:
                case = Case(vocab, batch, draft)
                tell(f"vocab {vocab}, batch {batch}, {draft} drafts")
                rows += time_case(case, usable, pipeline, device, bandwidth)
    what = {
        **describe_device(device), "temperature": LAW.temperature, "top_p": LAW.top_p, "logits": "bfloat16",
        "copy_bytes_per_s": bandwidth, "refused": refused,
    }  # fmt: skip
    return Measured(what=what, table=tuple(rows))


def time_case(
    case: Case, backends: Sequence[KernelBackend], vendor: Vendor | None, device: str, bandwidth: float
) -> list[dict[str, Any]]:
    """The rows of one size; bandwidth in bytes a second."""
    count = num_inputs(case.logits_bytes, l2_bytes(device))
    first = realistic_logits(case.num_rows, case.vocab, device=device).to(torch.bfloat16)
    inputs = [first.roll(index, dims=1) for index in range(count)]
    del first
    ways: dict[str, Mapping[str, Operation]] = {}
    for backend in backends:
        ways |= backend_ways(backend, case, inputs)
    if vendor is not None:
        ways[VENDOR] = vendor_way(vendor, case, inputs)
    rows = []
    for way, operations in ways.items():
        total_us, hows = 0.0, set()
        for name, operation in operations.items():
            timing = time_calls(operation.calls, device)
            total_us += timing.us
            hows.add(timing.how)
            if len(operations) > 1:
                rows.append(_row(case, way, name, timing.us, timing.how, count, operation.bytes_read, bandwidth))
        rows.append(_row(case, way, ALL, total_us, "+".join(sorted(hows)), count, case.logits_bytes, bandwidth))
    return with_ratios(rows)


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one size with `vendor_ratio`, None where there is nothing to compare."""
    vendor_us = next((row["us"] for row in rows if (row["way"], row["op"]) == (VENDOR, ALL)), None)
    return [
        row | {"vendor_ratio": vendor_us / row["us"] if vendor_us is not None and row["op"] == ALL else None}
        for row in rows
    ]


def _row(
    case: Case, way: str, op: str, us: float, how: str, sets: int, bytes_read: int, bandwidth: float
) -> dict[str, Any]:
    return {
        **case._asdict(),
        "way": way,
        "op": op,
        "us": us,
        "how": how,
        "sets": sets,
        "bytes_read": bytes_read,
        "share_of_copy": bytes_read / (us / 1e6) / bandwidth,
        "logits_reads": us / 1e6 / (case.logits_bytes / bandwidth),
    }


def backend_ways(backend: KernelBackend, case: Case, inputs: Sequence[Tensor]) -> Ways:
    """The backend's two operations, and its fused one where it has that.

    inputs: bfloat16 [num_rows, vocab] each. Drafts are the likeliest tokens of their rows.
    """
    device = inputs[0].device
    rows, params = (RowParams.of([LAW] * count, device) for count in (case.num_rows, case.batch))
    num_draft = torch.full((case.batch,), case.draft, dtype=torch.int32, device=device)
    row_start = torch.arange(case.batch, dtype=torch.int32, device=device) * (case.draft + 1)
    streams = Streams(torch.arange(case.batch, device=device), torch.zeros_like(row_start, dtype=torch.int64))
    scratch = SpecScratch(case.batch, case.draft, case.vocab, device)
    drafts = [_likeliest(logits, case) for logits in inputs]
    probs = [torch.empty(logits.shape, dtype=torch.float32, device=device) for logits in inputs]
    pairs = list(zip(inputs, drafts, probs, strict=True))

    def verify(logits: Tensor, out: Tensor) -> Call:
        return lambda: backend.verify_probs(logits, rows, out=out)

    def accept(draft_ids: Tensor, out: Tensor) -> Call:
        laws = out.view(case.batch, case.draft + 1, case.vocab)
        return lambda: backend.spec_accept(draft_ids, num_draft, laws, None, streams, scratch=scratch)

    ways = {
        backend.name: {
            "verify_probs": Operation([verify(logits, out) for logits, _, out in pairs], case.logits_bytes),
            "spec_accept": Operation([accept(draft_ids, out) for _, draft_ids, out in pairs], case.probs_bytes),
        }
    }
    if backend.capabilities.fused:
        fused = cast("FusedBackend", backend)

        def accept_logits(logits: Tensor, draft_ids: Tensor) -> Call:
            return lambda: fused.accept_logits(
                logits, row_start, params, draft_ids, num_draft, None, streams, rule="chain", scratch=scratch
            )

        calls = [accept_logits(logits, draft_ids) for logits, draft_ids, _ in pairs]
        ways[f"{backend.name} fused"] = {"accept_logits": Operation(calls, case.logits_bytes)}
    return ways


def vendor_way(vendor: Vendor, case: Case, inputs: Sequence[Tensor]) -> Mapping[str, Operation]:
    """The pipeline's pieces, in their order; the first of them casts the logits."""
    made = [vendor(logits, _likeliest(logits, case), LAW.temperature, LAW.top_p) for logits in inputs]
    names = list(made[0])
    return {
        name: Operation([pieces[name] for pieces in made], case.logits_bytes if name == names[0] else case.probs_bytes)
        for name in names
    }


def _likeliest(logits: Tensor, case: Case) -> Tensor:
    """int64 [B, K]."""
    return logits.argmax(dim=1).view(case.batch, case.draft + 1)[:, : case.draft].contiguous()


def _usable(names: Sequence[str], device: str, refused: dict[str, str]) -> Iterator[KernelBackend]:
    for name in names:
        try:
            backend = get_backend(name)
        except KernelUnavailable as unavailable:
            refused[name] = unavailable.reason
            continue
        if device in backend.capabilities.devices:
            yield backend
        else:
            refused[name] = f"it does not run on {device}"


def _flashinfer_pipeline(refused: dict[str, str]) -> Vendor | None:
    try:
        return cast("Vendor", importlib.import_module("equivtest.bench.vendor_pipeline").pieces)
    except Exception as error:  # FlashInfer imports compilers and drivers, which fail in their own ways
        refused[VENDOR] = f"{type(error).__name__}: {error}"
        return None
