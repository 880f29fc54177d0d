"""OpenVINO as an engine, on a stand-in for its package: what it is asked, and what becomes of a wrong answer."""

import builtins
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from equivtest.engines import registry
from equivtest.engines.base import EngineOptions
from equivtest.engines.openvino_engine import OpenvinoEngine
from equivtest.engines.registry import open_engine
from equivtest.errors import EngineUnavailable, InvalidSetting, RequestFailed, UnknownName, UnsupportedModel
from equivtest.protocol.configs import CONFIGS
from equivtest.records import Generation, Origin, Request, SamplingParams
from tests.engines.fake_openvino import FakeOpenvino


@pytest.fixture
def put_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(trouble: str | None = None) -> FakeOpenvino:
        fake = FakeOpenvino(trouble)
        for name in ("openvino", "openvino_genai"):
            monkeypatch.setitem(sys.modules, name, fake)
        monkeypatch.setattr(registry, "installed_version", lambda name: "2026.4.0")
        return fake

    return put


def open_openvino(**options: Any) -> OpenvinoEngine:
    engine = open_engine(EngineOptions(engine="openvino", **{"model": "tiny", "drafter": "ngram", **options}))
    assert isinstance(engine, OpenvinoEngine)
    return engine


def requests(count: int, **changes: Any) -> list[Request]:
    params = changes.pop("params", CONFIGS["topp95"])
    return [
        Request(prompt_token_ids=(5, 6, 7), params=params, stream_key=key, max_tokens=6, label=f"seed {key}", **changes)
        for key in range(count)
    ]


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids.tolist() for generation in generations]


def test_every_request_has_its_own_seed_prompt_and_law_in_both_ways(put_in: Any) -> None:
    fake = put_in()
    engine, heard = open_openvino(draft_len=3, max_batch=4), []
    for speculative, origin in ((False, Origin.PLAIN), (True, Origin.UNKNOWN)):
        made = engine.generate(requests(6), speculative=speculative, on_tokens=heard.append)
        assert len({tuple(text) for text in tokens(made)}) == 6
        assert {o for one in made for o in one.origins} == {origin}
        assert [one.batch_rows[0] for one in made] == list(range(6))
    assert heard == [24, 12] * 2
    assert fake.prompts == [[5, 6, 7]] * 12
    assert [config.rng_seed for config in fake.configs] == list(range(6)) * 2
    plain, assisted = fake.configs[0], fake.configs[-1]
    assert (plain.temperature, plain.top_p, plain.min_p, plain.top_k) == (0.8, 0.95, 0.0, 2**64 - 1)
    assert (assisted.num_assistant_tokens, assisted.max_ngram_size) == (3, 3)
    assert plain.ignore_eos
    assert engine.notes() == {"drafts": "OpenVINO says that it accepted 8 of 20 drafts"}


def test_a_sample_depends_on_its_own_stream_alone(put_in: Any) -> None:
    put_in()
    engine = open_openvino()
    together = tokens(engine.generate(requests(4), speculative=True))
    assert [tokens(engine.generate([one], speculative=True))[0] for one in requests(4)] == together
    (large,) = requests(1, seed=2**40 + 3)
    assert tokens(engine.generate([large], speculative=False))[0] == together[3]


def test_the_model_is_compiled_once_a_way_without_rounding_to_8_bits(put_in: Any) -> None:
    fake = put_in()
    open_openvino(threads=1)
    exact = {
        "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": 1,
    }  # fmt: skip
    assert fake.properties == [exact, exact | {"prompt_lookup": True}]
    half = open_openvino(dtype="bfloat16")
    assert fake.properties[-1]["INFERENCE_PRECISION_HINT"] == "bf16"
    assert not half.capabilities.exact


def test_a_draft_model_in_a_gguf_file_is_unpacked_for_openvino(put_in: Any, tmp_path: Path) -> None:
    fake = put_in()
    file = tmp_path / "draft.gguf"
    file.write_bytes(b"GGUF")
    engine = open_openvino(drafter="model", draft_model=str(file))
    assert fake.unpacked == ["draft.gguf"]
    kind, properties = fake.properties[-1]["draft_model"]
    assert (kind, properties["KV_CACHE_PRECISION"]) == ("draft", "f32")
    engine.generate(requests(1), speculative=True)
    assert fake.configs[-1].max_ngram_size == 0
    assert str(tmp_path) not in str(engine.describe())


