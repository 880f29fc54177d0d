"""Which rows of a step follow another law, and which law; every other row is untouched byte for byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.stages import Drafts, ProcessStage, Scored, StepInput
from equivtest.decoder.standard_stages import LawVerify
from equivtest.faults.base import Fault
from equivtest.faults.target_law import FAULTS, BiasOffDrafts
from equivtest.kernels.contract import RowParams, SpecScratch
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams
from tests.faults import planted

VOCAB_SIZE = 64
PARAMS = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.002)
NUM_DRAFT = np.array([0, 2, 1, 3, 0], np.int32)
SPECULATIVE = np.array([True, True, True, True, False])
"""The last request was routed plain; the first is speculative and has no draft in this step."""
BIAS = tuple((i, -100.0 if i % 4 == 1 else 1.0) for i in range(VOCAB_SIZE) if i % 4 in (1, 2))

BATCH_ROWS = np.repeat(np.arange(5), NUM_DRAFT + 1)
SLOTS = np.concatenate([np.arange(n + 1) for n in NUM_DRAFT])
HAS_DRAFTS = NUM_DRAFT[BATCH_ROWS] > 0
JUDGES = NUM_DRAFT[BATCH_ROWS] > SLOTS
SPECULATES = SPECULATIVE[BATCH_ROWS]

EXPECTED = {
    "raw_target": (HAS_DRAFTS, SamplingParams()),
    "top_p_skipped": (HAS_DRAFTS, SamplingParams(temperature=0.7, top_k=40, min_p=0.002)),
    "argmax_drafts": (JUDGES, SamplingParams(temperature=0)),
    "argmax_verify": (HAS_DRAFTS, SamplingParams(temperature=0)),
    "filtered_argmax": (SPECULATES, SamplingParams(temperature=0)),
    "temperature_ignored": (HAS_DRAFTS, SamplingParams(temperature=1, top_k=40, top_p=0.9, min_p=0.002)),
    "filters_on_bonus_only": (JUDGES, SamplingParams(temperature=0.7)),
}
"""Logits rows that follow another law, and its parameters."""


def random_logits() -> Tensor:
    return torch.randn(len(SLOTS), VOCAB_SIZE, generator=torch.Generator().manual_seed(0))


def one_step(bias: tuple[tuple[int, float], ...] = ()) -> StepInput:
    requests = [SimpleNamespace(params=SamplingParams(logit_bias=bias)) for _ in NUM_DRAFT]
    return cast(
        "StepInput",
        planted.Step(
            batch=5,
            num_main=5,
            requests=np.arange(5),
            table=SimpleNamespace(speculative=SPECULATIVE, requests=requests),
            params=RowParams.of([PARAMS] * 5),
            scratch=SpecScratch(5, 3, VOCAB_SIZE),
        ),
    )


def laws(logits: Tensor, fault: Fault | None = None, kernels: str = "reference") -> Tensor:
    """[num_rows, vocab_size], what the verify stage writes for each row of logits."""
    backend = get_backend(kernels)
    drafts = Drafts(np.zeros((5, 3), np.int64), NUM_DRAFT, None)
    verify = LawVerify(backend, backend)
    stages = planted.stages_of(verify=verify)
    step = one_step()
    target_probs = (stages if fault is None else fault(stages)).verify(step, drafts, Scored(logits, BATCH_ROWS, SLOTS))
    assert target_probs.data_ptr() == step.scratch.target_probs.data_ptr()
    return target_probs[torch.from_numpy(BATCH_ROWS), torch.from_numpy(SLOTS)]


@pytest.mark.parametrize("kernels", ["reference", "cpp"])
@pytest.mark.parametrize("fault", [f() for f in FAULTS if f().name in EXPECTED], ids=lambda f: f.name)
def test_the_rows_it_names_follow_its_law_and_no_others(fault: Fault, kernels: str) -> None:
    logits, (rows, params) = random_logits(), EXPECTED[fault.name]
    right, wrong = laws(logits, kernels=kernels), laws(logits, fault, kernels)
    assert torch.equal(wrong[~rows], right[~rows])
    expected = get_backend(kernels).verify_probs(
        logits, RowParams.of([params] * len(logits)), out=torch.empty(logits.shape)
    )
    assert torch.equal(wrong[rows], expected[rows])
    assert bool((wrong[rows] != right[rows]).any(dim=1).all())


def test_logits_are_taken_for_probabilities_on_rows_with_drafts() -> None:
    logits = random_logits()
    logits[np.flatnonzero(HAS_DRAFTS)[0]] = -1.0  # no logit above 0: nothing to scale
    logits[:, 7] = -torch.inf
    fault = planted.named(FAULTS, "logits_as_probs")
    right, wrong = laws(logits), laws(logits, fault)
    rows = HAS_DRAFTS.copy()
    rows[np.flatnonzero(HAS_DRAFTS)[0]] = False
    assert torch.equal(wrong[~rows], right[~rows])
    expected = logits[rows].clamp(min=0)
    torch.testing.assert_close(wrong[rows], expected / expected.sum(dim=1, keepdim=True))


def biased(step: StepInput, drafts: Drafts, scored: Scored) -> Scored:
    """A process stage that adds the bias to every row and bans token 0."""
    logits = scored.logits.clone()
    logits[:, [token_id for token_id, _ in BIAS]] += torch.tensor([bias for _, bias in BIAS])
    logits[:, 0] = -torch.inf
    return scored._replace(logits=logits)


def test_the_bias_is_left_off_the_rows_that_judge_a_draft() -> None:
    logits = random_logits()
    scored = Scored(logits.clone(), BATCH_ROWS, SLOTS)
    drafts = Drafts(np.zeros((5, 3), np.int64), NUM_DRAFT, None)
    step = one_step(BIAS)
    wrong = BiasOffDrafts(biased)(step, drafts, scored).logits
    assert torch.equal(scored.logits, logits)
    assert torch.equal(wrong[~JUDGES], biased(step, drafts, scored).logits[~JUDGES])
    torch.testing.assert_close(wrong[JUDGES][:, 1:], logits[JUDGES][:, 1:], atol=2e-5, rtol=0)
    assert bool((wrong[:, 0] == -torch.inf).all())


def test_without_a_bias_there_is_nothing_to_leave_off() -> None:
    scored = Scored(random_logits(), BATCH_ROWS, SLOTS)
    drafts = Drafts(np.zeros((5, 3), np.int64), NUM_DRAFT, None)
    process: ProcessStage = lambda step, drafts, scored: scored  # noqa: E731
    assert BiasOffDrafts(process)(one_step(), drafts, scored) is scored


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_it_shows_in_text_and_goes_without_a_trace(fault: Fault) -> None:
    planted.check_planted(fault)
