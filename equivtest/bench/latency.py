"""Time per output token, as serving benchmarks define it, from the steps of one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting
from equivtest.records import Generation, Origin, Request

FloatArray = npt.NDArray[np.float64]


class Generates(Protocol):
    """An engine or an executor."""

    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculative: bool,
        fault: Callable[[Any], Any] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Requests that were served in one call, and its clock."""

    generations: Sequence[Generation]
    step_ends_s: FloatArray
    """[num_steps], when the host had read the tokens of each step; from an arbitrary origin."""
    wall_s: float
    """The whole call, prefill included."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests over the time of the whole call."""
        return sum(len(generation.token_ids) for generation in self.generations) / self.wall_s

    def tpot_s(self) -> FloatArray:
        """Seconds per output token of each request, [num_requests]."""
        return np.array([tpot_s(generation.steps, self.step_ends_s) for generation in self.generations])


def serve(
    engine: Generates,
    requests: Sequence[Request],
    *,
    speculative: bool,
    fault: Callable[[Any], Any] | None = None,
) -> Served:
    """Generate for all requests in one call, as many at a time as the engine's max_batch, and keep its clock.

    No other wait for the device is added: the clock is read once the step itself has read its tokens.
    """
    ends: list[float] = []
    started = time.perf_counter()
    generations = engine.generate(
        requests, speculative=speculative, fault=fault, on_tokens=lambda _: ends.append(time.perf_counter())
    )
    wall_s = time.perf_counter() - started
    return Served(generations=generations, step_ends_s=np.array(ends), wall_s=wall_s)


def tpot_s(steps: npt.NDArray[np.int32], step_ends_s: FloatArray) -> float:
    """Time per output token of one request: (time of its last token - time of its first) / (tokens - 1).

    steps: [num_tokens], the step that put each token out. Tokens of one round come out together, so speculation shows
    as fewer steps between first and last. Raises InvalidSetting for a text of one token, which has no such time.
    """
    if len(steps) < 2:
        raise InvalidSetting("tokens of a request", len(steps), "must be at least 2 to have a time per output token")
    return float(step_ends_s[steps[-1]] - step_ends_s[steps[0]]) / (len(steps) - 1)


def accepted_per_round(generations: Sequence[Generation]) -> float:
    """Drafts kept in a round that offered any, on average over all rounds of all requests; 0 where none did."""
    rounds = accepted = 0
    for generation in generations:
        rounds += len(np.unique(generation.steps[generation.num_drafts > 0]))
        accepted += sum(origin is Origin.ACCEPTED for origin in generation.origins)
    return accepted / rounds if rounds else 0.0


def tpot_columns(tpot: FloatArray) -> dict[str, float]:
    """Median and 99th percentile over requests ([num_requests] s), linearly interpolated, in milliseconds."""
    p50, p99 = np.percentile(tpot, (50, 99))
    return {"tpot_p50_ms": 1e3 * float(p50), "tpot_p99_ms": 1e3 * float(p99)}
