"""The whole pipeline on a decoder in numpy: each of the four words, and what is written.

The seeds are fixed, so every test is deterministic. With other seeds a correct engine is flagged in stage 1 in at most
5 % of comparisons and stopped in under 1 % of runs.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from equivtest.engines.base import EngineOptions
from equivtest.errors import InvalidSetting, InvalidShard, ResolutionTooCoarse, RunBusy, RunExists, RunMismatch
from equivtest.files import sole_writer
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.gate import read_verdict
from equivtest.pipeline.manifest import Manifest, Status, resume_command
from equivtest.pipeline.run import RunOptions, RunResult, find_run, is_enough, reanalyse, run
from equivtest.records import Arm, Word
from equivtest.verdict.facts import Role
from tests.pipeline.fake_engine import FakeEngine, FakeScorer

OUTPUTS = ("cells.parquet", "evidence.parquet", "verdict.json", "report.html", "summary.md", "junit.xml")


def judge(
    run_dir: Path,
    engine: FakeEngine,
    *,
    resume: bool = False,
    run_seed: int = 0,
    budget: str = "smoke",
    sequential: bool = False,
    configs: tuple[str, ...] = ("topp95",),
    **judging,
) -> RunResult:
    return run(
        RunOptions(
            configs=configs, budget=budget, engine=EngineOptions(model="fake"), analysis=AnalysisOptions(**judging),
            run_dir=run_dir, resume=resume, run_seed=run_seed, sequential=sequential,
        ),
        engine=engine,
    )  # fmt: skip


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return judge(tmp_path_factory.mktemp("correct") / "run", FakeEngine())


def test_a_correct_decoder_is_equivalent(correct: RunResult) -> None:
    verdict = correct.analysis.verdict
    assert (verdict.word, verdict.exit_code) == (Word.EQUIVALENT, 0)
    assert all(control.passed for control in verdict.controls)


def test_an_inflated_acceptance_is_different_and_confirmed_on_fresh_seeds(tmp_path: Path) -> None:
    result = judge(tmp_path / "run", FakeEngine(on_epsilon=0.4))
    verdict = result.analysis.verdict
    assert (verdict.word, verdict.exit_code) == (Word.DIFFERENT, 1)
    assert "acceptance is inflated by 0.4" in verdict.headline
    assert "on against the target's law, again on 512 fresh samples" in "\n".join(verdict.reasons)
    fresh = list((tmp_path / "run" / "samples").rglob("seeds=0064-0319.parquet"))
    assert {path.parts[-4] for path in fresh} == {"arm=on", "arm=off"}
    # The law's fresh seeds of both arms serve the other families as well.
    assert "again on 256 fresh samples an arm" in "\n".join(verdict.reasons)


def test_an_engine_without_a_law_is_judged_by_its_samples_alone(page: None, tmp_path: Path) -> None:
    right = judge(tmp_path / "right", FakeEngine(has_law=False)).analysis
    assert right.verdict.word is Word.EQUIVALENT
    assert {line.family for line in right.evidence} == {"marginal", "joint"}
    assert right.verdict.intervals == ()
    wrong = judge(tmp_path / "wrong", FakeEngine(has_law=False, on_epsilon=0.4)).analysis.verdict
    assert wrong.word is Word.DIFFERENT
    assert "again on 256 fresh samples an arm" in "\n".join(wrong.reasons)
    fresh = list((tmp_path / "wrong" / "samples").rglob("seeds=0064-0319.parquet"))
    assert {path.parts[-4] for path in fresh} == {"arm=off", "arm=on"}


def test_a_bias_that_histograms_miss_is_found_against_the_law(tmp_path: Path) -> None:
    """At the gate's size, 65,536 tokens: a bias of .02 where the correct twin reads less than .008."""
    found = judge(tmp_path / "wrong", FakeEngine(on_epsilon=0.02), budget="gate", confirm=False).analysis
    assert found.verdict.word is Word.DIFFERENT
    assert found.verdict.gate_of_record.passed
    [bias] = [line for line in found.evidence if (line.name, line.stratum) == ("bias", "on / topp95")]
    assert bias.ci_low < 0.02 < bias.ci_high
    twin = judge(tmp_path / "right", FakeEngine(), budget="gate").analysis
    assert twin.verdict.word is Word.EQUIVALENT
    assert "acceptance bias" in twin.verdict.headline


