"""The models that ship with the package: real laws, small enough for a whole catalogue of faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from equivtest.bench.tiny_model import SHAPES, make
from equivtest.bench.tiny_prompts import prompts
from equivtest.bench.tiny_text import Chat, ended
from equivtest.bench.tiny_training import Shape
from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.weights import load_checkpoint
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.kernels.registry import get_backend
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Generation, LawColumns, Origin, Request, SamplingParams
from tests.decoder.dflash_drafters import features_of

LAW = SamplingParams(temperature=0.8, top_p=0.95)
NUM_SEEDS, NUM_POSITIONS = 32, 32
END = 2
DRAFT_MODELS = {"early_exit": None, "ngram": None, "model": "tiny-draft"}


def open_engine(drafter: str) -> DecoderEngine:
    return DecoderEngine.open(
        EngineOptions(
            model="tiny", dtype="float32", kernels="cpp", drafter=drafter, draft_model=DRAFT_MODELS[drafter], threads=1
        )
    )


def requests(engine: DecoderEngine, params: SamplingParams, num_seeds: int) -> list[list[Request]]:
    """By built-in prompt: one request a seed."""
    return [
        [
            Request(prompt_token_ids=ids, params=params, stream_key=1000 * number + seed, max_tokens=NUM_POSITIONS)
            for seed in range(num_seeds)
        ]
        for number, prompt in enumerate(load_prompt_set("default").prompts)
        for ids in [engine.encode_prompt(prompt.conversation)]
    ]


def score(engine: DecoderEngine, asked: Sequence[Request], spoken: Sequence[Generation]) -> LawColumns:
    return engine.scorer().score(
        FinishedSamples(
            prompt_token_ids=asked[0].prompt_token_ids,
            params=LAW,
            token_ids=np.stack([g.token_ids for g in spoken]).astype(np.int64),
            draft_token_ids=np.stack([g.draft_token_ids for g in spoken]).astype(np.int64),
            slots=np.stack([g.slots for g in spoken]),
            stream_keys=np.array([request.stream_key for request in asked]),
        )
    )


class Spoken:
    """What a drafter's pair says to the built-in prompts under `LAW`."""

    def __init__(self, drafter: str) -> None:
        engine = open_engine(drafter)
        asked = requests(engine, LAW, NUM_SEEDS)
        generations = [engine.generate(one, speculative=True) for one in asked]
        columns = [score(engine, one, spoken) for one, spoken in zip(asked, generations, strict=True)]
        self.entropy = float(np.mean([column.entropy for column in columns]))
        self.p_draft = float(np.concatenate([column.p_draft[column.has_draft] for column in columns]).mean())
        flat = [generation for spoken in generations for generation in spoken]
        judged = np.concatenate([g.draft_token_ids >= 0 for g in flat])
        accepted = np.concatenate([[origin is Origin.ACCEPTED for origin in g.origins] for g in flat])
        self.acceptance = float(accepted[judged].mean())
        self.ended = float(np.mean([END in g.token_ids for g in flat]))


@pytest.fixture(scope="module")
def by_early_exit() -> Spoken:
    return Spoken("early_exit")


@pytest.mark.parametrize(("name", "most_bytes"), [("tiny", 1_800_000), ("tiny-draft", 400_000)])
def test_a_shipped_model_is_found_by_name_and_is_small(name: str, most_bytes: int) -> None:
    checkpoint = load_checkpoint(resolve_model(name))
    shape = SHAPES[name]
    assert checkpoint.config.vocab_size == checkpoint.tokenizer.vocab_size == 1024
    assert (checkpoint.config.num_layers, checkpoint.config.hidden_size) == (shape.num_layers, shape.hidden_size)
    assert {weight.dtype for weight in checkpoint.weights.values()} == {torch.bfloat16}
    assert sum(file.stat().st_size for file in checkpoint.path.iterdir()) < most_bytes + 100_000
    assert checkpoint.tokenizer.token_text(END) == "<|im_end|>"


def test_the_record_of_a_run_names_the_pair_and_its_weights() -> None:
    described = open_engine("model").describe()
    assert described["model"] == "tiny"
    assert described["model_sha256"] == load_checkpoint(resolve_model("tiny")).sha256
    assert described["drafter_parameters"]["draft_model"] == "tiny-draft"


def test_both_models_have_the_same_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (resolve_model("tiny") / file).read_bytes() == (resolve_model("tiny-draft") / file).read_bytes()


