"""A whole run on the small trained model: what only the engine can say is kept, and enters the verdict."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidShard
from equivtest.faults import get_fault
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.live_evidence import ALTERNATIVES_FILE, IDENTITY_FILE, keep_lines, kept_lines
from equivtest.pipeline.run import RunOptions, RunResult, reanalyse, run
from equivtest.records import Evidence, Word


class Wrong:
    """The engine with a fault in its speculative decoder, on every arm."""

    def __init__(self, engine: DecoderEngine, fault: str) -> None:
        self._engine, self._fault = engine, get_fault(fault)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def generate(self, requests, *, speculative, fault=None, on_tokens=None):
        def both(stages):
            wrong = self._fault(stages)
            return wrong if fault is None else fault(wrong)

        wrap = both if speculative else None
        return self._engine.generate(requests, speculative=speculative, fault=wrap, on_tokens=on_tokens)


@pytest.fixture(scope="module")
def engine() -> DecoderEngine:
    return DecoderEngine.open(EngineOptions(model="tiny", dtype="float32"))


def judge(folder: Path, engine: object) -> RunResult:
    options = RunOptions(budget="smoke", engine=EngineOptions(model="tiny"), analysis=AnalysisOptions(), run_dir=folder)
    return run(options, engine=engine)  # type: ignore[arg-type]


def test_a_correct_decoder_is_equivalent_and_repeats_itself(engine: DecoderEngine, tmp_path: Path) -> None:
    result = judge(tmp_path, engine)
    assert result.analysis.verdict.word is Word.EQUIVALENT
    (lines,) = kept_lines(tmp_path / IDENTITY_FILE).values()
    assert {line.name: line.statistic for line in lines} == {"replay": 0.0, "greedy": 0.0}
    assert not (tmp_path / ALTERNATIVES_FILE).exists()
    assert {"replay", "greedy"} <= {line.name for line in result.analysis.evidence}


def test_a_decoder_that_ignores_seeds_is_different_by_replay_alone(engine: DecoderEngine, tmp_path: Path) -> None:
    verdict = judge(tmp_path, Wrong(engine, "seed_ignored")).analysis.verdict
    assert verdict.word is Word.DIFFERENT
    assert "the same seed gives another text" in verdict.headline
    families = {finding.family for finding in verdict.findings if finding.flagged and finding.role == "test"}
    assert families == {"identity"}


def test_a_decoder_without_temperature_is_named_by_the_law_that_it_follows(
    engine: DecoderEngine, tmp_path: Path
) -> None:
    result = judge(tmp_path, Wrong(engine, "temperature_ignored"))
    assert result.analysis.verdict.word is Word.DIFFERENT
    assert "follow the law at temperature 1" in result.analysis.verdict.headline
    again = reanalyse(tmp_path)  # from the files, without the engine
    assert again.analysis.verdict == result.analysis.verdict


def test_evidence_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    line = Evidence(family="identity", name="replay", stratum="s", statistic=1.0, p_value=0.5, num_tokens=3, method="m")
    lines = {"a": (line, dataclasses.replace(line, name="greedy")), "b": ()}
    keep_lines(tmp_path / "x.json", lines)
    assert kept_lines(tmp_path / "x.json") == lines
    assert kept_lines(tmp_path / "none.json") == {}


@pytest.mark.parametrize("content", ["{", "[1]", json.dumps({"a": [{"family": "x"}]})])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InvalidShard, match=r"x\.json.*delete it"):
        kept_lines(tmp_path / "x.json")
