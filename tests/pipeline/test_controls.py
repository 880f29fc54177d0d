"""A fast subset of the kill matrix, from the options to the page."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from equivtest.errors import UnknownName
from equivtest.pipeline import controls as module
from equivtest.pipeline.control_subject import ControlsOptions, stood
from equivtest.pipeline.controls import EngineOptions, catalogue_lines, controls
from equivtest.protocol.budgets import Budget
from equivtest.records import Family, Kill, Nature
from equivtest.report.kill_matrix import KillMatrix, Outcome

SUBSET = {
    "raw_target": {Family.LAW, Family.SUPPORT, Family.JOINT},
    "accept_all": {Family.LAW, Family.MARGINAL, Family.JOINT},
    "broadcast_seed": {Family.DUPLICATES, Family.REPLAY},
    "seed_ignored": {Family.REPLAY},
    "logprob_zero": {Family.LOGPROBS},
    "penalties_skipped": {Family.LAW},
    "runs_past_end": {Family.SUPPORT},
    "typical_acceptance": {Family.LAW},
    "match_acceptance": set(),
    "random_drafts": set(),
}
"""Some of every nature, and a family that must be among those that find each."""

SMALL = Budget(name="smoke", num_prompts=2, num_positions=12, num_seeds=128, epsilon=0.1)
"""Less than a third of the command's own smoke budget: none of the faults here is a subtle one."""


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMOKE", SMALL)
        yield


def options(folder: Path, *only: str, **fields: object) -> ControlsOptions:
    return ControlsOptions(
        engine=EngineOptions(model="tiny"),
        only=only,
        run_dir=folder,
        workers=2,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, KillMatrix]:
    return controls(options(tmp_path_factory.mktemp("controls"), *SUBSET))


def by_name(matrix: KillMatrix) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in matrix.outcomes}


def test_every_subject_comes_out_as_it_must(made: tuple[Path, KillMatrix]) -> None:
    """Seeds are fixed. A correct subject would be found by chance with probability .001 a family that looks at it."""
    _, matrix = made
    assert matrix.summary[-1].startswith("diagnosis names the stage of ")
    assert matrix.as_expected
    assert {outcome.nature for outcome in matrix.outcomes} == set(Nature)


@pytest.mark.parametrize("name", SUBSET)
def test_the_evidence_that_must_find_it_does(made: tuple[Path, KillMatrix], name: str) -> None:
    outcome = by_name(made[1])[name]
    found = {family for family, kill in outcome.kills.items() if kill.found}
    assert found >= SUBSET[name]
    assert bool(found) is outcome.nature.must_be_found


def test_tokens_needed_are_a_part_of_those_collected(made: tuple[Path, KillMatrix]) -> None:
    kills = [kill for outcome in made[1].outcomes for kill in outcome.kills.values()]
    assert all((kill.num_tokens is None) is not kill.found for kill in kills)
    whole = SMALL.num_prompts * SMALL.num_positions * SMALL.num_seeds
    needed = {kill.num_tokens for kill in kills if kill.family is Family.LAW and kill.num_tokens}
    assert needed <= {whole >> halved for halved in range(5)}
    assert min(needed) < whole


def test_the_diagnosis_names_the_stage(made: tuple[Path, KillMatrix]) -> None:
    outcomes = by_name(made[1])
    for name in ("raw_target", "accept_all", "broadcast_seed", "seed_ignored", "logprob_zero", "penalties_skipped"):
        assert outcomes[name].named_stage == outcomes[name].stage, outcomes[name].diagnosis


def test_everything_is_written(made: tuple[Path, KillMatrix]) -> None:
    folder, matrix = made
    assert set(SUBSET) <= set(pq.read_table(folder / "controls.parquet").column("subject").to_pylist())
    assert "as it must be" in (folder / "controls.html").read_text("utf-8")
    assert json.loads((folder / "controls.json").read_text("utf-8"))["summary"] == list(matrix.summary)


def test_what_a_folder_holds_is_not_made_twice(made: tuple[Path, KillMatrix]) -> None:
    folder, _ = made
    samples = sorted(folder.glob("subjects/seed_ignored/samples/**/*.parquet"))
    before = [path.stat().st_mtime_ns for path in samples]
    _, again = controls(dataclasses.replace(options(folder, "seed_ignored"), workers=1))
    assert [path.stat().st_mtime_ns for path in samples] == before
    assert by_name(again)["seed_ignored"].kills == by_name(made[1])["seed_ignored"].kills


OWN_FAULTS = """
import dataclasses
from equivtest.faults import Fault, Setting
from equivtest.records import Family


def wrap(stages):
    def verify(step, drafts, scored):
        probs = stages.verify(step, drafts, scored)
        return probs.copy_(probs.roll(1, dims=-1)) if drafts.token_ids.shape[1] else probs

    return dataclasses.replace(stages, verify=verify)


def stumble(stages):
    raise IndexError("seven")


FAULTS = [
    Fault(name="rolled", stage="verify", description="every token is the one before", wrap=wrap),
    Fault(name="stumbling", stage="verify", description="cannot even be planted", wrap=stumble),
]
"""


def test_a_fault_of_ones_own_is_measured_like_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMOKE", dataclasses.replace(SMALL, num_prompts=2, num_positions=16, num_seeds=32))
    (tmp_path / "own_faults_of_a_test.py").write_text(OWN_FAULTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = options(tmp_path / "run", "rolled", "stumbling", faults_from=("own_faults_of_a_test",))
    _, matrix = controls(dataclasses.replace(own, workers=1))
    assert by_name(matrix)["rolled"].killed
    assert by_name(matrix)["rolled"].as_expected
    # A fault that could not be measured is not one that was found, and does not end the others.
    assert by_name(matrix)["stumbling"].failed == "IndexError: seven"
    assert not matrix.as_expected
    sys.modules.pop("own_faults_of_a_test")


def test_what_must_pass_is_found_only_if_two_looks_find_it() -> None:
    def look(*p_values: float) -> list[Kill]:
        families = zip((Family.LAW, Family.JOINT, Family.REPLAY), p_values, strict=True)
        return [Kill(family=family, test="t", p_value=p, num_tokens=None) for family, p in families]

    twice = stood(look(1e-4, 1e-4, 0.5), look(0.2, 1e-5, 1e-6))
    assert [kill.found for kill in twice] == [False, True, False]
    assert [kill.p_value for kill in twice] == [0.2, 1e-5, 0.5]


def test_an_unknown_fault_is_named_before_anything_is_run(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"no_such_fault.*raw_target"):
        controls(options(tmp_path / "run", "no_such_fault"))
    assert not (tmp_path / "run").exists()


def test_the_catalogue_can_be_read() -> None:
    lines = list(catalogue_lines())
    assert len([line for line in lines if line.startswith("fault, ")]) >= 40
    assert any("vllm#9834" in line for line in lines)
    assert any(line.startswith("not expressible: #41") for line in lines)