@pytest.mark.parametrize("name", ["tiny", "tiny-draft"])
def test_prompts_and_logits_are_those_of_transformers(name: str) -> None:
    folder = resolve_model(name)
    checkpoint = load_checkpoint(folder)
    messages = [{"role": "user", "content": "Où est la gare? 17 - 3 = 14."}]
    ids = checkpoint.tokenizer.encode_chat(messages)
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    assert ids == rendered["input_ids"]
    ids += checkpoint.tokenizer.encode("The sun is a star, and the sea is a mirror.<|im_end|>")
    model = Model(checkpoint.config, checkpoint.weights, get_backend("cpp"), dtype=torch.float32)
    kv = PagedKVCache(model.config, num_pages=64, max_sequences=1, dtype=torch.float32)
    batch = kv.extend(np.array([kv.new_sequence()]), np.array([len(ids)]))
    ours = model.logits(model.forward(torch.tensor(ids), batch, kv))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    assert float((ours - theirs).abs().max()) < 1e-3
    assert float(theirs.std()) > 0.5


def test_features_are_the_residual_streams_after_those_layers() -> None:
    """Layer i is entry i + 1 of transformers' hidden states, whose first is the embedding."""
    folder = resolve_model("tiny")
    checkpoint = load_checkpoint(folder)
    model = Model(checkpoint.config, checkpoint.weights, get_backend("cpp"))
    ids = checkpoint.tokenizer.encode("The sun is a star, and the sea is a mirror.")
    ours = features_of(model, ids, (2, 0))
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
    torch.testing.assert_close(ours, torch.cat([theirs[3][0], theirs[1][0]], dim=1), atol=1e-4, rtol=1e-3)
    assert float((ours - torch.cat([theirs[2][0], theirs[0][0]], dim=1)).abs().max()) > 0.1


def test_the_law_is_lively(by_early_exit: Spoken) -> None:
    assert 1.0 < by_early_exit.entropy < 2.5


def test_a_text_ends_its_turn_now_and_then(by_early_exit: Spoken) -> None:
    assert 0.02 < by_early_exit.ended < 0.8


def test_the_early_exit_is_right_about_half_of_the_time(by_early_exit: Spoken) -> None:
    assert 0.4 < by_early_exit.p_draft < 0.7
    assert 0.4 < by_early_exit.acceptance < 0.7


def test_the_draft_model_is_worth_listening_to() -> None:
    assert 0.35 < Spoken("model").acceptance < 0.9


@pytest.mark.parametrize("drafter", DRAFT_MODELS)
def test_greedy_text_is_the_same_with_and_without_speculation(drafter: str) -> None:
    engine = open_engine(drafter)
    asked = [request for one in requests(engine, SamplingParams(temperature=0.0), 1) for request in one]
    off, on = (engine.generate(asked, speculative=speculative) for speculative in (False, True))
    assert [g.token_ids.tolist() for g in on] == [g.token_ids.tolist() for g in off]
    assert any(Origin.ACCEPTED in g.origins for g in on)


def test_the_recipe_makes_the_same_files_twice(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    chats = [Chat(question, f"You ask me this: {question[::-1]}") for question in prompts(3)]
    lines: list[str] = []
    shape = Shape(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=32, num_steps=3, exit_weight=0.3
    )
    text.write_text(
        "".join(f'{{"question": {json.dumps(chat.question)}, "answer": {json.dumps(chat.answer)}}}\n' for chat in chats)
    )
    for run in ("a", "b"):
        make(tmp_path / run, {"m": shape}, seed=1, text=text, tell=lines.append)
    first, second = ({file.name: file.read_bytes() for file in (tmp_path / run / "m").iterdir()} for run in ("a", "b"))
    assert first == second
    assert load_checkpoint(tmp_path / "a" / "m").tokenizer.vocab_size == 1024
    assert any("held-out loss" in line for line in lines)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris.<|im_end|>\n<|im_start|>user", "Paris."),
        ("No end<|im_end|>", "No end"),
        ("One. Two! And thr", "One. Two!"),
        ("1. A\n2. B\n3", "1. A\n2. B"),
        ("pi is 3.14 and", ""),
    ],
)
def test_an_answer_that_is_cut_off_ends_with_its_last_whole_sentence(answer: str, expected: str) -> None:
    assert ended(answer) == expected
