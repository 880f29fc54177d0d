"""Texts that stop early and reported log-probabilities, from the engine to the verdict, on a decoder in numpy.

The seeds are fixed, so every test is deterministic.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from equivtest.engines.base import EngineOptions
from equivtest.errors import InvalidShard
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.law_input import logprob_tolerance, read_scored_tokens
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.run import RunOptions, RunResult, run
from equivtest.records import Arm, Origin, Word
from equivtest.samples.reader import acceptance_by_arm, read_samples
from equivtest.stats.logprobs import BFLOAT16, FLOAT32
from equivtest.stats.scored import ORIGIN_CODES
from tests.pipeline.fake_engine import FakeEngine


def judge(run_dir: Path, engine: FakeEngine, config: str = "stops", **judging: bool) -> RunResult:
    options = RunOptions(
        configs=(config,),
        budget="smoke",
        engine=EngineOptions(model="fake"),
        analysis=AnalysisOptions(**judging),
        run_dir=run_dir,
    )
    return run(options, engine=engine)


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return judge(tmp_path_factory.mktemp("stops") / "run", FakeEngine())


def test_a_decoder_that_stops_its_texts_is_equivalent(correct: RunResult) -> None:
    assert correct.analysis.verdict.word is Word.EQUIVALENT
    logprobs = [line for line in correct.analysis.evidence if line.name == "logprobs"]
    assert {line.stratum for line in logprobs} >= {"off / stops", "on / stops"}
    assert {line.p_value for line in logprobs} == {1.0}
    for name in ("report.html", "summary.md", "junit.xml", "cells.parquet"):
        assert (correct.run_dir / name).stat().st_size > 0
    assert "reported log-probabilities" in (correct.run_dir / "report.html").read_text("utf-8")


def test_every_position_is_there_and_only_tokens_count(correct: RunResult) -> None:
    samples = read_samples(correct.run_dir, arms=["on"])
    frame = samples.to_pandas()
    assert len(frame) == 2 * 16 * 64
    num_ended = int((frame["origin"] == "ended").sum())
    assert 200 < num_ended < 1_600
    (arm,) = acceptance_by_arm(samples).to_pylist()
    assert arm["num_tokens"] == arm["num_rounds"] == len(frame) - num_ended
    assert Manifest.read(correct.run_dir).arm_tokens[Arm.ON] == len(frame) - num_ended
    protocol = Manifest.read(correct.run_dir).judged_protocol
    batches = [batch for batch in protocol.batches() if batch[0].arm == Arm.ON]
    tokens = read_scored_tokens(correct.run_dir, batches, protocol.num_positions)
    assert tokens.num_tokens == arm["num_tokens"]
    assert not (tokens.origin == ORIGIN_CODES[Origin.ENDED]).any()
    assert not tokens.support_violation.any()
    assert tokens.logprob is not None
    np.testing.assert_allclose(tokens.logprob, np.log(tokens.p_token), atol=1e-5)
    law = pd.read_parquet(correct.run_dir / "evidence.parquet").query("family == 'law' and stratum == 'on / stops'")
    assert law.set_index("name").loc["rank", "num_tokens"] == arm["num_tokens"]


def test_a_text_that_goes_on_past_its_stop_token_is_different(tmp_path: Path) -> None:
    verdict = judge(tmp_path / "run", FakeEngine(runs_on=True), confirm=False).analysis.verdict
    assert verdict.word is Word.DIFFERENT
    assert any(flag.place.test == "support" for finding in verdict.findings for flag in finding.flagged)


def test_a_text_that_ends_without_a_stop_token_is_different(tmp_path: Path) -> None:
    verdict = judge(tmp_path / "run", FakeEngine(ends_after=12), confirm=False).analysis.verdict
    assert verdict.word is Word.DIFFERENT
    assert any("texts end where their law goes on" in sentence for sentence in verdict.diagnosis)


def test_a_short_text_is_refused_where_nothing_ends_a_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidShard, match="seed 0 ended after 12 of 16 tokens, and nothing ends a text of topp95"):
        judge(tmp_path / "run", FakeEngine(ends_after=12), config="topp95")


def test_the_built_in_decoder_stops_its_texts_and_reports_their_law(tmp_path: Path) -> None:
    """A small trained model under config stops: nothing is flagged but the report that is planted in the biased arm."""
    tiny = EngineOptions(model="tiny", dtype="float32", drafter="model", draft_model="tiny-draft")
    options = RunOptions(
        configs=("stops",),
        budget="smoke",
        engine=tiny,
        analysis=AnalysisOptions(confirm=False),
        run_dir=tmp_path / "run",
        planted="logprob_zero",
    )
    verdict = run(options).analysis.verdict
    assert verdict.word is Word.EQUIVALENT
    assert (read_samples(tmp_path / "run", ["origin"], arms=["on"]).to_pandas()["origin"] == "ended").sum() > 100
    evidence = pd.read_parquet(tmp_path / "run" / "evidence.parquet").query("name == 'logprobs'").set_index("stratum")
    assert evidence.loc[["off / stops", "on / stops"], "p_value"].tolist() == [1.0, 1.0]
    assert evidence.loc["biased / stops", "p_value"] == 0.0
    assert evidence["method"].str.contains("0.001").all()


@pytest.mark.parametrize(
    ("dtype", "word"), [("float32", Word.DIFFERENT), (None, Word.DIFFERENT), ("bfloat16", Word.EQUIVALENT)]
)
def test_log_probabilities_are_held_to_the_precision_of_the_model(
    tmp_path: Path, dtype: str | None, word: Word
) -> None:
    """What is reported is off by a tenth of a nat: nothing in bfloat16, and wrong in float32."""
    engine = FakeEngine(logprob_error=0.1, dtype=dtype)
    verdict = judge(tmp_path / "run", engine, config="topp95", confirm=False).analysis.verdict
    assert verdict.word is word
    told = any("reported log-probabilities are not those of the law" in sentence for sentence in verdict.diagnosis)
    assert told is (word is Word.DIFFERENT)
    assert logprob_tolerance(tmp_path / "run") == (BFLOAT16 if dtype == "bfloat16" else FLOAT32)
