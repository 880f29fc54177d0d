"""Whole runs of engines that no fault can be put into, and of servers that can be had one way at a time.

Seeds are fixed, so every test is deterministic. With other seeds a correct engine is stopped in under 1 % of runs; the
planted faults here are gross, and found with a power of practically one at this budget too.
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from equivtest.engines.base import Capabilities, EngineOptions, ServerOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import ArmsToCome, InvalidSetting, RequestFailed, RunMismatch
from equivtest.faults import get_fault
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.gate import read_verdict
from equivtest.pipeline.manifest import Manifest, Status
from equivtest.pipeline.run import RunOptions, RunResult, reanalyse, run
from equivtest.protocol.budgets import BUDGETS, Budget
from equivtest.protocol.plan import LIKELIEST_TOKEN
from equivtest.records import SPEC, Request, SamplingParams, Word
from tests.engines.fake_server import FakeServer, draw_by_position
from tests.pipeline.fake_engine import FakeEngine

OFF, ON = draw_by_position(), draw_by_position(speculative=True)
SMALL = Budget(name="small", num_prompts=2, num_positions=8, num_seeds=48, epsilon=0.5, bias_margin=0.2, pit_margin=0.2)
KEY = "sk-never-written"


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """A budget of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUDGETS, SMALL.name, SMALL)
        yield


def gate(run_dir: Path, engine: EngineOptions | FakeEngine, *, resume: bool = False, **options: Any) -> RunResult:
    judging = AnalysisOptions(**options.pop("judging", {}))
    external = isinstance(engine, FakeEngine)
    return run(
        RunOptions(
            budget="small", engine=EngineOptions() if external else engine, analysis=judging, run_dir=run_dir,
            resume=resume, **options,
        ),
        engine=engine if external else None,
    )  # fmt: skip


def server(off: FakeServer | None, on: FakeServer | None, **changes: Any) -> EngineOptions:
    options = {"tokenizer": "tiny", "choices": 16, "backoff_s": 0.001, **changes}
    return EngineOptions(
        engine="openai", model="smollm2-135m" if options["tokenizer"] else "tiny",
        server=ServerOptions(spec_off=off and off.url, spec_on=on and on.url, **options),
    )  # fmt: skip


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(OFF, key=KEY) as off, FakeServer(ON, key=KEY) as on:
        yield off, on


@pytest.fixture(scope="module")
def correct(tmp_path_factory: pytest.TempPathFactory, servers: tuple[FakeServer, FakeServer]) -> RunResult:
    return gate(tmp_path_factory.mktemp("correct") / "run", server(*servers, api_key=KEY))


def test_a_correct_server_is_equivalent_and_its_teeth_are_planted_in_the_recordings(correct: RunResult) -> None:
    verdict = correct.analysis.verdict
    assert verdict.word is Word.EQUIVALENT
    assert "a planted bias of 0.50 towards the likeliest token was detected" in verdict.headline
    assert all(control.passed for control in verdict.controls)
    assert {line.family for line in correct.analysis.evidence} == {"marginal", "joint"}
    assert "that the on arm speculated is taken on trust" in "\n".join(verdict.reasons)
    assert Manifest.read(correct.run_dir).protocol["planted"] == LIKELIEST_TOKEN


def test_a_report_of_it_is_recomputed_to_the_same_bytes(page: None, correct: RunResult) -> None:
    outputs = ("cells.parquet", "evidence.parquet", "verdict.json", "report.html", "summary.md", "junit.xml")
    before = {name: (correct.run_dir / name).read_bytes() for name in outputs}
    reanalyse(correct.run_dir)
    assert {name: (correct.run_dir / name).read_bytes() for name in outputs} == before
    assert read_verdict(correct.run_dir).word is Word.EQUIVALENT


def test_the_key_is_in_no_file_of_a_run(correct: RunResult) -> None:
    for path in correct.run_dir.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()


