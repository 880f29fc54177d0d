"""Which law the tokens of a faulty decoder follow instead, on the small trained model."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.faults import Fault, Setting, get_fault
from equivtest.pipeline.alternatives import alternative_evidence, alternatives_of
from equivtest.pipeline.control_subject import correct
from equivtest.pipeline.one_arm import gather, shards_of
from equivtest.pipeline.progress import Silent
from equivtest.protocol.budgets import Budget
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Arm, Evidence, SamplingParams
from equivtest.verdict.diagnosis import diagnose

SMALL = Budget(name="smoke", num_prompts=4, num_positions=16, num_seeds=32, epsilon=0.1)


@pytest.fixture(scope="module")
def engine() -> DecoderEngine:
    return DecoderEngine.open(EngineOptions(model="tiny", dtype="float32", drafter="early_exit", draft_len=3))


def evidence(engine: DecoderEngine, folder: Path, config: str, fault: Fault) -> tuple[Evidence, ...]:
    protocol = Protocol.build(load_prompt_set("default"), (config,), SMALL)
    batch = shards_of(protocol, Arm.BIASED, config)
    gather(folder, protocol, engine, [batch], Silent(), "samples", fault=fault, scored=False)
    return alternative_evidence(folder, protocol, config, Arm.BIASED, engine)


def best(lines: tuple[Evidence, ...], rows: str = "draft") -> str:
    return max((line for line in lines if line.stratum == rows), key=lambda line: line.statistic).name


@pytest.mark.parametrize(
    ("fault", "config", "expected"),
    [
        ("raw_target", "topp95", "raw"),
        ("top_p_skipped", "topp95", "no_top_p"),
        ("temperature_ignored", "topp95", "no_temperature"),
        ("argmax_drafts", "topp95", "greedy"),
        ("shifted_rows", "topp95", "row_before"),
        ("logits_as_probs", "topp95", "logits_as_probs"),
        ("penalties_skipped", "penalties", "no_penalties"),
        ("frequency_skips_drafts", "penalties", "no_frequency_penalty"),
        ("stale_history", "penalties", "stale_history"),
        ("bias_skips_drafts", "logitbias", "no_logit_bias"),
    ],
)
def test_the_law_that_a_fault_puts_in_place_is_found(
    engine: DecoderEngine, tmp_path: Path, fault: str, config: str, expected: str
) -> None:
    planted = get_fault(fault)
    lines = evidence(engine, tmp_path, config, planted)
    assert best(lines) == expected


@pytest.mark.parametrize("config", ["topp95", "penalties"])
def test_tokens_of_a_correct_decoder_follow_their_own_law(engine: DecoderEngine, tmp_path: Path, config: str) -> None:
    """A gain of 8 nats by chance has probability below exp(-8), 3e-4, an alternative; seeds are fixed."""
    lines = evidence(engine, tmp_path, config, correct(Setting(config=config)))
    assert max(line.statistic for line in lines) < 8
    assert {line.statistic for line in lines if line.name == "the law"} == {0.0}
    assert all(line.p_value > 1e-4 for line in lines if line.name == "the law")


def test_the_sentence_names_rows_and_law(engine: DecoderEngine, tmp_path: Path) -> None:
    lines = evidence(engine, tmp_path, "topp95", get_fault("temperature_ignored"))
    law = Evidence(
        family="law", name="surprisal_draft", stratum="s", statistic=9.0, p_value=1e-9, estimate=0.1, ci_low=0.05,
        ci_high=0.15, num_tokens=100, method="m",
    )  # fmt: skip
    said = diagnose([law], alternatives=lines)[0]
    assert said.stage == "verify"
    assert "tokens of draft" in said.sentence
    assert "the law at temperature 1" in said.sentence


def test_alternatives_are_laws_that_differ() -> None:
    names = [name for name, _ in alternatives_of(CONFIGS["topp95"], 3)]
    read = ["logits_as_probs", "row_before", "row_after"]
    assert names == ["the law", "raw", "no_temperature", "no_top_p", "greedy", *read]
    plain = [name for name, _ in alternatives_of(SamplingParams(), 3)]
    assert plain == ["the law", "greedy", *read]
