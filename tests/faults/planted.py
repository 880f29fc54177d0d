"""What is asked of every planted fault, and the runs and steps that its tests share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.acceptance import ChainAcceptance, RoutedAcceptance
from equivtest.decoder.executor import Executor
from equivtest.decoder.stages import Drafts, Float32Array, Scored, Stages, StepInput
from equivtest.faults.base import Fault
from equivtest.kernels.contract import Capabilities, SpecAccept, SpecScratch, Streams
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, Request, SamplingParams
from equivtest.rng import Purpose, stream_key, uniforms
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import CONFIGS, GREEDY, build, random_prompts, requests_for, texts
from tests.decoder.test_processed_decoding import PROCESSED


class SeedlessBackend(IncapableBackend):
    """Cannot seed a request, so that those with a seed go plain, and can do all else."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, per_request_seed=False)


@functools.cache
def executor(drafter: str, kernels: str = "cpp") -> Executor:
    backend = get_backend(kernels)
    return build(SeedlessBackend(backend), drafter, max_draft=3, plain_backend=backend)


def asked(params: SamplingParams, count: int = 12) -> list[Request]:
    return requests_for(random_prompts(count), params, max_tokens=16)


def mixed(params: SamplingParams, count: int) -> list[Request]:
    """Every third of the requests has a seed, and is routed plain for it."""
    return [dataclasses.replace(r, seed=i) if i % 3 == 0 else r for i, r in enumerate(asked(params, count))]


Bytes = tuple[bytes, bytes, bytes, bytes]


def bytes_of(generations: Sequence[Generation]) -> list[Bytes]:
    return [
        (g.token_ids.tobytes(), g.slots.tobytes(), g.draft_token_ids.tobytes(), g.num_drafts.tobytes())
        for g in generations
    ]


@functools.cache
def without_fault(drafter: str, kernels: str, params: SamplingParams, count: int, speculative: bool) -> list[Bytes]:
    return bytes_of(executor(drafter, kernels).generate(mixed(params, count), speculative=speculative))


def check_planted(fault: Fault, *, count: int = 18) -> None:
    """What holds for every fault, on `count` requests, every third of them on the plain route.

    It replaces the stage that it names; it changes what the speculative requests give, in the same way on both kernels,
    and not what the plain ones give, beside them or when speculation is off; the laws that the report stage reads are
    those that the verify stage wrote; and once it is gone, all is as before.
    """
    drafter, params = fault.setting.drafter, params_of(fault)
    requests, by_cpp = mixed(params, count), executor(drafter)
    check_that_only_its_stage_changes(fault)
    before = without_fault(drafter, "cpp", params, count, True)
    watch = LawWatch(fault)
    generations = by_cpp.generate(requests, speculative=True, fault=watch)
    assert (watch.num_steps > 3, watch.num_changed) == (True, 0)
    plain = [i for i, g in enumerate(generations) if not g.route.speculative]
    assert len(plain) == count // 3
    faulty = bytes_of(generations)
    assert [faulty[i] for i in plain] == [before[i] for i in plain]
    assert faulty != before
    assert bytes_of(by_cpp.generate(requests, speculative=True)) == before
    off = by_cpp.generate(requests, speculative=False, fault=fault)
    assert bytes_of(off) == without_fault(drafter, "cpp", params, count, False)
    by_reference = executor(drafter, "reference").generate(requests, speculative=True, fault=fault)
    assert texts(by_reference) == texts(generations)


