"""The draft length that is measured before a run: what pays is taken, and it draws from the same law."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from equivtest.cli.run import command
from equivtest.decoder.executor import Executor
from equivtest.engines import draft_length
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting
from equivtest.records import Request, SamplingParams
from equivtest.rng import stream_key

AUTO = EngineOptions(model="tiny", kernels="cpp", dtype="float32", drafter="self", draft_len=None, max_batch=2)


@pytest.mark.parametrize(("seconds_a_draft", "chosen"), [(0.0, draft_length.LONGEST), (5.0, 1)])
def test_free_drafts_are_all_offered_and_dear_ones_sparingly(
    monkeypatch: pytest.MonkeyPatch, seconds_a_draft: float, chosen: int
) -> None:
    """The drafter `self` is the target itself, so nearly everything it offers is accepted; the clock is a given one."""

    def step_s(executor: Executor, requests: Sequence[Request], *, speculative: bool) -> float:
        assert len(requests) == 2
        return 1.0 + seconds_a_draft * executor.max_draft * speculative

    monkeypatch.setattr(draft_length, "_step_s", step_s)
    monkeypatch.setattr(draft_length, "_MAX_TOKENS", 16)
    told: list[str] = []
    engine = DecoderEngine.open(AUTO, on_message=told.append)
    assert engine.describe()["draft_len"] == chosen
    assert engine.notes()["draft_len"] in told
    request = Request(
        prompt_token_ids=engine.encode_prompt([{"role": "user", "content": "Hello"}]),
        params=SamplingParams(temperature=0.0),
        stream_key=stream_key("test", 0),
        max_tokens=17,
    )
    speculated, plain = (engine.generate([request], speculative=speculative)[0] for speculative in (True, False))
    assert speculated.num_drafts.max() == chosen
    assert np.array_equal(speculated.token_ids, plain.token_ids)


def test_another_engine_refuses_to_measure() -> None:
    with pytest.raises(InvalidSetting, match="built-in decoder"):
        EngineOptions(engine="transformers", draft_len=None)


def test_a_whole_run_with_the_measured_length_is_equivalent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smoke budget on the small model, law family included, measured on texts of a third of the usual length; a correct
    decoder is stopped in under 1 % of runs, and with this seed it is not."""
    monkeypatch.setattr(draft_length, "_MAX_TOKENS", 16)
    options = "--model tiny --budget smoke --drafter early_exit --early-exit-layers 2 --draft-len auto --kernels cpp"
    result = CliRunner().invoke(command, [*options.split(), "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "drafts a step" in (tmp_path / "run" / "manifest.json").read_text("utf-8")
