"""The profile of a round: its figures, what it measures them on, and which kernels it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from equivtest.bench.device_clock import time_back_to_back
from equivtest.bench.latency import accepted_per_round
from equivtest.bench.rounds import PAY_COLUMNS, TIME_COLUMNS, _Clock, bench_rounds, figures, profile, with_best
from equivtest.cli.bench import command
from equivtest.decoder.draft_length import acceptance_by_slot
from equivtest.decoder.executor import Executor
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.rounds import DeviceRounds, Round
from equivtest.decoder.weights import load_checkpoint
from equivtest.engines.base import EngineOptions
from equivtest.errors import InvalidSetting
from equivtest.kernels import registry
from equivtest.kernels.contract import SpecAccept
from equivtest.kernels.registry import get_backend
from equivtest.records import Request
from tests.decoder.dflash_drafters import dflash_config, dflash_network
from tests.decoder.fused_backend import FusedOnCpu
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for


def load() -> FusedOnCpu:
    """A kernel backend of the registry, where a test puts it there."""
    return FusedOnCpu(get_backend("cpp"))


def asked(max_tokens: int = 16) -> list[Request]:
    return requests_for(random_prompts(4), CONFIGS["topp95"], max_tokens=max_tokens)


def on_device() -> tuple[Executor, DeviceRounds]:
    executor = build(load(), "dflash", max_batch=2, max_draft=3)
    rounds = DeviceRounds.of(executor.model, executor.backend, executor.drafter, "chain")
    assert rounds is not None
    return executor, rounds


def test_figures_follow_from_the_measurements() -> None:
    device_ms = {"draft_ms": 0.25, "verify_ms": 0.5, "accept_ms": 0.0625, "round_ms": 1.0}
    assert figures(0.4, device_ms, 1.25, 1.5) == {
        "plain_ms": 0.4, **device_ms, "rest_ms": 0.1875, "host_round_ms": 1.25, "gap_ms": 0.25, "accepted": 1.5,
        "break_even": 1.5, "token_ms": 0.4,
    }  # fmt: skip


def test_at_break_even_a_token_takes_a_plain_step() -> None:
    row = figures(0.4, dict.fromkeys(("draft_ms", "verify_ms", "accept_ms"), 0.0) | {"round_ms": 0.7}, 1.0, 0.0)
    again = figures(0.4, {name: row[name] for name in ("draft_ms", "verify_ms", "accept_ms", "round_ms")}, 1.0,
                    row["break_even"])  # fmt: skip
    assert again["token_ms"] == pytest.approx(0.4)
    assert row["token_ms"] == pytest.approx(0.7)


@pytest.mark.parametrize(("times", "best"), [([3.0, 1.0, 2.0], 1), ([1.0, 1.0], 0), ([5.0], 0)])
def test_the_least_time_a_token_is_the_best_and_the_first_of_equals(times: list[float], best: int) -> None:
    rows = with_best([{"token_ms": time} for time in times])
    assert [row["best"] for row in rows] == [index == best for index in range(len(times))]


def test_a_profile_tells_what_the_executor_does_at_each_draft_length() -> None:
    executor, rounds = on_device()
    rows = profile(executor, rounds, asked(), 2, (1, 3))
    assert [row["draft_len"] for row in rows] == [1, 3]
    for row in rows:
        assert {*TIME_COLUMNS, *PAY_COLUMNS, "draft_len"} == set(row)
        assert min(row[name] for name in ("plain_ms", "draft_ms", "verify_ms", "accept_ms", "host_round_ms")) > 0
        by_host = build(get_backend("cpp"), "dflash", max_batch=2, max_draft=row["draft_len"])
        texts = by_host.generate(asked(), speculative=True)
        assert row["accepted"] == accepted_per_round(texts) > 0
        assert row["by_slot"] == pytest.approx(acceptance_by_slot(texts, row["draft_len"], prior=0.0), abs=1e-4)
    assert rows[0]["plain_ms"] == rows[1]["plain_ms"]
    assert sum(row["best"] for row in rows) == 1


def all_accepted(self: Round, accepted: SpecAccept) -> torch.Tensor:
    """Commits as if every draft had been kept."""
    kept = (self._remaining - 1).clamp(0, self._width).int()
    tokens = accepted.output_token_ids.clamp(min=0)
    return commit(self, accepted._replace(output_token_ids=tokens, emitted=kept))


commit = Round._commit


@pytest.mark.parametrize("width", [1, 3])
def test_every_round_that_is_timed_offers_all_its_drafts_though_all_are_kept(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, rounds = on_device()
    seen: list[int] = []
    run = Round.run

    def noted(self: Round) -> Any:
        seen.append(int(self._remaining.min()))
        return run(self)

    monkeypatch.setattr(Round, "run", noted)
    monkeypatch.setattr(Round, "_commit", all_accepted)
    _Clock(executor, rounds, asked()[:2], 3).round_ms(width)
    assert sorted(set(seen), reverse=True) == list(range(16, 0, -width - 1))


def test_a_stage_that_is_timed_leaves_the_round_as_it_was() -> None:
    """All but the commit may be done again: the same drafts, and the same of them kept."""
    executor, rounds = on_device()
    clock = _Clock(executor, rounds, asked()[:2], 3)
    with torch.inference_mode():
        made = clock._loaded(3)
        before = [column.clone() for column in made._state()]
        plans = made.plans(for_graph=False)
        places = made.lay_out()
        drafts = [made.draft(places, plans[0]) for _ in range(2)]
        logits = [made.verify(places, drafts[0], plans[1]) for _ in range(2)]
        tokens = [made.accept(drafts[0], each)[1].output_token_ids.clone() for each in logits]
        token_ids = [each.token_ids for each in drafts]
        assert torch.equal(
            token_ids[0], made.draft(places, plans[0]).token_ids
        )  # verification wrote where the block stands
        same = [torch.equal(*pair) for pair in (token_ids, logits, tokens)]
        assert same == [True] * 3
        assert all(map(torch.equal, before, made._state()))
        made.run()
        assert not all(map(torch.equal, before, made._state()))


def test_one_call_goes_ahead_of_those_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        "equivtest.bench.device_clock._host_s",
        lambda calls: (made.append("start"), [call() for call in calls])[0] or 3e-3,
    )
    us = time_back_to_back(lambda: made.append("call"), "cpu", calls=3, before=lambda: made.append("before"))
    assert us == pytest.approx(1_000.0)
    once = ["before", "call", "start", *["call"] * 3]
    assert made == once * (len(made) // len(once))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random drafter of 2 drafts for the shipped `tiny` model."""
    folder = tmp_path_factory.mktemp("drafter")
    dflash_network(dflash_config(load_checkpoint(resolve_model("tiny")).config, head_dim=16, block_size=3)).save(folder)
    return folder


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of kernels that need no host, on this processor."""
    monkeypatch.setitem(registry._MODULES, "fused_on_cpu", __name__)  # type: ignore[misc]
    return "fused_on_cpu"


def test_the_command_tells_and_writes_a_row_for_every_load_law_and_length(
    folder: Path, fused: str, tmp_path: Path
) -> None:
    arguments = [
        "rounds", "--model", "tiny", "--draft-model", str(folder), "--kernels", fused, "--dtype", "float32",
        "--concurrency", "16", "--draft-len", "1", "--draft-len", "2", "--draft-len", "3", "--max-tokens", "16",
        "--output", str(tmp_path / "rounds.json"),
    ]  # fmt: skip
    ended = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert ended.exception is None
    left = json.loads((tmp_path / "rounds.json").read_text("utf-8"))
    assert [(row["concurrency"], row["sampling"], row["draft_len"]) for row in left["rows"]] == [
        (16, sampling, length) for sampling in ("greedy", "T .8 top_p .95") for length in (1, 2)
    ]
    assert (left["bench"], left["settings"]["subject"]["drafter"]) == ("rounds", "dflash")
    for column in (*TIME_COLUMNS, *PAY_COLUMNS):
        assert column in ended.output
    assert "drafts 1, 2 of at most 2" in ended.output


@pytest.mark.parametrize("kernels", ["auto", "reference", "cpp"])
def test_kernels_that_need_the_host_are_refused_before_a_model_is_looked_for(kernels: str) -> None:
    options = EngineOptions(model="no such model", kernels=kernels)
    with pytest.raises(InvalidSetting, match="--device cuda --kernels cuda"):
        bench_rounds(options)


@pytest.mark.parametrize("wrong", [{"concurrency": (0,)}, {"draft_lens": (0,)}, {"max_tokens": 31}], ids=str)
def test_a_profile_of_nothing_is_refused(wrong: dict[str, Any], fused: str) -> None:
    with pytest.raises(InvalidSetting, match="at least 1"):
        bench_rounds(EngineOptions(model="no such model", kernels=fused), **wrong)


def test_only_lengths_that_the_drafter_has_are_taken(folder: Path, fused: str) -> None:
    options = EngineOptions(model="tiny", drafter="dflash", draft_model=str(folder), kernels=fused, dtype="float32")
    with pytest.raises(InvalidSetting, match="at most 2"):
        bench_rounds(options, draft_lens=(5, 7))


def test_more_requests_than_a_graph_holds_are_refused() -> None:
    executor, rounds = on_device()
    many = [dataclasses.replace(asked()[0], stream_key=key) for key in range(2_000)]
    with pytest.raises(InvalidSetting, match="take fewer"):
        _Clock(executor, rounds, many, 3)
