"""The committed table: enough runs, every test of every family, every level inside its interval, few false stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from equivtest.bench.calibration import SIMULTANEOUS
from equivtest.bench.families import FAMILIES, LEVELS

TABLE = Path(__file__).parents[2] / "results" / "reference" / "calibration.json"
NUM_REPLICATIONS = 2_000


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return json.loads(TABLE.read_text("utf-8"))


def test_every_level_is_inside_its_interval(table: dict[str, Any]) -> None:
    """Recomputed from the counts: together right with probability 99 % over the seed that made the table."""
    confidence = 1 - (1 - SIMULTANEOUS) / len(table["rows"])
    for row in table["rows"]:
        interval = binomtest(row["rejected"], row["replications"]).proportion_ci(confidence)
        assert interval.low <= row["nominal"], row
        assert row["kind"] == "upper" or row["nominal"] <= interval.high, row
        assert row["ok"], row


def test_the_table_asks_every_test_often_enough(table: dict[str, Any]) -> None:
    """One replication says which tests a family has."""
    assert table["settings"]["replications"] >= NUM_REPLICATIONS
    assert all(row["replications"] >= NUM_REPLICATIONS for row in table["rows"])
    there = {(row["family"], row["test"], row["nominal"], row["kind"]) for row in table["rows"]}
    assert there == {
        (name, test, level, "upper" if test in family.upper else "exact")
        for name, family in FAMILIES.items()
        for test in family.replicate(np.random.default_rng(1))
        for level in LEVELS
    }


def test_the_gate_stops_a_correct_decoder_in_under_one_percent_of_runs_and_a_faulty_one_in_nearly_all(
    table: dict[str, Any],
) -> None:
    shares = {(row["decoder"], row["what"].split(":")[0]): row for row in table["gate"]}
    stopped = shares["correct", "stopped"]
    assert stopped["runs"] >= NUM_REPLICATIONS
    assert binomtest(stopped["count"], stopped["runs"]).proportion_ci(0.95).high < 0.01
    marginal, literal = shares["correct", "marginal family with confirmation"], shares["correct", "gate of record"]
    assert marginal["count"] <= stopped["count"] < literal["count"]
    found = shares["faulty", "verdict different"]
    assert binomtest(found["count"], found["runs"]).proportion_ci(0.95).low > 0.95
