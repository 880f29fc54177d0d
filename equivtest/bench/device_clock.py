"""How long one operation takes on a device: medians of CUDA events around graph replays."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

Call = Callable[[], object]

_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
_TIMED_S = 0.1
"""About how long an operation is timed for."""
_PASS_S = 0.002
"""A pass between two events takes at least about this long, so that reading the clock does not count."""
_PASSES = (5, 50)


class Timing(NamedTuple):
    """A median."""

    us: float
    """Of one call."""
    how: Literal["graph", "launches", "host"]
    """graph: events around replays of a CUDA graph of calls; launches: events around the calls themselves, for what
    waits for the host; host: the processor's clock."""


def time_calls(calls: Sequence[Call], device: str) -> Timing:
    """The median time of one call. `calls`: the same operation on other inputs, taken in turn; each is made once first.

    With one input that fits in the device's cache, the cache is what would be measured: see `num_inputs`.
    """
    for call in calls:
        call()
    if device == "cpu":
        return Timing(_median_us(lambda: _host_s(calls)) / len(calls), "host")
    torch.cuda.synchronize()
    once_s = _device_s(lambda: _all(calls)) / len(calls)
    wanted = min(20, int(_PASS_S / once_s))
    several = list(calls) * max(1, -(-wanted // len(calls)))
    graph = _captured(several)
    replay: Callable[[], None] = graph.replay if graph is not None else lambda: _all(several)
    replay()
    us = _median_us(lambda: _device_s(replay)) / len(several)
    return Timing(us, "launches" if graph is None else "graph")


def time_back_to_back(call: Call, device: str, *, calls: int, before: Call | None = None) -> float:
    """The median time of one of `calls` calls in a row, in microseconds.

    One more goes ahead of them, during which a GPU is handed the others: it never waits for the first of them, nor for
    any that takes longer than its launch. before: made ahead of every such row, and not timed.
    """

    def one_row() -> float:
        if before is not None:
            before()
        call()
        return _host_s([call] * calls) if device == "cpu" else _device_s(lambda: _all([call] * calls))

    one_row()
    return _median_us(one_row) / calls


def replay_of(call: Call, device: str) -> Call:
    """The replay of a CUDA graph of the call; on a CPU the call itself."""
    if device == "cpu":
        return call
    call()  # libraries allocate at their first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def num_inputs(input_bytes: int, l2_bytes: int) -> int:
    """How many inputs to take in turn so that none is still in a cache of `l2_bytes` when its turn comes again."""
    return max(1, -(-4 * l2_bytes // input_bytes))


def copy_bandwidth(device: str) -> float:
    """Bytes read and written in a second by a large copy within the device's memory."""
    source = torch.empty(_COPY_BYTES[device], dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], device)
    return 2 * len(source) / (timing.us / 1e6)


def l2_bytes(device: str) -> int:
    """Size of the device's last cache; 0 for a processor, where inputs are not taken in turn."""
    return 0 if device == "cpu" else int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """The calls as a graph; None where one waits for the host, which a graph cannot hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode misses some waits: capture itself finds those
        torch.cuda.set_sync_debug_mode("error")
        try:
            calls[0]()
        except RuntimeError:
            return None
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            _all(calls)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _median_us(seconds: Callable[[], float]) -> float:
    """The median of as many measurements as fit in the time, within `_PASSES`."""
    taken = [seconds()]
    while len(taken) < _PASSES[0] or (sum(taken) < _TIMED_S and len(taken) < _PASSES[1]):
        taken.append(seconds())
    return 1e6 * statistics.median(taken)


def _all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _host_s(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    _all(calls)
    return time.perf_counter() - start


def _device_s(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