def test_texts_end_where_the_request_says(put_in: Any) -> None:
    fake = put_in()
    engine = open_openvino()
    ending = SamplingParams(temperature=0.8, stop_token_ids=(0, 1), ignore_eos=False)  # the model's own is 2
    made = tokens(engine.generate(requests(20, params=ending), speculative=True))
    assert any(len(text) < 6 for text in made)
    assert all(text[-1] in (0, 1, 2) for text in made if len(text) < 6)
    assert fake.configs[-1].stop_token_ids == {0, 1, 2}


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("stops", r"seed 0 to seed 2: OpenVINO stopped: out of memory"),
        ("lost", r"seed 0 to seed 2: 2 results for 3 requests"),
        ("two texts", r"seed 0: 2 texts for one request"),
        ("short", r"seed 0: 5 tokens where 6 were asked for"),
        ("long", r"seed 0: 7 tokens where 6 were asked for"),
        ("empty", r"seed 0: 0 tokens where 6 were asked for"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_the_request(put_in: Any, trouble: str, says: str) -> None:
    put_in(trouble)
    engine = open_openvino()
    with pytest.raises(RequestFailed, match=says) as error:
        engine.generate(requests(3), speculative=True)
    assert "/build/" not in str(error.value)
    assert error.value.exit_code == 4


def test_what_openvino_cannot_do_is_refused(put_in: Any) -> None:
    put_in()
    engine = open_openvino()
    for config in ("topp95", "topk50", "topk20p90", "greedy", "minp05", "stops"):
        assert engine.refusal(CONFIGS[config]) is None
    assert "no logit bias" in str(engine.refusal(CONFIGS["logitbias"]))
    assert "another law" in str(engine.refusal(CONFIGS["penalties"]))
    with pytest.raises(InvalidSetting, match="no fault"):
        engine.generate(requests(1), speculative=True, fault=lambda stages: stages)
    assert open_openvino(drafter="auto").describe()["drafter"] == "ngram"
    with pytest.raises(UnknownName, match="model, ngram"):
        open_openvino(drafter="early_exit")
    with pytest.raises(InvalidSetting, match="needs a draft model"):
        open_openvino(drafter="model")
    with pytest.raises(InvalidSetting, match="device = 'cuda': is no option of the engine openvino"):
        open_openvino(device="cuda")
    put_in("compile")
    with pytest.raises(UnsupportedModel, match="OpenVINO cannot compile it: unsupported architecture"):
        open_openvino()


def test_parts_of_other_releases_are_named(put_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in()
    monkeypatch.delitem(sys.modules, "openvino_genai")
    found = builtins.__import__

    def missing(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("openvino"):
            message = "libopenvino.so.2640: cannot open shared object file"
            raise ImportError(message)
        return found(name, *arguments, **named)

    monkeypatch.setattr("equivtest.engines.openvino_engine.import_module", missing)
    with pytest.raises(EngineUnavailable, match=r"libopenvino.so.2640.*must be of one release"):
        open_openvino()


def test_the_gate_passes_the_stand_in_and_samples_of_one_seed_are_found(
    put_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a law: the stand-in has one of its own. With other seeds a correct one is stopped in at most 20 % of
    runs, because nothing is looked at again; one seed for all samples is found with certainty."""
    from equivtest.pipeline.analysis_options import AnalysisOptions
    from equivtest.pipeline.run import RunOptions, run
    from equivtest.protocol.budgets import BUDGETS, Budget
    from equivtest.records import Word

    budget = Budget(name="small", num_prompts=2, num_positions=6, num_seeds=32, epsilon=0.9)
    monkeypatch.setitem(BUDGETS, budget.name, budget)
    options = RunOptions(
        configs=("topk50",), budget="small", engine=EngineOptions(), run_dir=tmp_path / "right",
        analysis=AnalysisOptions(confirm=False, law=False),
    )  # fmt: skip
    put_in()
    right = run(options, engine=open_openvino()).analysis.verdict
    assert right.word is Word.EQUIVALENT
    put_in("one seed")
    wrong = run(dataclasses.replace(options, run_dir=tmp_path / "wrong"), engine=open_openvino()).analysis.verdict
    assert wrong.word is not Word.EQUIVALENT
