"""Configs are read as written, and what is not implemented is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest

from equivtest.decoder.config import ModelConfig, config_from_gguf, config_from_hf
from equivtest.errors import UnsupportedModel
from tests.decoder.tiny_models import tiny_config

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
GGUF: dict[str, Any] = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 2,
    "qwen3.context_length": 256,
    "qwen3.embedding_length": 64,
    "qwen3.feed_forward_length": 128,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 32,
    "qwen3.attention.value_length": 32,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-5,
    "qwen3.rope.freq_base": 5000.0,
}


def read_gguf(metadata: dict[str, Any]) -> ModelConfig:
    return config_from_gguf("m", metadata, tied_embeddings=True, vocab_size=100, rope_divisors=())


def test_a_hugging_face_config_is_read() -> None:
    config = config_from_hf("m", HF)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.tied_embeddings) == (16, 2, 5000.0, True)
    assert config.qk_norm is False


def test_a_gguf_config_is_read() -> None:
    config = read_gguf(GGUF)
    assert (config.head_dim, config.num_kv_heads, config.rope_theta, config.max_position) == (32, 2, 5000.0, 256)
    assert config.qk_norm is True


def test_what_a_qwen3_config_leaves_out_is_as_in_transformers() -> None:
    assert config_from_hf("m", HF | {"model_type": "qwen3"}).head_dim == 128


def test_both_ways_of_writing_the_rotary_base_are_read() -> None:
    new = {k: v for k, v in HF.items() if k != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e4}
    assert config_from_hf("m", new).rope_theta == 7e4


def test_linear_scaling_divides_every_frequency() -> None:
    assert config_from_hf("m", HF | {"rope_scaling": {"type": "linear", "factor": 4.0}}).rope_divisors == (4.0,) * 8
    scaled = GGUF | {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}
    assert read_gguf(scaled).rope_divisors == (4.0,) * 16


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"num_experts": 8},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"quantization_config": {"bits": 4}},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},
        {"vocab_size": None},
        {"vocab_size": "many"},
        {"num_hidden_layers": 1.5},
        {"hidden_size": -1, "head_dim": 16},
        {"num_key_value_heads": None, "model_type": "qwen3"},
    ],
)
def test_a_hugging_face_key_that_is_not_implemented_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(change))):
        config_from_hf("m", HF | change)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_other_rotary_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        config_from_hf("m", HF | {"rope_scaling": {"rope_type": kind, "factor": 2.0}})
    with pytest.raises(UnsupportedModel, match=kind):
        read_gguf(GGUF | {"qwen3.rope.scaling.type": kind})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "mamba"),
        ("qwen3.expert_count", 8),
        ("qwen3.attention.sliding_window", 4096),
        ("qwen3.attention.value_length", 16),
        ("qwen3.rope.dimension_count", 16),
        ("qwen3.attention.head_count_kv", [2, 1]),
        ("qwen3.block_count", None),
    ],
)
def test_a_gguf_key_that_is_not_implemented_is_named(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match=key.removeprefix("qwen3.")):
        read_gguf(GGUF | {key: value})


def test_unknown_architectures_are_told_which_are_supported() -> None:
    with pytest.raises(UnsupportedModel, match="llama, qwen3"):
        config_from_hf("m", HF | {"model_type": "mamba"})


@pytest.mark.parametrize(
    ("change", "message"), [({"head_dim": 15}, "even"), ({"kv_heads": 3}, "no multiple"), ({"layers": 0}, "num_layers")]
)
def test_an_impossible_shape_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        tiny_config(**change)
