"""What a protocol can see: in closed form from a run, and counted over many runs of a decoder whose bias is known."""

import dataclasses
from pathlib import Path

import pytest

from equivtest.engines.base import EngineOptions
from equivtest.errors import InvalidSetting
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.power import closed_form, closed_form_record
from equivtest.pipeline.power_study import FAMILIES, StudyRow, Subject, simulate, smallest_found
from equivtest.pipeline.progress import Silent
from equivtest.pipeline.run import RunOptions, run
from equivtest.protocol.budgets import get_budget
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set
from tests.pipeline.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("pilot") / "run"
    options = RunOptions(budget="smoke", engine=EngineOptions(), analysis=AnalysisOptions(), run_dir=run_dir)
    run(options, engine=FakeEngine())
    return run_dir


def test_more_seeds_see_less_bias_by_their_root(finished: Path) -> None:
    rows = {row.budget: row for row in closed_form(finished, bias=0.02)}
    assert list(rows) == ["this run", "smoke", "gate", "audit"]
    assert rows["smoke"].smallest_bias == rows["this run"].smallest_bias
    assert rows["gate"].smallest_bias == pytest.approx(rows["smoke"].smallest_bias / 2, rel=0.1)
    assert rows["audit"].smallest_bias == pytest.approx(rows["gate"].smallest_bias / 2, rel=0.1)
    assert all(1 <= row.ratio < 1.5 for row in rows.values())
    # Where the seeds for a bias are what a budget has, that budget's smallest bias is this one.
    again = closed_form(finished, bias=rows["gate"].smallest_bias)[0]
    assert again.seeds_for_bias == pytest.approx(256, rel=0.01)
    record = closed_form_record(finished, bias=0.02)
    assert any("a bias of 0.02 needs" in line for line in record["summary"])


def test_a_study_counts_what_each_family_finds_and_is_not_made_twice(tmp_path: Path) -> None:
    """Five runs at the smoke size: a bias of .4 is found by the law in each of them, none in a correct decoder (one
    of five would be at 1 %: once in 20 times)."""
    protocol = Protocol.build(load_prompt_set("default"), ("topp95",), get_budget("smoke"))
    engine = FakeEngine(biased_epsilon=0.4)
    subjects = [Subject.biased(0.0), Subject.biased(0.4)]
    settings = {"num_runs": 5, "batch_samples": 512, "listener": Silent(), "workers": 1}
    rows = simulate(tmp_path, protocol, engine, subjects, **settings)
    by_name = {(row.subject, row.family): row for row in rows}
    assert len(by_name) == 2 * len(FAMILIES)
    for family in ("law", "law, confirmed", "joint"):
        assert by_name["bias 0.4", family].num_found == 5
        assert by_name["bias 0", family].num_found == 0
    assert by_name["bias 0.4", "law"].mean_estimate == pytest.approx(0.4, abs=0.03)
    assert by_name["bias 0", "law"].mean_estimate == pytest.approx(0.0, abs=0.03)
    calls = engine.num_calls
    assert simulate(tmp_path, protocol, engine, subjects, **settings) == rows
    assert engine.num_calls == calls


def test_a_study_too_small_to_confirm_is_refused(tmp_path: Path) -> None:
    protocol = Protocol.build(load_prompt_set("default"), ("topp95",), get_budget("smoke"))
    with pytest.raises(InvalidSetting, match="must be more than 4"):
        simulate(tmp_path, protocol, FakeEngine(), [], num_runs=4, batch_samples=256, listener=Silent())


def test_the_smallest_bias_is_where_the_curve_stays_above_ninety_percent() -> None:
    def rows(*powers: float) -> list[StudyRow]:
        template = StudyRow(
            config="c", subject="", bias=0.0, family="law", num_found=0, num_runs=20, power=0.0, ci_low=0.0,
            ci_high=1.0, mean_estimate=None,
        )  # fmt: skip
        biases = (0.01, 0.02, 0.05)
        return [dataclasses.replace(template, bias=b, power=p) for b, p in zip(biases, powers, strict=True)]

    found, between = smallest_found(rows(0.1, 0.5, 1.0), "c", "law")
    assert found == 0.05
    assert between == pytest.approx(0.044)
    assert smallest_found(rows(0.95, 0.5, 1.0), "c", "law")[0] == 0.05  # chance at a smaller bias does not count
    assert smallest_found(rows(0.9, 1.0, 1.0), "c", "law") == (0.01, None)
    assert smallest_found(rows(0.0, 0.5, 0.8), "c", "law") == (None, None)
