"""What a decoder must do the same every time, on the small trained model."""

from __future__ import annotations

import pytest

from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.faults import get_fault
from equivtest.faults.base import Fault
from equivtest.pipeline.identity import identity_evidence
from equivtest.protocol.budgets import Budget
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set

SMALL = Budget(name="smoke", num_prompts=3, num_positions=16, num_seeds=8, epsilon=0.1)


def protocol(config: str = "topp95") -> Protocol:
    return Protocol.build(load_prompt_set("default"), (config,), SMALL)


@pytest.fixture(scope="module")
def sampled_exit() -> DecoderEngine:
    return DecoderEngine.open(EngineOptions(model="tiny", dtype="float32", drafter="sampled_exit", draft_len=3))


def p_values(engine: DecoderEngine, fault: Fault | None = None, config: str = "topp95") -> dict[str, float]:
    return {line.name: line.p_value for line in identity_evidence(engine, protocol(config), config, fault)}


@pytest.mark.parametrize("config", ["topp95", "penalties", "stops"])
def test_a_correct_decoder_repeats_itself(sampled_exit: DecoderEngine, config: str) -> None:
    """Deterministic: no text and no draft changes. A rounding that turns one text gives p of about .03."""
    assert p_values(sampled_exit, config=config) == {"replay": 1.0, "greedy": 1.0, "drafts": 1.0}


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("seed_ignored", "replay"),
        ("broadcast_seed", "replay"),
        ("argmax_draft", "drafts"),
        ("draft_rounded_to_bf16", "drafts"),
        ("short_mask", "greedy"),
    ],
)
def test_a_decoder_that_does_not_is_found(sampled_exit: DecoderEngine, fault: str, found: str) -> None:
    assert p_values(sampled_exit, get_fault(fault))[found] < 1e-3


def test_sure_drafts_have_no_law_to_be_drawn_from() -> None:
    engine = DecoderEngine.open(EngineOptions(model="tiny", dtype="float32", drafter="ngram"))
    assert set(p_values(engine)) == {"replay", "greedy"}
