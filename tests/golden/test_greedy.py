"""Greedy text against Hugging Face transformers on the same weights, plain and speculative.

Reference: transformers in float32, in this process: `generate(do_sample=False)` for the small models, and for the large
one its likeliest token after every prefix of the text, which is the same thing in one forward.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import GenerationConfig

from equivtest.decoder.drafters.registry import DrafterContext, make_drafter
from equivtest.decoder.executor import Executor
from equivtest.decoder.model import Model
from equivtest.decoder.transformers_model import transformers_model
from equivtest.kernels.registry import get_backend
from equivtest.records import Origin, Request, SamplingParams
from equivtest.resources import resource_dir
from tests.decoder.scenarios import random_prompts, texts
from tests.decoder.tiny_models import tiny_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from equivtest.decoder.weights import Checkpoint

NUM_TOKENS = 32


def greedy_requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    params = SamplingParams(temperature=0.0)
    return [Request(prompt_token_ids=p, params=params, stream_key=0, max_tokens=NUM_TOKENS) for p in prompts]


def transformers_texts(model: PreTrainedModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy continuations of exactly NUM_TOKENS tokens, end-of-text or not; one left-padded batch."""
    model.generation_config = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    continuations: list[list[int]] = model.generate(token_ids, attention_mask=mask)[:, width:].tolist()
    return continuations


def next_tokens(model: PreTrainedModel, prompt: tuple[int, ...], text: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each beginning of the text but the whole."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text[:-1]]]), logits_to_keep=len(text)).logits[0]
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    return likeliest


@pytest.fixture(scope="module")
def smollm2(smollm2_checkpoint: Checkpoint) -> Model:
    return Model(smollm2_checkpoint.config, smollm2_checkpoint.weights, get_backend("cpp"))


@pytest.fixture(scope="module")
def prompts(smollm2_checkpoint: Checkpoint) -> list[tuple[int, ...]]:
    """The 8 prompts of the protocol."""
    lines = (resource_dir("prompts") / "default.jsonl").read_text("utf-8").splitlines()
    return [tuple(smollm2_checkpoint.tokenizer.encode_chat(json.loads(line)["messages"])) for line in lines]


@pytest.fixture(scope="module")
def plain_texts(smollm2: Model, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    executor = Executor(smollm2, get_backend("cpp"), None, max_batch=8)
    return texts(executor.generate(greedy_requests(prompts), speculative=False))


def test_smollm2_writes_the_text_that_transformers_writes(
    plain_texts: list[list[int]], prompts: list[tuple[int, ...]], hf_smollm2: PreTrainedModel
) -> None:
    """All 8 prompts, the 32 tokens each of a run."""
    assert len(prompts) == 8
    for prompt, text in zip(prompts, plain_texts, strict=True):
        assert len(text) == NUM_TOKENS
        assert next_tokens(hf_smollm2, prompt, text) == text


def test_a_text_with_one_other_token_is_not_what_transformers_writes(
    plain_texts: list[list[int]], prompts: list[tuple[int, ...]], hf_smollm2: PreTrainedModel
) -> None:
    """The twin of the above."""
    text = [*plain_texts[0][:20], plain_texts[0][20] + 1, *plain_texts[0][21:]]
    assert next_tokens(hf_smollm2, prompts[0], text) != text


@pytest.mark.parametrize("drafter", ["ngram", "early_exit", "self"])
def test_smollm2_writes_the_same_greedy_text_with_speculation(
    drafter: str, smollm2: Model, prompts: list[tuple[int, ...]], plain_texts: list[list[int]]
) -> None:
    backend = get_backend("cpp")
    executor = Executor(smollm2, backend, make_drafter(drafter, DrafterContext(target=smollm2, backend=backend)))
    requests = [dataclasses.replace(r, max_tokens=14) for r in greedy_requests(prompts[2:5])]
    generations = executor.generate(requests, speculative=True)
    assert texts(generations) == [text[:14] for text in plain_texts[2:5]]
    assert any(Origin.ACCEPTED in g.origins for g in generations)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_random_model_writes_the_text_that_transformers_writes(architecture: str) -> None:
    config, weights = tiny_checkpoint(architecture)  # type: ignore[arg-type]
    backend = get_backend("cpp")
    executor = Executor(Model(config, weights, backend), backend, None, max_batch=8)
    prompts = random_prompts(8)
    generations = executor.generate(greedy_requests(prompts), speculative=False)
    reference = transformers_model(config, weights, dtype=torch.float32)
    assert texts(generations) == transformers_texts(reference, prompts)


def test_a_model_with_one_layer_less_writes_another_text() -> None:
    """The twin: the comparison sees a wrong forward. The last layer of the tiny model is skipped."""
    config, weights = tiny_checkpoint("llama")
    backend = get_backend("cpp")
    prompts = random_prompts(8)
    whole = Executor(Model(config, weights, backend), backend, None, max_batch=8)
    shallow_config, _ = tiny_checkpoint("llama", layers=3)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("model.layers.3.")}
    shallow = Executor(Model(shallow_config, kept, backend), backend, None, max_batch=8)
    expected, actual = (texts(e.generate(greedy_requests(prompts), speculative=False)) for e in (whole, shallow))
    assert expected != actual