def test_a_run_of_a_server_that_fails_goes_on_to_the_same_samples(tmp_path: Path, correct: RunResult) -> None:
    """Arm off is there, then every answer is a 500: the run is invalid, and resumed against servers that work."""
    named = r"arm on, config topp95, prompt \S+, seed \d+ to arm on, .*HTTP 500"
    broken = FakeServer(ON, troubles=["500"], forever=True, after=7)
    with FakeServer(OFF) as off, broken as on, pytest.raises(RequestFailed, match=named):
        gate(tmp_path / "run", server(off, on, retries=1))
    assert Manifest.read(tmp_path / "run").status is Status.ERROR
    assert read_verdict(tmp_path / "run").word is Word.INVALID
    with FakeServer(OFF) as off, FakeServer(ON) as on:
        result = gate(tmp_path / "run", server(off, on, retries=1), resume=True)
        assert not any(body["max_tokens"] == SMALL.num_positions for body in off.bodies)  # nothing twice
    assert result.analysis.verdict.word is Word.EQUIVALENT
    for name in ("cells.parquet", "verdict.json"):
        assert (tmp_path / "run" / name).read_bytes() == (correct.run_dir / name).read_bytes()


def test_one_server_before_and_after_its_restart_is_as_good_as_two(tmp_path: Path, correct: RunResult) -> None:
    run_dir = tmp_path / "run"
    with FakeServer(OFF) as plain, pytest.raises(ArmsToCome, match=r"on, on_null, biased .* with speculation") as waits:
        gate(run_dir, server(plain, None))
    assert waits.value.exit_code == 3
    assert read_verdict(run_dir).word is Word.INVALID
    assert {path.name for path in (run_dir / "samples").iterdir()} == {"arm=off"}
    with FakeServer(ON) as speculative:
        result = gate(run_dir, server(None, speculative), resume=True)
    assert result.analysis.verdict.word is Word.EQUIVALENT
    assert (run_dir / "cells.parquet").read_bytes() == (correct.run_dir / "cells.parquet").read_bytes()


def test_a_server_that_accepts_too_often_is_different_once_both_servers_gave_fresh_seeds(tmp_path: Path) -> None:
    """Each sitting gives the samples of its own server, and the last one decides."""
    wrong = draw_by_position(speculative=True, epsilon=0.4)
    with FakeServer(OFF) as plain, pytest.raises(ArmsToCome):
        gate(tmp_path / "run", server(plain, None))
    with FakeServer(wrong) as speculative, pytest.raises(ArmsToCome, match=r"samples of off .* without speculation"):
        gate(tmp_path / "run", server(None, speculative), resume=True)
    with FakeServer(OFF) as plain:
        verdict = gate(tmp_path / "run", server(plain, None), resume=True).analysis.verdict
    assert verdict.word is Word.DIFFERENT
    assert "again on 192 fresh samples an arm" in "\n".join(verdict.reasons)


class DecoderDraw:
    """The tiny model behind a server; `fault` is on its speculative path."""

    def __init__(self, engine: DecoderEngine, *, speculative: bool, epsilon: float = 0.0) -> None:
        self.engine = engine
        self.speculative, self.epsilon = speculative, epsilon
        self._lock, self._ready = threading.Lock(), dict[tuple[int, ...], list[list[int]]]()

    def __call__(self, prompt: Sequence[int], body: Mapping[str, Any], index: int) -> list[int]:
        """All choices of a request are decoded with its first."""
        name = (body["seed"], body["max_tokens"], *prompt)
        if index == 0:
            params = SamplingParams(temperature=body["temperature"], top_p=body["top_p"], top_k=body["top_k"])
            requests = [
                Request(
                    prompt_token_ids=tuple(prompt), params=params, stream_key=body["seed"] + (number << 32),
                    max_tokens=body["max_tokens"],
                )
                for number in range(body["n"])
            ]  # fmt: skip
            fault = get_fault("inflated_acceptance", epsilon=self.epsilon) if self.epsilon else None
            made = self.engine.generate(requests, speculative=self.speculative, fault=fault)
            self._ready[name] = [generation.token_ids.tolist() for generation in made]
        return self._ready[name][index]


