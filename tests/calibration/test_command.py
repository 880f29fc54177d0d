"""`equivtest bench calibration` as a user types it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from equivtest.bench import calibration
from equivtest.bench.families import FAMILIES, LEVELS
from equivtest.cli.bench import command


@pytest.fixture(autouse=True)
def threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the command leaves the environment of the other tests alone."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def call(output: Path) -> Result:
    arguments = ["calibration", "--replications", "2", "--workers", "1", "--output", str(output)]
    return CliRunner().invoke(command, arguments, standalone_mode=False, catch_exceptions=False)


def test_the_table_is_printed_and_written_with_what_made_it(tmp_path: Path) -> None:
    """Two runs a family: no interval is narrow enough to be wrong."""
    ended = call(tmp_path / "table.json")
    assert ended.return_value == 0
    assert "the whole gate" in ended.output
    written = json.loads((tmp_path / "table.json").read_text("utf-8"))
    assert {"command", "code", "settings", "rows", "gate"} <= set(written)
    assert (
        {row["family"] for row in written["rows"]} == set(FAMILIES) == set(written["settings"]["protocols"]) - {"gate"}
    )
    assert {row["nominal"] for row in written["rows"]} == set(LEVELS)
    assert all(row["ok"] and row["ci_low"] <= row["rate"] <= row["ci_high"] for row in written["rows"])
    assert {row["decoder"] for row in written["gate"]} == {"correct", "faulty"}


def test_a_level_outside_its_interval_is_named_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = calibration.Level(
        family="law", test="bias", nominal=0.05, kind="exact", rejected=200, replications=2_000, ci_low=0.08,
        ci_high=0.12,
    )  # fmt: skip
    share = calibration.Share(decoder="correct", what="stopped", count=0, runs=2_000, ci_low=0.0, ci_high=0.002)
    table = calibration.Calibration(replications=2_000, seed=1, levels=(level,), gate=(share,))
    monkeypatch.setattr(calibration, "calibrate", lambda **_: table)
    ended = call(tmp_path / "table.json")
    assert ended.return_value == 1
    assert "0.1000 !" in ended.output
    assert "outside its interval" in ended.output
    assert dataclasses.replace(level, kind="upper").ok is False
