"""How long a step's filter and draw take: the C++ kernels, the reference, and plain torch with a sort."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import KernelBackend, RowParams, Streams
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams

TORCH_SORT = "torch_sort"
"""Softmax, sort, cumulative sum, mask, scatter and multinomial: how samplers are usually written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTiming:
    """One way of doing it, timed; medians."""

    name: str
    """`cpp`, `reference` or `torch_sort`."""
    filter_ms: float
    """From logits to filtered probabilities."""
    sample_ms: float
    """From probabilities to one token a row."""
    total_ms: float
    """Both."""
    speedup: float
    """How many times faster than `torch_sort` the whole is; 1 for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBench:
    """What was measured, on what."""

    num_rows: int
    vocab_size: int
    temperature: float
    top_p: float
    repeats: int
    num_threads: int
    torch_version: str
    timings: tuple[KernelTiming, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One table row a way of doing it."""
        return [
            {
                "what": timing.name,
                "filter_ms": timing.filter_ms,
                "sample_ms": timing.sample_ms,
                "total_ms": timing.total_ms,
                "speedup": timing.speedup,
            }
            for timing in self.timings
        ]

    def settings(self) -> dict[str, Any]:
        """Everything but the timings."""
        return {key: value for key, value in asdict(self).items() if key != "timings"}


def bench_kernels(
    num_rows: int = 256,
    vocab_size: int = 49152,
    top_p: float = 0.95,
    temperature: float = 0.8,
    repeats: int = 7,
    backends: tuple[str, ...] = ("cpp", "reference"),
) -> KernelBench:
    """Time filter and draw on logits shaped like a language model's, with each of `backends` and with `torch_sort`.

    One untimed round comes first. Raises InvalidSetting, or KernelUnavailable for a backend that does not work here.
    """
    for setting, value in (("num_rows", num_rows), ("vocab_size", vocab_size), ("repeats", repeats)):
        if value < 1:
            raise InvalidSetting(setting, value, "must be at least 1")
    params = SamplingParams(temperature=temperature, top_p=top_p)
    if params.greedy:
        raise InvalidSetting("temperature", temperature, "must be above 0: a greedy step draws nothing")
    logits = realistic_logits(num_rows, vocab_size)
    ways = {name: _backend_way(get_backend(name), logits, params) for name in backends}
    ways[TORCH_SORT] = _torch_sort_way(logits, params)

    medians = {name: _time(*way, repeats) for name, way in ways.items()}
    return KernelBench(
        num_rows=num_rows,
        vocab_size=vocab_size,
        temperature=temperature,
        top_p=top_p,
        repeats=repeats,
        num_threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        timings=tuple(
            KernelTiming(
                name=name,
                filter_ms=filter_ms,
                sample_ms=sample_ms,
                total_ms=total_ms,
                speedup=medians[TORCH_SORT][2] / total_ms,
            )
            for name, (filter_ms, sample_ms, total_ms) in medians.items()
        ),
    )


def realistic_logits(num_rows: int, vocab_size: int, *, device: str = "cpu") -> Tensor:
    """float32 [num_rows, vocab_size]: normal with deviation 3, and an exponential upper tail on one token in 500.

    A quarter of the rows has one token far above the rest, as a model that is sure of the next word.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=generator, device=device) * 3
    tail = torch.rand(num_rows, vocab_size, generator=generator, device=device) < 1 / 500
    logits += tail * torch.empty_like(logits).exponential_(1 / 3, generator=generator)
    logits[::4, vocab_size // 3] += 15
    return logits


Step = tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]
"""Logits to probabilities; probabilities to tokens."""


def _backend_way(backend: KernelBackend, logits: Tensor, params: SamplingParams) -> Step:
    num_rows = logits.shape[0]
    row_params = RowParams.of([params] * num_rows)
    streams = Streams(torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.int64))
    probs, tokens = torch.empty_like(logits), torch.empty(num_rows, dtype=torch.int64)
    return (
        lambda: backend.verify_probs(logits, row_params, out=probs),
        lambda target_probs: backend.sample(target_probs, streams, out=tokens),
    )


def _torch_sort_way(logits: Tensor, params: SamplingParams) -> Step:
    generator = torch.Generator().manual_seed(0)

    def filtered() -> Tensor:
        descending, ids = (logits / params.temperature).softmax(dim=-1).sort(dim=-1, descending=True)
        past_the_cut = descending.cumsum(dim=-1) - descending >= params.top_p
        kept = descending.masked_fill_(past_the_cut, 0.0)
        probs = torch.empty_like(kept).scatter_(1, ids, kept)
        return probs.div_(probs.sum(dim=-1, keepdim=True))

    return filtered, lambda probs: probs.multinomial(1, generator=generator)


def _time(filtered: Callable[[], Tensor], draw: Callable[[Tensor], Tensor], repeats: int) -> tuple[float, float, float]:
    """Medians in milliseconds of the filter, the draw and both."""
    draw(filtered())
    filter_ms, sample_ms = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        probs = filtered()
        between = time.perf_counter()
        draw(probs)
        end = time.perf_counter()
        filter_ms.append((between - start) * 1e3)
        sample_ms.append((end - between) * 1e3)
    both = [sum(pair) for pair in zip(filter_ms, sample_ms, strict=True)]
    return statistics.median(filter_ms), statistics.median(sample_ms), statistics.median(both)