def test_the_lines_of_evidence_cover_every_arm_comparison_and_test(correct: RunResult) -> None:
    lines = [(line.family, line.name, line.stratum) for line in correct.analysis.evidence]
    assert len(lines) == len(set(lines))
    strata = {(family, stratum) for family, _, stratum in lines}
    arms = {("law", f"{arm} / topp95") for arm in Arm}
    pairs = ("off vs on", "on vs on_null", "off vs biased")
    assert strata == arms | {("law", "on minus off / topp95")} | {("marginal", pair) for pair in pairs} | {
        ("joint", f"{pair} / topp95") for pair in pairs
    }
    assert [control.name for control in correct.analysis.verdict.controls] == ["A/A", "planted fault", "reference law"]
    assert {interval.place.test for interval in correct.analysis.verdict.intervals} == {"bias", "rank", "vocab"}


def test_a_reference_law_that_is_not_the_decoders_makes_the_run_invalid(tmp_path: Path) -> None:
    verdict = judge(tmp_path / "run", FakeEngine(scorer=FakeScorer(heat=2.0))).analysis.verdict
    assert verdict.word is Word.INVALID
    assert "plain decoding does not follow the law" in verdict.headline
    assert verdict.controls[2].passed is False


def test_a_law_that_is_slightly_wrong_is_not_taken_for_a_fault_of_speculation(tmp_path: Path) -> None:
    """Both arms stray from it alike. In these two runs stage 1 flags arm on alone; only stage 2 on both arms tells.

    The twin: where log-probabilities are reported, stage 1 sees at once that arm off follows another law.
    """
    for seed in (8, 11):
        result = judge(tmp_path / str(seed), FakeEngine(scorer=FakeScorer(heat=1.12), reports=False), run_seed=seed)
        [reference] = [finding for finding in result.analysis.verdict.findings if finding.role is Role.REFERENCE]
        assert not reference.flagged
        assert result.analysis.verdict.word is Word.INVALID
    reporting = judge(tmp_path / "reporting", FakeEngine(scorer=FakeScorer(heat=1.12)), run_seed=8).analysis.verdict
    [reference] = [finding for finding in reporting.findings if finding.role is Role.REFERENCE]
    assert [flag.place.test for flag in reference.flagged] == ["logprobs"]
    assert reporting.word is Word.INVALID


def test_several_configs_are_recomputed_to_the_same_bytes_in_the_order_asked(page: None, tmp_path: Path) -> None:
    run_dir = judge(tmp_path / "run", FakeEngine(), configs=("topp95", "topk50")).run_dir
    before = {name: (run_dir / name).read_bytes() for name in OUTPUTS}
    reanalyse(run_dir)
    assert {name: (run_dir / name).read_bytes() for name in OUTPUTS} == before
    assert list(Manifest.read(run_dir).protocol["configs"]) == ["topp95", "topk50"]


def test_a_run_that_was_stopped_is_never_equivalent(tmp_path: Path) -> None:
    run_dir = judge(tmp_path / "run", FakeEngine()).run_dir
    Manifest.read(run_dir).with_status(Status.CANCELLED).write(run_dir)
    verdict = reanalyse(run_dir).analysis.verdict
    assert verdict.word is Word.INCONCLUSIVE
    assert "did not end by itself" in verdict.headline


