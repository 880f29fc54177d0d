"""What is asked of every planted fault, and the runs and steps that its tests share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for, texts


class SeedlessBackend(IncapableBackend):
    """Cannot seed a request, so that those with a seed go plain, and can do all else."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, per_request_seed=False)


@functools.cache
def executor(drafter: str, kernels: str = "cpp", *, max_draft: int = 3, capable: bool = True) -> Executor:
    backend = get_backend(kernels)
    main = backend if capable else SeedlessBackend(backend)
    return build(main, drafter, max_draft=max_draft, plain_backend=backend)


def asked(params: SamplingParams, count: int = 12) -> list[Request]:
    return requests_for(random_prompts(count), params, max_tokens=16)


def bytes_of(generations: Sequence[Generation]) -> list[tuple[bytes, bytes, bytes, bytes]]:
    return [
        (g.token_ids.tobytes(), g.slots.tobytes(), g.draft_token_ids.tobytes(), g.num_drafts.tobytes())
        for g in generations
    ]


def check_that_it_shows_and_goes(fault: Fault, params: SamplingParams) -> None:
    """It changes speculative text, the same way on both kernels, leaves plain text alone, and nothing after it."""
    by_cpp = executor(fault.setting.drafter)
    requests = asked(params)
    before = bytes_of(by_cpp.generate(requests, speculative=True))
    faulty = by_cpp.generate(requests, speculative=True, fault=fault)
    assert bytes_of(faulty) != before
    assert bytes_of(by_cpp.generate(requests, speculative=True)) == before
    again = executor(fault.setting.drafter, "reference").generate(requests, speculative=True, fault=fault)
    assert texts(again) == texts(faulty)
    plain = by_cpp.generate(requests, speculative=False)
    assert bytes_of(by_cpp.generate(requests, speculative=False, fault=fault)) == bytes_of(plain)


def check_that_plain_requests_are_left_alone(fault: Fault, params: SamplingParams, count: int = 12) -> None:
    """In one batch with speculative requests, whose drafts the fault does change."""
    mixed = executor(fault.setting.drafter, capable=False)
    routes = [dataclasses.replace(r, seed=i) if i % 3 else r for i, r in enumerate(asked(params, count))]
    right = mixed.generate(routes, speculative=True)
    faulty = mixed.generate(routes, speculative=True, fault=fault)
    plain = [i for i, g in enumerate(right) if not g.route.speculative]
    assert len(plain) == 2 * count // 3
    assert bytes_of([faulty[i] for i in plain]) == bytes_of([right[i] for i in plain])
    assert bytes_of(faulty) != bytes_of(right)


def check_that_laws_are_put_back(fault: Fault, params: SamplingParams) -> None:
    """What the report stage reads is what the verify stage wrote, whatever the accept stage saw."""
    written: list[Tensor] = []
    differences = 0

    def watch(stages: Stages) -> Stages:
        faulty = fault(stages)

        def verify(step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
            target_probs = faulty.verify(step, drafts, scored)
            written.append(target_probs.clone())
            return target_probs

        def report(
            step: StepInput, drafts: Drafts, scored: Scored, target_probs: Tensor, accepted: SpecAccept
        ) -> Float32Array | None:
            nonlocal differences
            differences += int((target_probs != written[-1]).sum())
            return faulty.report(step, drafts, scored, target_probs, accepted)

        return dataclasses.replace(faulty, verify=verify, report=report)

    executor(fault.setting.drafter).generate(asked(params), speculative=True, fault=watch)
    assert len(written) > 3
    assert differences == 0


def check_that_only_its_stage_changes(fault: Fault) -> None:
    stages = executor(fault.setting.drafter).stages
    wrapped = fault(stages)
    names = [field.name for field in dataclasses.fields(Stages)]
    assert [n for n in names if getattr(wrapped, n) is not getattr(stages, n)] == [fault.stage]


VOCAB_SIZE = 97
SAMPLED = "sampled_exit"
_BIAS = tuple((i, -100.0 if i % 4 == 1 else 1.0) for i in range(VOCAB_SIZE) if i % 4 in (1, 2))
_CONFIGS = {**CONFIGS, "logitbias": SamplingParams(temperature=0.8, top_p=0.95, logit_bias=_BIAS)}


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

    def play(self, fault: Fault | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Tokens put out, [B, K+1], and how many drafts were kept, [B]."""
        stages = stages_of(accept=RoutedAcceptance(ChainAcceptance(self.backend), self.backend))
        if fault is not None:
            stages = fault(stages)
        target_probs = self.p.expand(self.step.batch, *self.p.shape).clone()
        accepted = stages.accept(self.step, self.drafts, target_probs)
        return accepted.output_token_ids.numpy().copy(), accepted.emitted.numpy().copy()


def sampled_drafts(q: Tensor, batch: int, *, seed: int = 0, declared: bool = True) -> Drafts:
    """`batch` rows of drafts drawn from q [K, vocab_size]; ragged: a row has 0..K of them in turn."""
    rng = np.random.default_rng(seed)
    width, vocab_size = q.shape
    columns = [rng.choice(vocab_size, batch, p=row / row.sum()) for row in q.double().numpy()]
    num_draft = (np.arange(batch) % (width + 1)).astype(np.int32)
    probs = q.expand(batch, width, vocab_size).contiguous() if declared else None
    return Drafts(np.stack(columns, axis=1), num_draft, probs)
