"""The built-in decoder behind the engine protocol."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.weights import Checkpoint
from equivtest.engines.base import Engine, EngineOptions
from equivtest.engines.decoder import DecoderEngine, require_attention, require_same_vocabulary
from equivtest.errors import InvalidSetting, KernelUnavailable, ModelUnavailable, UnknownName, UnsupportedModel
from equivtest.faults import get_fault
from equivtest.kernels.registry import get_backend
from equivtest.records import Origin, Request, SamplingParams
from tests.decoder.incapable_backend import IncapableBackend

MESSAGES = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> DecoderEngine:
    options = EngineOptions(
        model=str(smollm2_path), dtype="float32", kernels="cpp", drafter="early_exit", draft_len=3,
        early_exit_layers=24, max_batch=8,
    )  # fmt: skip
    return DecoderEngine.open(options)


def requests(engine: Engine, count: int, **changes: Any) -> list[Request]:
    prompt = engine.encode_prompt(MESSAGES)
    params = SamplingParams(temperature=0.8, top_p=0.95)
    request = Request(prompt_token_ids=prompt, params=params, stream_key=0, max_tokens=6)
    return [dataclasses.replace(request, stream_key=key, **changes) for key in range(count)]


def test_it_generates_with_and_without_speculation(engine: Engine) -> None:
    heard: list[int] = []
    off = engine.generate(requests(engine, 4), speculative=False, on_tokens=heard.append)
    on = engine.generate(requests(engine, 4), speculative=True)
    assert sum(heard) == 4 * 6
    assert {origin for g in off for origin in g.origins} == {Origin.PLAIN}
    assert any(Origin.ACCEPTED in g.origins for g in on)
    assert max(int(g.num_drafts.max()) for g in on) == 3


def test_a_fault_reaches_the_decoder_for_one_call_only(engine: Engine) -> None:
    greedy = requests(engine, 4, params=SamplingParams(temperature=0.0))
    fault = get_fault("inflated_acceptance", epsilon=1.0)
    before, faulty, after = (
        [g.token_ids.tolist() for g in engine.generate(greedy, speculative=True, fault=f)] for f in (None, fault, None)
    )
    assert before == after != faulty


def test_the_models_own_end_of_text_stops_a_request_and_its_scorer_knows(engine: DecoderEngine) -> None:
    """The answer to a chat, greedy: <|im_end|> after a few words."""
    params = SamplingParams(temperature=0.0, ignore_eos=False)
    prompt = engine.encode_prompt([{"role": "user", "content": "What is the capital of France?"}])
    asked = requests(engine, 1, params=params, prompt_token_ids=prompt, max_tokens=24)
    off, on = (engine.generate(asked, speculative=speculative)[0].token_ids.tolist() for speculative in (False, True))
    assert on == off
    assert len(on) < 24
    assert engine.token_text(on[-1]) == "<|im_end|>"
    whole = [*on, *on[-1:] * (24 - len(on))]
    samples = FinishedSamples(
        prompt_token_ids=prompt,
        params=params,
        token_ids=np.array([whole]),
        draft_token_ids=np.full((1, 24), -1),
        slots=np.full((1, 24), -1),
        stream_keys=np.array([asked[0].stream_key]),
    )
    assert (engine.scorer().score(samples).p_token == 1).all()


def test_it_describes_itself_in_values_that_json_can_hold(engine: Engine, smollm2_checkpoint: Checkpoint) -> None:
    description = engine.describe()
    assert json.loads(json.dumps(description)) == description
    expected = {
        "model_sha256": smollm2_checkpoint.sha256,
        "architecture": "llama",
        "eos_token_ids": list(smollm2_checkpoint.tokenizer.eos_token_ids),
        "dtype": "float32",
        "device": "cpu",
        "kernels": "cpp",
        "drafter": "early_exit",
        "drafter_parameters": {"num_layers": 24, "model_layers": 30},
        "draft_len": 3,
        "acceptance": "chain",
        "torch": torch.__version__,
    }
    assert {key: description[key] for key in expected} == expected


def test_a_prompt_is_encoded_for_an_answer_and_shown_as_text(engine: Engine) -> None:
    text = "".join(engine.token_text(token) for token in engine.encode_prompt(MESSAGES))
    assert "Name a colour." in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("dtype", "float16"), ("draft_len", 0), ("max_batch", 0), ("threads", 0)],
)
def test_options_out_of_range_are_refused(setting: str, value: object) -> None:
    with pytest.raises(InvalidSetting, match=setting):
        EngineOptions(**cast("Any", {"model": "smollm2-135m", setting: value}))


def test_unknown_names_are_refused(smollm2_path: Path) -> None:
    options = EngineOptions(model=str(smollm2_path), kernels="cpp", dtype="bfloat16")
    for change, error in (
        ({"kernels": "gpu"}, UnknownName),
        ({"drafter": "oracle"}, UnknownName),
        ({"acceptance": "typical"}, UnknownName),
        ({"drafter": "model"}, InvalidSetting),
        ({"model": str(smollm2_path.with_name("nothing.gguf"))}, ModelUnavailable),
    ):
        with pytest.raises(error):
            DecoderEngine.open(dataclasses.replace(options, **cast("Any", change)))


@pytest.mark.parametrize(
    ("kernels", "refused", "lines"),
    [
        ("auto", {"cpp": "no compiler"}, ["kernels: reference; cpp is not available: no compiler"]),
        ("auto", {}, ["kernels: reference"]),
        ("reference", {}, []),
    ],
)
def test_the_backend_that_auto_chose_is_said_before_the_model_is_fetched(
    kernels: str, refused: dict[str, str], lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equivtest.engines.decoder.resolve_auto", lambda device: ("reference", refused))
    options = EngineOptions(model=str(tmp_path / "nothing.gguf"), kernels=kernels, drafter="ngram")
    heard: list[str] = []
    with pytest.raises(ModelUnavailable):
        DecoderEngine.open(options, on_message=heard.append)
    assert heard == lines


def test_the_draft_model_must_give_every_id_the_same_text(smollm2_checkpoint: Checkpoint) -> None:
    require_same_vocabulary("itself", smollm2_checkpoint, smollm2_checkpoint)
    shifted = SimpleNamespace(vocab_size=100, token_text=lambda token_id: f"other {token_id}")
    other = dataclasses.replace(smollm2_checkpoint, tokenizer=cast("Any", shifted))
    with pytest.raises(UnsupportedModel, match=r"small: a draft model must share .* token 0 is 'other 0'"):
        require_same_vocabulary("small", other, smollm2_checkpoint)
    config = dataclasses.replace(smollm2_checkpoint.config, vocab_size=100)
    with pytest.raises(UnsupportedModel, match="100 tokens"):
        require_same_vocabulary("small", dataclasses.replace(smollm2_checkpoint, config=config), smollm2_checkpoint)


def test_a_device_that_is_not_there_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidSetting, match=r"device = 'cuda': .* take device cpu"):
        DecoderEngine.open(EngineOptions(model=str(tmp_path / "nothing.gguf"), device="cuda"))
    with pytest.raises(InvalidSetting, match="cpu, cuda"):
        EngineOptions(device="tpu")


def test_on_a_gpu_auto_says_why_it_is_not_cuda_and_the_processors_kernels_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "equivtest.engines.decoder.resolve_auto", lambda device: ("reference", {device: "there is no nvcc here"})
    )
    options = EngineOptions(model=str(tmp_path / "nothing.gguf"), device="cuda", dtype="float32", drafter="ngram")
    heard: list[str] = []
    with pytest.raises(ModelUnavailable):
        DecoderEngine.open(options, on_message=heard.append)
    assert heard == ["kernels: reference; cuda is not available: there is no nvcc here"]
    with pytest.raises(KernelUnavailable, match="it runs on cpu only, not on cuda"):
        DecoderEngine.open(dataclasses.replace(options, kernels="cpp"))


def test_a_dtype_that_the_kernels_do_not_attend_in_is_refused_before_the_model_is_read() -> None:
    narrow = IncapableBackend(get_backend("reference"))
    with pytest.raises(InvalidSetting, match="kernels incapable attend in bfloat16 only"):
        require_attention(narrow, torch.float32)
    require_attention(narrow, torch.bfloat16)
    require_attention(get_backend("reference"), torch.float32)


def test_its_scorer_scores_what_it_generated(engine: DecoderEngine) -> None:
    asked = requests(engine, 3)
    generations = engine.generate(asked, speculative=True)
    samples = FinishedSamples(
        prompt_token_ids=asked[0].prompt_token_ids,
        params=asked[0].params,
        token_ids=np.stack([g.token_ids for g in generations]),
        draft_token_ids=np.stack([g.draft_token_ids for g in generations]),
        slots=np.stack([g.slots for g in generations]),
        stream_keys=np.array([r.stream_key for r in asked]),
    )
    law = engine.scorer().score(samples)
    assert not law.support_violation.any()
    assert law.has_draft.any()
    assert engine.scorer() is engine.scorer()


@pytest.mark.parametrize("change", [{"drafter": "early_exit"}, {"acceptance": "match"}], ids=str)
def test_drawn_drafts_ask_for_a_block_drafter_and_the_chain_rule(change: dict[str, str]) -> None:
    assert EngineOptions(drafts="drawn").settled("dflash").drafts == "drawn"
    with pytest.raises(InvalidSetting, match="goes with the dflash drafter and the chain rule"):
        EngineOptions(drafts="drawn", **change)  # type: ignore[arg-type]


def test_layers_of_an_early_exit_ask_for_that_drafter() -> None:
    assert EngineOptions(early_exit_layers=20).settled("dflash").drafter == "early_exit"
    assert EngineOptions().settled("dflash").drafter == "dflash"