def test_a_server_whose_weights_are_here_is_held_against_their_law(tmp_path: Path) -> None:
    """The tiny model served: correct, and accepting too often by .4, which the law sees without knowing the drafts."""
    tiny = DecoderEngine.open(EngineOptions(model="tiny", dtype="float32", draft_len=3))
    plain, exact = (DecoderDraw(tiny, speculative=speculative) for speculative in (False, True))
    with FakeServer(plain) as off, FakeServer(exact) as on:
        right = gate(tmp_path / "right", server(off, on, tokenizer=None, choices=48)).analysis
    assert right.verdict.word is Word.EQUIVALENT
    assert {interval.place.test for interval in right.verdict.intervals} == {"rank", "vocab"}
    assert {line.stratum for line in right.evidence if line.family == "law"} == {
        "off / topp95", "on / topp95", "on_null / topp95", "on minus off / topp95",
    }  # fmt: skip
    assert read_verdict(tmp_path / "right").word is Word.EQUIVALENT
    with FakeServer(plain) as off, FakeServer(DecoderDraw(tiny, speculative=True, epsilon=0.4)) as on:
        served = server(off, on, tokenizer=None, choices=48)
        wrong = gate(tmp_path / "wrong", served, judging={"confirm": False}).analysis.verdict
    assert wrong.word is Word.DIFFERENT
    [law] = [f for f in wrong.findings if (f.family, f.subject) == ("law", "on against the target's law")]
    assert law.flagged


def test_an_engine_that_takes_no_faults_is_asked_for_none(tmp_path: Path) -> None:
    class Strict(FakeEngine):
        def generate(self, requests: Sequence[Request], *, fault: object = None, **kwargs: Any):
            assert fault is None
            assert not requests[0].label.startswith("arm biased")
            return super().generate(requests, **kwargs)

    engine = Strict(capabilities=Capabilities(), notes={"drafts": "the engine has something to say"})
    result = gate(tmp_path / "right", engine)
    verdict = result.analysis.verdict
    assert verdict.word is Word.EQUIVALENT
    assert "the engine has something to say" in verdict.reasons
    # What follows a planted token was not written after it: no law is asked of it.
    assert not list((tmp_path / "right" / "law").glob("arm=biased"))
    assert verdict.controls[1].passed
    with pytest.raises(InvalidSetting, match="no fault can be put into this engine"):
        gate(tmp_path / "named", Strict(capabilities=Capabilities()), planted="inflated_acceptance")


def test_a_bias_in_the_recordings_that_is_too_small_to_be_seen_shows_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(has_law=False)  # one that faults could be put into
    missed = gate(tmp_path / "run", engine, planted=LIKELIEST_TOKEN, epsilon=0.01).analysis.verdict
    assert missed.word is Word.INVALID
    assert "the planted bias of 0.01 towards the likeliest token was missed" in missed.headline


def test_a_config_that_the_engine_cannot_decode_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    class Picky(FakeEngine):
        def refusal(self, params: SamplingParams) -> str | None:
            return "has no top_k" if params.top_k else None

    engine = Picky()
    with pytest.raises(InvalidSetting, match="config = 'topk50': has no top_k"):
        gate(tmp_path / "run", engine, configs=("topp95", "topk50"))
    assert engine.num_calls == 0


@pytest.mark.parametrize(("capabilities", "checks"), [({"exact": True}, {"greedy"}), ({"replays": True}, {"replay"})])
def test_only_what_an_engine_promises_is_checked(
    tmp_path: Path, capabilities: dict[str, bool], checks: set[str]
) -> None:
    class Ends(FakeEngine):
        def generate(self, requests: Sequence[Request], **kwargs: Any):
            if requests[0].label:  # a sample of the run, after the checks
                raise RuntimeError(requests[0].label)
            return super().generate(requests, **kwargs)

    with pytest.raises(RuntimeError, match="arm off, config topp95"):
        gate(tmp_path / "run", Ends(capabilities=Capabilities(takes_faults=True, **capabilities)))
    lines = json.loads((tmp_path / "run" / "identity.json").read_text())["topp95"]
    assert {line["name"] for line in lines} == checks


def test_a_run_is_not_resumed_against_a_server_that_answers_otherwise(tmp_path: Path) -> None:
    with FakeServer(OFF) as plain, pytest.raises(ArmsToCome):
        gate(tmp_path / "run", server(plain, None))
    with FakeServer(ON, tells_ids=False) as silent, pytest.raises(RunMismatch):
        gate(tmp_path / "run", server(None, silent), resume=True)


def test_what_is_planted_is_recorded_as_it_is(correct: RunResult) -> None:
    import pyarrow.parquet as pq

    planted = pq.read_table(next((correct.run_dir / "samples" / "arm=biased").rglob("*.parquet")))
    assert set(planted.column("origin").to_pylist()) == {"unknown"}
    assert set(planted.column("route").to_pylist()) == {str(SPEC)}
