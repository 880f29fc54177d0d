"""What the page shows of a run's tokens is what lies on disk, and what the law expects is what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from equivtest.errors import InvalidShard
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.run import RunResult
from equivtest.pipeline.shown_tokens import NUM_SAMPLES, shown_tokens
from equivtest.pipeline.texts import TEXTS_FILE, kept_token_texts
from equivtest.records import Arm
from equivtest.samples.reader import read_samples
from tests.pipeline.fake_engine import FakeEngine
from tests.pipeline.test_run import judge


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return judge(tmp_path_factory.mktemp("shown") / "run", FakeEngine())


def test_every_cell_holds_the_counts_of_its_samples(result: RunResult) -> None:
    cells = result.data.shown.cells
    rows = read_samples(result.run_dir).to_pandas()
    rows = rows[rows["seed"] < 64]
    assert len(cells) == 2 * 16
    cell = cells["topp95", "chat", 5]
    for arm in Arm:
        here = rows[(rows["arm"] == arm) & (rows["prompt_id"] == "chat") & (rows["position"] == 5)]["token_id"]
        assert [int((here == id_).sum()) for id_ in cell.token_ids] == list(cell.counts[arm][:-1])
        assert sum(cell.counts[arm]) == 64
    assert all(len(cell.token_ids) <= 12 for cell in cells.values())


def test_samples_are_those_of_the_first_seeds_token_by_token_with_their_origins(result: RunResult) -> None:
    samples = result.data.shown.samples
    assert len(samples) == 2 * 2 * NUM_SAMPLES
    one = next(s for s in samples if (s.arm, s.prompt_id, s.seed) == (Arm.ON, "chat", 3))
    rows = read_samples(result.run_dir, arms=["on"], prompt_ids=["chat"]).to_pandas()
    rows = rows[rows["seed"] == 3]
    assert list(one.token_ids) == rows["token_id"].tolist()
    assert one.origins == "".join(str(origin)[0] for origin in rows["origin"])


def test_texts_are_asked_of_the_engine_once_and_a_report_needs_no_engine(result: RunResult) -> None:
    texts = kept_token_texts(result.run_dir)
    assert texts == {id_: f"<{id_}>" for id_ in texts}
    ids = np.unique(read_samples(result.run_dir, ["token_id"]).column(0).to_numpy())
    assert sorted(texts) == ids.tolist()
    assert result.data.shown.token_texts == texts


def test_what_is_gone_is_left_out_and_what_is_damaged_is_told(result: RunResult, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(result.run_dir, run_dir)
    protocol = Manifest.read(run_dir).judged_protocol
    shutil.rmtree(run_dir / "samples" / "arm=biased")
    (run_dir / TEXTS_FILE).unlink()
    shown = shown_tokens(run_dir, protocol)
    assert set(shown.cells["topp95", "chat", 5].counts) == {Arm.OFF, Arm.ON, Arm.ON_NULL}
    assert shown.token_texts == {}
    assert shown.to_json()["texts"] == [None] * len(shown.to_json()["ids"])
    (run_dir / TEXTS_FILE).write_text(json.dumps(["no table"]))
    with pytest.raises(InvalidShard, match="not a table of token texts"):
        shown_tokens(run_dir, protocol)


def test_a_correct_arm_is_accepted_as_the_law_expects_and_a_biased_one_is_not(result: RunResult) -> None:
    """The three shares of a correct run lie in their 95 % bands with this seed; the planted bias is .5."""
    table = result.data.acceptance.merge(result.data.expected, on=["arm", "config", "slot"])
    assert set(table["arm"]) == {"on", "on_null", "biased"}
    share = table["accepted"] / table["reached"]
    inside = ((share >= table["low"]) & (share <= table["high"])).groupby(table["arm"]).all()
    assert inside.to_dict() == {"on": True, "on_null": True, "biased": False}
