"""The gate's own statistics on the decoder wired to FlashInfer: with explicit offsets, and with a generator left alone.

A protocol of 4 prompts, 20 positions and 48 seeds on SmolLM2, one request at a time, three drafts. Streams are fixed;
with others, a correct wiring would be flagged at p < 1e-4 in 1 of 10,000 runs a line. On the version that shares a coin
the slope has more than 20 standard errors.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.faults import Fault, Setting, get_fault
from equivtest.pipeline.control_subject import correct
from equivtest.pipeline.law_input import read_scored_tokens
from equivtest.pipeline.one_arm import gather, shards_of
from equivtest.pipeline.progress import Silent
from equivtest.protocol.budgets import Budget
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Arm
from equivtest.stats.law import law_family
from equivtest.stats.logprobs import BFLOAT16
from tests.gpu.vendor import flashinfer_backend, version

pytestmark = pytest.mark.gpu

SMALL = Budget(name="smoke", num_prompts=4, num_positions=20, num_seeds=48, epsilon=0.1)
CONFIG = "topp95"


@pytest.fixture(scope="module")
def engine() -> DecoderEngine:
    flashinfer_backend()
    return DecoderEngine.open(
        EngineOptions(
            device="cuda", dtype="bfloat16", kernels="flashinfer", drafter="early_exit", draft_len=3, max_batch=1
        )
    )


def p_values(engine: DecoderEngine, folder: Path, fault: Fault) -> dict[str, float]:
    """Of every test of the law family that the samples allow."""
    protocol = Protocol.build(load_prompt_set("default"), (CONFIG,), SMALL, run_seed=5)
    batch = shards_of(protocol, Arm.BIASED, CONFIG)
    gather(folder, protocol, engine, [batch], Silent(), fault.name, fault=fault)
    tokens = read_scored_tokens(folder, [batch], protocol.num_positions)
    return {line.name: line.p_value for line in law_family(tokens, CONFIG, tolerance=BFLOAT16).evidence}


def test_explicit_offsets_pass(engine: DecoderEngine, tmp_path: Path) -> None:
    found = p_values(engine, tmp_path, correct(Setting(config=CONFIG)))
    assert "lag_recovered" in found
    assert not {name: p for name, p in found.items() if p <= 1e-4}


def test_a_generator_left_to_itself_is_found_where_it_shares_a_coin(engine: DecoderEngine, tmp_path: Path) -> None:
    """Before 0.7.4 the lag evidence finds it; from then on the same wiring is exact and passes."""
    found = p_values(engine, tmp_path, get_fault("generator_offset"))
    if version() < (0, 7, 4):
        assert found["lag_recovered"] < 1e-12, found
    else:
        assert not {name: p for name, p in found.items() if p <= 1e-4}