def test_law_files_that_are_gone_or_wrong_are_told(tmp_path: Path) -> None:
    run_dir = judge(tmp_path / "run", FakeEngine()).run_dir
    path = next((run_dir / "law" / "arm=on").rglob("*.parquet"))
    table = pq.read_table(path)
    values = table.column("entropy").to_numpy().copy()
    values[3] = np.nan
    broken = table.set_column(table.schema.get_field_index("entropy"), table.schema.field("entropy"), [values])
    pq.write_table(broken, path, write_page_checksum=True)
    with pytest.raises(InvalidShard, match="entropy"):
        reanalyse(run_dir)
    path.unlink()
    assert read_verdict(run_dir).word is Word.INVALID
    assert "law columns are gone or damaged" in read_verdict(run_dir).headline


def test_an_interval_that_crosses_its_margin_is_inconclusive_and_says_how_many_seeds_settle_it(tmp_path: Path) -> None:
    verdict = judge(tmp_path / "run", FakeEngine(), bias_margin=0.005).analysis.verdict
    assert (verdict.word, verdict.exit_code) == (Word.INCONCLUSIVE, 3)
    assert "crosses its margin of 0.005" in verdict.headline
    needed = next(i for i in verdict.intervals if i.place.test == "bias").seeds_needed
    assert needed is None or needed > 64


def test_a_sequential_run_stops_when_the_answer_is_known(tmp_path: Path) -> None:
    """Both answers before the budget is spent: a gross bias after a round, equivalence within .05 after a few."""
    gross = judge(tmp_path / "gross", FakeEngine(on_epsilon=0.2), budget="gate", sequential=True)
    assert gross.analysis.verdict.word is Word.DIFFERENT
    assert "at a level that holds whenever one looks" in "\n".join(gross.analysis.verdict.reasons)
    assert Manifest.read(gross.run_dir).used_seeds == 32
    right = judge(tmp_path / "right", FakeEngine(), budget="gate", sequential=True, bias_margin=0.05, pit_margin=0.1)
    assert right.analysis.verdict.word is Word.EQUIVALENT
    used = Manifest.read(right.run_dir).used_seeds
    assert used is not None
    assert used < 256
    line = f"sequential: {used * 256:,} of 65,536 tokens an arm were collected (topp95 equivalent after"
    assert any(reason.startswith(line) for reason in right.analysis.verdict.reasons)
    assert read_verdict(right.run_dir).word is Word.EQUIVALENT
    before = (right.run_dir / "verdict.json").read_bytes()
    reanalyse(right.run_dir)
    assert (right.run_dir / "verdict.json").read_bytes() == before


def test_equivalence_is_not_taken_from_a_look_at_which_a_flag_happens_to_be_gone() -> None:
    def look(*wants: str, different: bool = False, equivalent: bool = False) -> SimpleNamespace:
        return SimpleNamespace(wants=wants, different=different, equivalent=equivalent)

    silent, flagged, equivalent = look(), look("marginal"), look(equivalent=True)
    assert is_enough([silent, equivalent])
    assert not is_enough([flagged, equivalent])
    assert not is_enough([equivalent, silent])
    assert is_enough([flagged, look(different=True)])


def test_a_sequential_run_needs_a_law(tmp_path: Path) -> None:
    for engine, judging in ((FakeEngine(has_law=False), {}), (FakeEngine(), {"law": False})):
        with pytest.raises(InvalidSetting, match="law"):
            judge(tmp_path / "run", engine, sequential=True, **judging)


def test_samples_are_scored_once_and_a_lost_law_file_is_told(page: None, tmp_path: Path) -> None:
    run_dir, scorer = tmp_path / "run", FakeScorer()
    judge(run_dir, FakeEngine(scorer=scorer))
    calls = scorer.num_calls
    next((run_dir / "law" / "arm=on").rglob("*.parquet")).unlink()
    verdict = reanalyse(run_dir).analysis.verdict
    assert verdict.word is Word.INVALID
    assert "law of 1 shards of arm on" in verdict.headline
    assert judge(run_dir, FakeEngine(scorer=scorer), resume=True).analysis.verdict.word is Word.EQUIVALENT
    assert scorer.num_calls == calls + 1
    assert set(Manifest.read(run_dir).score_seconds) == set(Arm)
    assert "of the time of collecting the same samples" in (run_dir / "report.html").read_text("utf-8")