class LawWatch:
    """Plants a fault and counts entries of the laws that the report stage reads otherwise than verify wrote them."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.num_steps, self.num_changed = fault, 0, 0

    def __call__(self, stages: Stages) -> Stages:
        faulty = self.fault(stages)
        written = torch.empty(0)

        def verify(step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
            nonlocal written
            target_probs = faulty.verify(step, drafts, scored)
            written = target_probs.clone()
            return target_probs

        def report(
            step: StepInput, drafts: Drafts, scored: Scored, target_probs: Tensor, accepted: SpecAccept
        ) -> Float32Array | None:
            self.num_steps += 1
            self.num_changed += int((target_probs != written).sum())
            return faulty.report(step, drafts, scored, target_probs, accepted)

        return dataclasses.replace(faulty, verify=verify, report=report)


def check_that_only_its_stage_changes(fault: Fault) -> None:
    stages = executor(fault.setting.drafter).stages
    wrapped = fault(stages)
    names = [field.name for field in dataclasses.fields(Stages)]
    # Coins of every kind are drawn in the accept stage.
    named = "accept" if fault.stage == "streams" else fault.stage
    assert [n for n in names if getattr(wrapped, n) is not getattr(stages, n)] == [named]


VOCAB_SIZE = 97
SAMPLED = "sampled_exit"
_BIAS = tuple((i, -100.0 if i % 4 == 1 else 1.0) for i in range(VOCAB_SIZE) if i % 4 in (1, 2))
_CONFIGS = {
    **CONFIGS,
    "greedy": GREEDY,
    "penalties": PROCESSED["penalties"],
    "logitbias": SamplingParams(temperature=0.8, top_p=0.95, logit_bias=_BIAS),
    "processing": replace(
        PROCESSED["penalties"], logit_bias=_BIAS, stop_token_ids=tuple(range(3, 97, 16)), min_tokens=3
    ),
    "stops": SamplingParams(temperature=0.8, top_p=0.95, stop_token_ids=tuple(range(1, 97, 4)), min_tokens=3),
}


def params_of(fault: Fault) -> SamplingParams:
    """The configuration that the fault wants, for the vocabulary of the tiny models."""
    return _CONFIGS[fault.setting.config]


def named(faults: Sequence[Callable[[], Fault]], name: str) -> Fault:
    return next(fault for fault in (make() for make in faults) if fault.name == name)


@dataclass(frozen=True)
class Step:
    """As much of a step as the stages under test look at; `dataclasses.replace` works on it."""

    batch: int
    num_main: int
    scratch: SpecScratch
    index: int = 0
    requests: Any = None
    table: Any = None
    params: Any = None
    streams: Any = None
    limits: Any = None
    last_token_ids: Any = None


def stages_of(**stages: Any) -> Stages:
    """These stages; the others must not be called."""
    return Stages(**{field.name: stages.get(field.name) for field in dataclasses.fields(Stages)})  # type: ignore[arg-type]


class Round:
    """One hand-made round of many rows that share their laws; every row has its own stream and position 5."""

    def __init__(self, p: Tensor, drafts: Drafts, *, kernels: str = "cpp") -> None:
        """p: [K+1, vocab_size]"""
        self.p, self.drafts, self.backend = p, drafts, get_backend(kernels)
        batch, vocab_size = len(drafts.num_draft), p.shape[1]
        self.keys, self.positions = np.array([stream_key(row) for row in range(batch)]), np.full(batch, 5)
        self.step = cast(
            "StepInput",
            Step(
                batch=batch,
                num_main=batch,
                streams=Streams(torch.from_numpy(self.keys), torch.from_numpy(self.positions)),
                scratch=SpecScratch(batch, p.shape[0] - 1, vocab_size),
            ),
        )

    @property
    def p_drafts(self) -> np.ndarray:
        """[B, K]"""
        return self.p.numpy()[np.arange(self.p.shape[0] - 1), self.drafts.token_ids].astype(np.float64)

    @property
    def q_drafts(self) -> np.ndarray:
        """[B, K]; 1 for sure drafts."""
        if self.drafts.probs is None:
            return np.ones_like(self.p_drafts)
        ids = torch.from_numpy(self.drafts.token_ids)[:, :, None]
        return self.drafts.probs.gather(2, ids)[:, :, 0].double().numpy()

    def coins(self, purpose: Purpose) -> np.ndarray:
        """[B, K], those of the drafts' positions."""
        slots = np.arange(self.p.shape[0] - 1)
        return uniforms(self.keys[:, None], self.positions[:, None] + slots, purpose)

    def longest_prefix(self, kept: np.ndarray) -> np.ndarray:
        """[B], how many drafts stand when these ([B, K]) are kept."""
        offered = np.arange(kept.shape[1]) < self.drafts.num_draft[:, None]
        return (kept & offered).cumprod(axis=1).sum(axis=1)

    @property
    def stages(self) -> Stages:
        """Of which only accept may be called."""
        return stages_of(accept=RoutedAcceptance(ChainAcceptance(self.backend), self.backend))

    def laws(self) -> Tensor:
        """target_probs [B, K+1, vocab_size]"""
        return self.p.expand(self.step.batch, *self.p.shape).clone()

    def play(self, fault: Fault | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens put out, [B, K+1], and how many drafts were kept, [B]."""
        stages = self.stages if fault is None else fault(self.stages)
        accepted = stages.accept(self.step, self.drafts, self.laws())
        return accepted.output_token_ids.numpy().copy(), accepted.emitted.numpy().copy()


def sampled_drafts(q: Tensor, batch: int, *, seed: int = 0, declared: bool = True) -> Drafts:
    """`batch` rows of drafts drawn from q [K, vocab_size]; ragged: a row has 0..K of them in turn."""
    rng = np.random.default_rng(seed)
    width, vocab_size = q.shape
    columns = [rng.choice(vocab_size, batch, p=row / row.sum()) for row in q.double().numpy()]
    num_draft = (np.arange(batch) % (width + 1)).astype(np.int32)
    probs = q.expand(batch, width, vocab_size).contiguous() if declared else None
    return Drafts(np.stack(columns, axis=1), num_draft, probs)
