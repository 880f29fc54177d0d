"""What drafts are drawn from and what is declared as their q, against laws computed apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.drafters.draft_model import ModelDrafter, draw
from equivtest.decoder.stages import Drafts, Stages, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Fault
from equivtest.faults.proposal import FAULTS
from equivtest.kernels.contract import RowParams
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams
from equivtest.rng import Purpose, uniforms
from tests.decoder.scenarios import CONFIGS, fresh_logits
from tests.faults import planted

PARAMS = CONFIGS["topk20p90"]
Law = Callable[[Tensor], Tensor]


def law(logits: Tensor, params: SamplingParams = PARAMS) -> Tensor:
    return get_backend("reference").verify_probs(logits, RowParams.of([params]), out=torch.empty(logits.shape))


def likelier_of_two(logits: Tensor) -> Tensor:
    """Summed over all pairs of draws."""
    q = law(logits)[0].double()
    pairs = q[:, None] * q
    first_wins = q[:, None] >= q
    return (pairs * first_wins).sum(dim=1)[None] + (pairs * ~first_wins).sum(dim=0)[None]


EXPECTED: dict[str, tuple[Law, Law]] = {
    "argmax_draft": (lambda logits: law(logits, SamplingParams(temperature=0)), law),
    "raw_q_in_ratio": (law, lambda logits: (logits / 0.7).softmax(dim=1)),
    "draft_rounded_to_bf16": (lambda logits: law(logits).bfloat16(), law),
    "likeliest_of_two": (likelier_of_two, law),
}
"""What drafts are drawn from, and what is declared."""


def first_proposals(fault: Fault | None, kernels: str) -> tuple[Drafts, ModelDrafter]:
    executor = planted.executor(planted.SAMPLED, kernels)
    seen: list[Drafts] = []

    def watch(stages: Stages) -> Stages:
        faulty = stages if fault is None else fault(stages)

        def propose(step: StepInput) -> Drafts:
            drafts = faulty.propose(step)
            seen.append(drafts if drafts.probs is None else drafts.with_probs(drafts.probs.clone()))
            return drafts

        return dataclasses.replace(faulty, propose=propose)

    executor.generate(planted.asked(PARAMS), speculative=True, fault=watch)
    assert isinstance(executor.drafter, ModelDrafter)
    return seen[0], executor.drafter


@pytest.mark.parametrize("kernels", ["reference", "cpp"])
@pytest.mark.parametrize("name", EXPECTED)
def test_drafts_come_from_one_law_and_carry_another(name: str, kernels: str) -> None:
    drafts, drafter = first_proposals(planted.named(FAULTS, name), kernels)
    drawn, declared = EXPECTED[name]
    assert drafts.probs is not None
    assert drafts.probs.shape == (12, 3, planted.VOCAB_SIZE)
    for row, request in enumerate(planted.asked(PARAMS)):
        for slot in range(3):
            before = drafts.token_ids[row, :slot].tolist()
            logits = fresh_logits(drafter.model, [*request.prompt_token_ids, *before])[-1:]
            torch.testing.assert_close(drafts.probs[row, slot][None], declared(logits), atol=1e-5, rtol=1e-4)
            coin = uniforms(np.array([request.stream_key]), np.array([slot]), Purpose.DRAFT)
            assert draw(drawn(logits), coin).tolist() == [drafts.token_ids[row, slot]]


@pytest.mark.parametrize("name", [n for n in EXPECTED if n not in ("draft_rounded_to_bf16", "raw_q_in_ratio")])
def test_the_drafts_differ_from_those_of_the_declared_law(name: str) -> None:
    """The twin of the test above: those of a correct drafter are others."""
    wrong, right = (first_proposals(fault, "cpp")[0] for fault in (planted.named(FAULTS, name), None))
    assert (wrong.token_ids[:, 0] != right.token_ids[:, 0]).any()
    torch.testing.assert_close(wrong.probs[:, 0], right.probs[:, 0])  # type: ignore[index]


def test_raw_q_leaves_the_drafts_alone() -> None:
    wrong, right = (first_proposals(fault, "cpp")[0] for fault in (planted.named(FAULTS, "raw_q_in_ratio"), None))
    assert (wrong.token_ids == right.token_ids).all()


def test_rounding_to_bf16_moves_the_law_by_about_a_thousandth() -> None:
    drafts, _ = first_proposals(None, "cpp")
    assert drafts.probs is not None
    rounded = drafts.probs.bfloat16().double()
    moved = (rounded / rounded.sum(dim=2, keepdim=True) - drafts.probs).abs().sum(dim=2) / 2
    assert 2e-4 < float(moved.mean()) < 2e-3


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_it_needs_a_drafter_that_samples(fault: Fault) -> None:
    with pytest.raises(InvalidSetting, match=f"{fault.name}.*sampled_exit"):
        fault(planted.executor("early_exit").stages)


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_it_shows_in_text_and_goes_without_a_trace(fault: Fault) -> None:
    # Rounding moves a few drafts in a thousand.
    planted.check_planted(fault, count=150 if "bf16" in fault.name else 18)