def test_without_confirmation_a_flag_counts_at_once(tmp_path: Path) -> None:
    result = judge(tmp_path / "run", FakeEngine(on_epsilon=0.4), confirm=False)
    assert result.analysis.verdict.word is Word.DIFFERENT
    assert not list((tmp_path / "run" / "samples").rglob("seeds=0064-0319.parquet"))


def test_a_planted_fault_that_is_missed_makes_the_run_invalid(tmp_path: Path) -> None:
    result = judge(tmp_path / "run", FakeEngine(biased_epsilon=0.0))
    verdict = result.analysis.verdict
    assert (verdict.word, verdict.exit_code) == (Word.INVALID, 4)
    assert "missed" in verdict.headline


def test_an_engine_that_drifts_between_calls_fails_its_a_a_control(tmp_path: Path) -> None:
    result = judge(tmp_path / "run", FakeEngine(drift=0.15), confirm=False)
    assert result.analysis.verdict.word is Word.INVALID
    assert "A/A" in result.analysis.verdict.headline


def test_an_engine_that_never_speculates_is_inconclusive(page: None, tmp_path: Path) -> None:
    verdict = judge(tmp_path / "run", FakeEngine(speculates=False)).analysis.verdict
    assert (verdict.word, verdict.exit_code) == (Word.INCONCLUSIVE, 3)


def test_every_output_is_written_and_recomputed_to_the_same_bytes(page: None, correct: RunResult) -> None:
    before = {name: (correct.run_dir / name).read_bytes() for name in OUTPUTS}
    for name in OUTPUTS:
        (correct.run_dir / name).unlink()
    reanalyse(correct.run_dir)
    assert {name: (correct.run_dir / name).read_bytes() for name in OUTPUTS} == before


def test_the_tables_hold_every_cell_of_every_comparison(correct: RunResult) -> None:
    cells = pd.read_parquet(correct.run_dir / "cells.parquet")
    assert cells.groupby("comparison").size().to_dict() == {"off_on": 32, "on_on_null": 32, "off_biased": 32}
    assert (cells["num_a"] == 64).all()
    assert (cells["num_b"] == 64).all()


def test_missing_rows_make_a_finished_run_invalid(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    judge(run_dir, FakeEngine())
    next((run_dir / "samples" / "arm=on").rglob("*.parquet")).unlink()
    verdict = reanalyse(run_dir).analysis.verdict
    assert (verdict.word, verdict.exit_code) == (Word.INVALID, 4)
    assert "1,024 of 2,048 rows are missing in config topp95, arm on" in verdict.headline


def test_an_engine_that_fails_leaves_an_invalid_run_that_can_be_resumed(tmp_path: Path, correct: RunResult) -> None:
    class Breaks(FakeEngine):
        def generate(self, *args, **kwargs):
            if self.num_calls == 2:
                message = "out of memory"
                raise RuntimeError(message)
            return super().generate(*args, **kwargs)

    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="out of memory"):
        judge(run_dir, Breaks())
    assert Manifest.read(run_dir).status is Status.ERROR
    assert read_verdict(run_dir).word is Word.INVALID
    assert "out of memory" in read_verdict(run_dir).headline
    resumed = judge(run_dir, FakeEngine(), resume=True)
    assert resumed.analysis.verdict.word is Word.EQUIVALENT
    for name in ("cells.parquet", "verdict.json"):
        assert (run_dir / name).read_bytes() == (correct.run_dir / name).read_bytes()


