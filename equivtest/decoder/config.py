"""The shape of a model, read from a Hugging Face config.json or from GGUF metadata.

Both readers refuse what the decoder does not implement by naming the key: a model is never run as something it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from equivtest.errors import UnsupportedModel

Architecture = Literal["llama", "qwen3"]
"""llama: grouped-query attention, RoPE, RMSNorm, SwiGLU. qwen3: the same with an RMSNorm on each query and key head."""

_QWEN3_HEAD_DIM = 128
SUPPORTED: tuple[str, ...] = get_args(Architecture)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that fixes the shape and the arithmetic of the forward pass."""

    architecture: Architecture
    vocab_size: int
    """Rows of the embedding and of the head; may be padded past the tokenizer's."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Need not be hidden_size / num_heads."""
    intermediate_size: int
    rope_theta: float
    rope_divisors: tuple[float, ...] = ()
    """Divides the head_dim / 2 rotary frequencies (linear and llama3 scaling); empty for none."""
    rms_norm_eps: float
    tied_embeddings: bool
    """The head is the embedding."""
    max_position: int
    """Longest sequence, prompt and output together."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "rope_theta", "rms_norm_eps", "max_position"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise UnsupportedModel(self.architecture, f"{name} = {getattr(self, name)!r} must be above 0")
        if self.architecture not in SUPPORTED:
            raise UnsupportedModel(self.architecture, f"unknown architecture; this decoder runs {', '.join(SUPPORTED)}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                self.architecture, f"num_heads = {self.num_heads} is no multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(self.architecture, f"head_dim = {self.head_dim} must be even")
        if self.rope_divisors and len(self.rope_divisors) != self.head_dim // 2:
            raise UnsupportedModel(
                self.architecture, f"{len(self.rope_divisors)} rope factors for head_dim = {self.head_dim}"
            )

    @property
    def qk_norm(self) -> bool:
        """Each query and key head is normalised before the rotation."""
        return self.architecture == "qwen3"


def config_from_hf(model: str, config: Mapping[str, object]) -> ModelConfig:
    """Read a config.json. `model` names the folder in errors. Raises UnsupportedModel naming the key."""
    architecture = _architecture(model, "model_type", config.get("model_type"))
    _refuse_hf(model, config)
    heads = _integer(model, config, "num_attention_heads")
    hidden = _integer(model, config, "hidden_size")
    # Where a key is left out, transformers fills in another value for each architecture.
    qwen3 = architecture == "qwen3"
    head_dim = _integer(model, config, "head_dim", _QWEN3_HEAD_DIM if qwen3 else hidden // heads)
    rope = _rope_parameters(model, config)
    theta = _number(model, rope, "rope_theta", _number(model, config, "rope_theta", 10000.0))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(model, config, "vocab_size"),
        hidden_size=hidden,
        num_layers=_integer(model, config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(model, config, "num_key_value_heads", None if qwen3 else heads),
        head_dim=head_dim,
        intermediate_size=_integer(model, config, "intermediate_size"),
        rope_theta=theta,
        rope_divisors=_hf_rope_divisors(model, rope, theta, head_dim),
        rms_norm_eps=_number(model, config, "rms_norm_eps", 1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=_integer(model, config, "max_position_embeddings"),
    )


def config_from_gguf(
    model: str,
    metadata: Mapping[str, object],
    *,
    tied_embeddings: bool,
    vocab_size: int,
    rope_divisors: tuple[float, ...],
) -> ModelConfig:
    """Read GGUF metadata; what only the tensors tell (tying, padded vocabulary, rope factors) is passed in.

    Raises UnsupportedModel naming the key.
    """
    architecture = _architecture(model, "general.architecture", metadata.get("general.architecture"))
    own = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items() if k.startswith(f"{architecture}.")}
    heads = _integer(model, own, "attention.head_count")
    hidden = _integer(model, own, "embedding_length")
    head_dim = _integer(model, own, "attention.key_length", hidden // heads)
    for key, allowed in (
        ("expert_count", 0),
        ("attention.sliding_window", 0),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("logit_scale", 1.0),
    ):
        if own.get(key, allowed) != allowed:
            raise UnsupportedModel(model, f"{architecture}.{key} = {own[key]!r} is not implemented (only {allowed})")
    kind = own.get("rope.scaling.type", "none")
    if kind == "linear":
        rope_divisors = (_number(model, own, "rope.scaling.factor"),) * (head_dim // 2)
    elif kind != "none":
        raise UnsupportedModel(model, f"{architecture}.rope.scaling.type = {kind!r} is not implemented")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=_integer(model, own, "block_count"),
        num_heads=heads,
        num_kv_heads=_integer(model, own, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=_integer(model, own, "feed_forward_length"),
        rope_theta=_number(model, own, "rope.freq_base", 10000.0),
        rope_divisors=rope_divisors,
        rms_norm_eps=_number(model, own, "attention.layer_norm_rms_epsilon"),
        tied_embeddings=tied_embeddings,
        max_position=_integer(model, own, "context_length"),
    )


def _architecture(model: str, key: str, value: object) -> Architecture:
    if value not in SUPPORTED:
        raise UnsupportedModel(model, f"{key} = {value!r} is not supported; this decoder runs {', '.join(SUPPORTED)}")
    return cast("Architecture", value)


def _refuse_hf(model: str, config: Mapping[str, object]) -> None:
    """Settings that change the arithmetic in ways the forward pass does not implement."""
    for key in ("attention_bias", "mlp_bias", "use_sliding_window", "num_experts", "num_local_experts",
                "quantization_config"):  # fmt: skip
        if config.get(key):
            raise UnsupportedModel(model, f"{key} = {config[key]!r} is not implemented")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(model, f"hidden_act = {config['hidden_act']!r} is not implemented (only silu)")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(model, f"partial_rotary_factor = {config['partial_rotary_factor']!r} is not implemented")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UnsupportedModel(model, f"layer_types = {layer_types!r} is not implemented (only full_attention)")


def _rope_parameters(model: str, config: Mapping[str, object]) -> Mapping[str, object]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UnsupportedModel(model, f"rope_scaling = {rope!r} is not a table")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(model, f"partial_rotary_factor = {rope['partial_rotary_factor']!r} is not implemented")
    return cast("Mapping[str, object]", rope)


def _hf_rope_divisors(model: str, rope: Mapping[str, object], theta: float, head_dim: int) -> tuple[float, ...]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ()
    if kind == "linear":
        return (_number(model, rope, "factor"),) * (head_dim // 2)
    if kind != "llama3":
        raise UnsupportedModel(model, f"rope_type = {kind!r} is not implemented (only default, linear, llama3)")
    factor = _number(model, rope, "factor")
    low, high = _number(model, rope, "low_freq_factor"), _number(model, rope, "high_freq_factor")
    context = _number(model, rope, "original_max_position_embeddings")
    divisors = []
    for i in range(head_dim // 2):
        turns = context / (2 * math.pi * theta ** (2 * i / head_dim))
        # Full turns within the original context: many keep their frequency, few are stretched, between is blended.
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return tuple(divisors)


def _number(model: str, table: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = table.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedModel(model, f"{key} = {value!r} is not one number")
    return float(value)


def _integer(model: str, table: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = _number(model, table, key, default)
    if value != int(value):
        raise UnsupportedModel(model, f"{key} = {value!r} is not a whole number")
    return int(value)
