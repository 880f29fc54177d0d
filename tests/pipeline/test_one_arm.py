"""The samples of one arm in a folder of their own, and when that folder is continued."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import RunMismatch
from equivtest.faults import Fault, Setting, get_fault, load_faults
from equivtest.pipeline.one_arm import gather, large_batches, shards_of
from equivtest.pipeline.progress import Silent
from equivtest.protocol.budgets import Budget
from equivtest.protocol.plan import Protocol
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Arm

TINY = Budget(name="smoke", num_prompts=2, num_positions=4, num_seeds=4, epsilon=0.1)
PROTOCOL = Protocol.build(load_prompt_set("default"), ("topp95",), TINY)


@pytest.fixture(scope="module")
def engine() -> DecoderEngine:
    return DecoderEngine.open(EngineOptions(model="tiny", dtype="float32"))


def make(folder: Path, engine: DecoderEngine, fault: Fault) -> list[int]:
    """Times at which the samples were written."""
    batches = list(large_batches(shards_of(PROTOCOL, Arm.BIASED, "topp95"), 8))
    gather(folder, PROTOCOL, engine, batches, Silent(), "samples", fault=fault)
    return [path.stat().st_mtime_ns for path in sorted(folder.glob("samples/**/*.parquet"))]


def test_a_folder_is_continued_for_the_same_fault_and_no_other(engine: DecoderEngine, tmp_path: Path) -> None:
    fault = get_fault("accept_all")
    first = make(tmp_path, engine, fault)
    assert len(first) == 2
    assert make(tmp_path, engine, fault) == first
    for changes in ({"source_sha256": "edited"}, {"name": "other"}, {"setting": Setting(draft_len=2)}):
        with pytest.raises(RunMismatch):
            make(tmp_path, engine, dataclasses.replace(fault, **changes))


def test_a_loaded_fault_carries_the_hash_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its wrap is made by this package, whose own hash says nothing of the module."""
    text = "from equivtest.faults.wrappers import judged\nfrom equivtest.faults import Fault\n" + (
        "FAULTS = [Fault(name='own', stage='accept', description='d', wrap=judged('own', lambda s, o, t: o.p * {}))]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = []
    for number in (1, 2):
        (tmp_path / f"own_{number}_of_a_test.py").write_text(text.format(number))
        hashes.append(load_faults(f"own_{number}_of_a_test")[0].source_sha256)
    assert len(set(hashes)) == 2
    assert all(len(one) == 64 for one in hashes)
    assert get_fault("accept_all").source_sha256 == ""