def test_a_resumed_run_generates_only_what_is_missing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    judge(run_dir, FakeEngine())
    next((run_dir / "samples" / f"arm={Arm.ON_NULL}").rglob("*.parquet")).unlink()
    engine = FakeEngine()
    judge(run_dir, engine, resume=True)
    assert engine.num_calls == 1


def test_a_folder_with_a_run_is_not_overwritten_nor_resumed_under_another_protocol(correct: RunResult) -> None:
    with pytest.raises(RunExists):
        judge(correct.run_dir, FakeEngine())
    with pytest.raises(RunMismatch, match="fingerprint"):
        judge(correct.run_dir, FakeEngine(), resume=True, run_seed=7)


def test_a_run_is_not_resumed_with_another_drafter(correct: RunResult) -> None:
    class Other(FakeEngine):
        def describe(self):
            return {**super().describe(), "drafter": "other"}

    with pytest.raises(RunMismatch, match=r"its drafter is '\w+', this call has 'other'"):
        judge(correct.run_dir, Other(), resume=True)


def test_a_run_is_not_resumed_by_other_code(correct: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivtest.pipeline.manifest.describe_code", lambda: {"source_sha256": "other"})
    with pytest.raises(RunMismatch, match="source_sha256"):
        judge(correct.run_dir, FakeEngine(), resume=True)


def test_a_run_is_not_resumed_under_another_analysis_or_on_another_processor(
    correct: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunMismatch, match="analysis"):
        judge(correct.run_dir, FakeEngine(), resume=True, confirm=False)
    machine = {**Manifest.read(correct.run_dir).machine, "cpu_features": ["mmx"]}
    monkeypatch.setattr("equivtest.pipeline.manifest.describe_machine", lambda: machine)
    with pytest.raises(RunMismatch, match="CPU"):
        judge(correct.run_dir, FakeEngine(), resume=True)


def test_a_run_that_starts_again_has_no_verdict_until_it_ends(tmp_path: Path) -> None:
    class Breaks(FakeEngine):
        def generate(self, *args, **kwargs):
            message = "out of memory"
            raise RuntimeError(message)

    run_dir = tmp_path / "run"
    judge(run_dir, FakeEngine())
    next((run_dir / "samples" / "arm=on").rglob("*.parquet")).unlink()
    with pytest.raises(RuntimeError):
        judge(run_dir, Breaks(), resume=True)
    assert not (run_dir / "verdict.json").exists()


def test_a_resume_command_can_be_pasted() -> None:
    started = "equivtest run --run-dir 'my runs/a'"
    assert resume_command(started, Path("my runs/a")) == "equivtest run --run-dir 'my runs/a' --resume"
    assert resume_command("equivtest run", Path("a b")) == "equivtest run --resume --run-dir 'a b'"
    assert resume_command(resume_command(started, Path("x")), Path("x")).count("--resume") == 1


def test_a_folder_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"), pytest.raises(RunBusy):
        judge(tmp_path / "run", FakeEngine())
    assert judge(tmp_path / "run", FakeEngine()).analysis.verdict.word is Word.EQUIVALENT


def test_a_resolution_that_is_too_coarse_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    engine = FakeEngine()
    options = RunOptions(
        budget="smoke", engine=EngineOptions(), analysis=AnalysisOptions(exact=True, num_permutations=99),
        run_dir=tmp_path / "run",
    )  # fmt: skip
    with pytest.raises(ResolutionTooCoarse):
        run(options, engine=engine)
    assert engine.num_calls == 0


def test_the_newest_run_is_found_by_its_start(tmp_path: Path) -> None:
    judge(tmp_path / "a", FakeEngine())
    judge(tmp_path / "b", FakeEngine())
    older = json.loads((tmp_path / "b" / "manifest.json").read_text())
    older["started"] = "2000-01-01T00:00:00+00:00"
    (tmp_path / "b" / "manifest.json").write_text(json.dumps(older))
    assert find_run(tmp_path) == tmp_path / "a"
