"""Logits of teacher-forced text against Hugging Face transformers on the same weights, and faults this must see.

Reference: transformers' LlamaForCausalLM and Qwen3ForCausalLM in float32, in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from equivtest.decoder.config import ModelConfig, config_from_hf
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.transformers_model import transformers_model
from equivtest.kernels.registry import get_backend
from tests.decoder.tiny_models import tiny_checkpoint, tiny_weights

if TYPE_CHECKING:
    from equivtest.decoder.weights import Checkpoint

TOLERANCE = 1e-4
TEXT = """def binary_search(items, target):
    low, high = 0, len(items) - 1
    while low <= high: ...

The river Loire is 1,012 km long; la Loire est le plus long fleuve de France.
東京は日本の首都です。 x² + 3y = 17\n\n- one\n- two
"""
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied head": {"tied_embeddings": True},
    "qwen3": {"architecture": "qwen3"},
    "qwen3, group of 4, head_dim 128": {
        "architecture": "qwen3", "hidden": 96, "heads": 8, "kv_heads": 2, "head_dim": 128, "tied_embeddings": True,
    },
}  # fmt: skip


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def our_logits(config: ModelConfig, weights: Mapping[str, Tensor], token_ids: Tensor, chunks: list[int]) -> Tensor:
    """Logits of the whole text, fed in chunks beside a second sequence that is one token ahead."""
    model = Model(config, weights, get_backend("reference"), dtype=torch.float32)
    kv = PagedKVCache(config, num_pages=64, max_sequences=2, dtype=torch.float32)
    text, other = kv.new_sequence(), kv.new_sequence()
    model.forward(token_ids[:1], kv.extend(np.array([other]), np.array([1])), kv)
    parts, start = [], 0
    for size in chunks:
        batch = kv.extend(np.array([other, text]), np.array([1, size]))
        rows = torch.cat((token_ids[start : start + 1], token_ids[start : start + size]))
        parts.append(model.logits(model.forward(rows, batch, kv))[1:])
        start += size
    assert start == len(token_ids)
    return torch.cat(parts)


def hf_logits(model: Any, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(token_ids[None]).logits[0]


@pytest.fixture(params=SHAPES)
def tiny(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, Tensor]]:
    config, weights = tiny_checkpoint(**SHAPES[request.param])
    return replace(config, rope_theta=500.0), weights


@pytest.fixture(scope="module")
def token_ids() -> Tensor:
    return torch.randint(97, (60,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunks", [[60], [1, 16, 2, 15, 25, 1]], ids=["in one go", "in ragged chunks"])
def test_small_models_give_transformers_logits(
    tiny: tuple[ModelConfig, dict[str, Tensor]], token_ids: Tensor, chunks: list[int]
) -> None:
    config, weights = tiny
    expected = hf_logits(transformers_model(config, weights, dtype=torch.float32), token_ids)
    assert relative_error(our_logits(config, weights, token_ids, chunks), expected) <= TOLERANCE


def test_smollm2_gives_transformers_logits(smollm2_checkpoint: Checkpoint, hf_smollm2: Any) -> None:
    token_ids = torch.tensor(smollm2_checkpoint.tokenizer.encode(TEXT))
    expected = hf_logits(hf_smollm2, token_ids)
    chunks = [17, 1, 3, len(token_ids) - 21]
    for sizes in ([len(token_ids)], chunks):
        logits = our_logits(smollm2_checkpoint.config, smollm2_checkpoint.weights, token_ids, sizes)
        assert relative_error(logits, expected) <= TOLERANCE
    # Peaked where the text is predictable: the weights are the trained ones, not noise that both sides share.
    assert float(logits.log_softmax(-1)[:-1].gather(1, token_ids[1:, None]).mean()) > -4


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_scaled_rotary_frequencies_are_those_of_transformers(kind: str, token_ids: Tensor) -> None:
    scaling = {"rope_type": kind, "rope_theta": 500.0, "factor": 8.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    hf_config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=512, rope_parameters=scaling,
    )  # fmt: skip
    config = config_from_hf("scaled", hf_config.to_dict())
    weights = tiny_weights(config)
    hf_model = transformers.LlamaForCausalLM(hf_config).eval()
    hf_model.load_state_dict(weights)
    expected = hf_logits(hf_model, token_ids)
    assert relative_error(our_logits(config, weights, token_ids, [60]), expected) <= TOLERANCE
    unscaled = our_logits(replace(config, rope_divisors=()), weights, token_ids, [60])
    assert relative_error(unscaled, expected) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_dropped_query_or_key_norm_is_seen(name: str, token_ids: Tensor) -> None:
    config, weights = tiny_checkpoint("qwen3")
    expected = hf_logits(transformers_model(config, weights, dtype=torch.float32), token_ids)
    faulty = weights | {f"model.layers.2.self_attn.{name}.weight": torch.ones(config.head_dim)}
    assert relative_error(our_logits(config, faulty, token_ids, [60]), expected) > 10 * TOLERANCE


def test_rows_left_in_llama_cpp_order_are_seen(token_ids: Tensor) -> None:
    """The permutation that llama.cpp's converter applies to query rows, not undone in one layer."""
    config, weights = tiny_checkpoint("llama")
    expected = hf_logits(transformers_model(config, weights, dtype=torch.float32), token_ids)
    name = "model.layers.1.self_attn.q_proj.weight"
    halves = weights[name].unflatten(0, (config.num_heads, 2, config.head_dim // 2))
    faulty = weights | {name: halves.transpose(1, 2).reshape(weights[name].shape)}
    assert relative_error(our_logits(config, faulty, token_ids, [60]), expected) > 10 * TOLERANCE


def test_one_wrong_row_of_the_cache_is_seen(token_ids: Tensor) -> None:
    config, weights = tiny_checkpoint("llama")
    expected = hf_logits(transformers_model(config, weights, dtype=torch.float32), token_ids)
    model = Model(config, weights, get_backend("reference"))
    kv = PagedKVCache(config, num_pages=8, max_sequences=1, dtype=torch.float32)
    sequence = np.array([kv.new_sequence()])
    model.forward(token_ids[:40], kv.extend(sequence, np.array([40])), kv)
    batch = kv.extend(sequence, np.array([20]))
    kv.pages[1, batch.page_table[0, 1].item(), :, 3] = kv.pages[1, batch.page_table[0, 1].item(), :, 4].clone()
    actual = model.logits(model.forward(token_ids[40:], batch, kv))
    assert relative_error(actual, expected[40:]) > 10 * TOLERANCE
