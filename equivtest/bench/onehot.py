"""What a dense one-hot of the drafts costs: written anew every step, by scatter, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from equivtest.bench.latency import serve, tpot_columns
from equivtest.bench.measured import Measured, describe_device
from equivtest.bench.subject import SAMPLED, open_engine, requests_for
from equivtest.decoder.stages import AcceptStage, Drafts, FusedStage, Scored, Stages, StepInput
from equivtest.engines.base import EngineOptions
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import SpecAccept

Mode = Literal["none", "scatter", "dense"]
MODES: tuple[Mode, ...] = ("none", "scatter", "dense")


def bench_onehot(
    options: EngineOptions,
    *,
    random_model: str | None = None,
    concurrency: int = 8,
    max_tokens: int = 128,
    rounds: int = 5,
    on_progress: Callable[[str], None] | None = None,
) -> Measured:
    """Time per output token at T .8 top_p .95 with three ways of having one-hot laws of the drafts before accepting.

    dense: B x K x vocab float32 set to zero and the drafts' entries to one, every step. scatter: the entries set to one
    and cleared again after the step. none: neither, as our own kernels work. Nothing reads the rows, so tokens are the
    same in all three. The ways take turns in `rounds` rounds; percentiles are over the requests of all rounds.
    """
    if min(concurrency, max_tokens - 1, rounds) < 1:
        raise InvalidSetting("concurrency, max_tokens, rounds", (concurrency, max_tokens, rounds), "are too small")
    tell = on_progress or (lambda line: None)
    engine = open_engine(dataclasses.replace(options, max_batch=concurrency), random_model, on_message=tell)
    requests = requests_for(engine, [SAMPLED] * (2 * concurrency), max_tokens=max_tokens)
    wraps = {mode: OneHotWrap(mode) for mode in MODES}
    for wrap in wraps.values():
        serve(engine, requests, speculative=True, fault=wrap)
    tpot: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        for mode, wrap in wraps.items():
            tpot[mode] += serve(engine, requests, speculative=True, fault=wrap).tpot_s().tolist()
    columns = {mode: tpot_columns(np.array(times)) for mode, times in tpot.items()}
    bare = columns["none"]["tpot_p50_ms"]
    table = tuple(
        {
            "one_hot": mode,
            **columns[mode],
            "delta_percent": 100 * (columns[mode]["tpot_p50_ms"] / bare - 1),
            "bytes_a_step": wraps[mode].bytes_a_step,
        }
        for mode in MODES
    )
    what = {
        **describe_device(options.device), "asked": asdict(options), "subject": dict(engine.describe()),
        "concurrency": concurrency, "max_tokens": max_tokens, "rounds": rounds,
    }  # fmt: skip
    return Measured(what=what, table=table)


class OneHotWrap:
    """Wraps the stage that accepts: as a fault is planted, but the tokens stay what they are."""

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self.bytes_a_step = 0
        """Most that a step has written."""
        self._flat: Tensor | None = None

    def __call__(self, stages: Stages) -> Stages:
        if stages.fused is not None:
            return dataclasses.replace(stages, fused=_Fused(self, stages.fused))
        return dataclasses.replace(stages, accept=_Accept(self, stages.accept))

    def prepare(self, step: StepInput, drafts: Drafts, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """The rows with ones at the drafts, and those places; None where there is nothing to do."""
        if self.mode == "none" or drafts.width == 0:
            return None
        scratch = step.scratch
        if self._flat is None:
            size = scratch.max_batch * scratch.max_draft * scratch.vocab_size
            self._flat = torch.zeros(size, dtype=torch.float32, device=device)
        places = drafts.on(device)[:, :, None].clamp(min=0)  # what stands past num_draft is anything
        rows = self._flat[: places.numel() * scratch.vocab_size].view(*places.shape[:2], scratch.vocab_size)
        if self.mode == "dense":
            rows.zero_()
        rows.scatter_(2, places, 1.0)
        written = rows.numel() if self.mode == "dense" else 2 * places.numel()
        self.bytes_a_step = max(self.bytes_a_step, written * rows.element_size())
        return rows, places

    def clear(self, prepared: tuple[Tensor, Tensor] | None) -> None:
        """Take back what a scatter wrote."""
        if prepared is not None and self.mode == "scatter":
            rows, places = prepared
            rows.scatter_(2, places, 0.0)


class _Accept:
    def __init__(self, wrap: OneHotWrap, inner: AcceptStage) -> None:
        self.wrap, self.inner = wrap, inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        prepared = self.wrap.prepare(step, drafts, target_probs.device)
        accepted = self.inner(step, drafts, target_probs)
        self.wrap.clear(prepared)
        return accepted


class _Fused:
    def __init__(self, wrap: OneHotWrap, inner: FusedStage) -> None:
        self.wrap, self.inner = wrap, inner

    def stands_for(self, stages: Stages, step: StepInput) -> bool:
        return self.inner.stands_for(stages, step)

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> SpecAccept:
        prepared = self.wrap.prepare(step, drafts, scored.logits.device)
        accepted = self.inner(step, drafts, scored)
        self.wrap.clear(prepared)
        return accepted
