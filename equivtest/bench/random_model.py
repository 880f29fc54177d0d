"""Models with the shape of a well-known one and random weights, made on the device: for timing alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

import equivtest
from equivtest.decoder.config import ModelConfig
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.weights import Checkpoint, load_checkpoint
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting, UnknownName

SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "qwen3-4b": ModelConfig(
            architecture="qwen3",
            vocab_size=151_936,
            hidden_size=2_560,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=9_728,
            rope_theta=1_000_000.0,
            rms_norm_eps=1e-6,
            tied_embeddings=True,
            max_position=40_960,
        )
    }
)
LOGIT_DEVIATION = 5.0
"""Standard deviation of a row of logits. Over 151,936 tokens such a law has 3.4 nats of entropy and a likeliest token
of .33 on average; at temperature .8 it has 2.3 nats and .46: about as a language model's."""
_EMBEDDING_DEVIATION = 0.02
"""Small beside what the layers add, so that a tied head does not just repeat the token it was fed."""
_TOKENIZER_OF = "tiny"
"""Ships with the package. Its ids are the first ones of every shape's vocabulary."""


def shape_named(name: str) -> ModelConfig:
    """The config of that name. Raises UnknownName."""
    if name not in SHAPES:
        raise UnknownName("random model", name, SHAPES)
    return SHAPES[name]


def random_weights(
    config: ModelConfig, *, device: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Tensor]:
    """Weights by their Hugging Face names, on the device.

    Every matrix keeps the size of what it multiplies (deviation fan_in ** -1/2), and the final norm sets that of the
    logits.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype).mul_(deviation)

    def matrix(rows: int, columns: int) -> Tensor:
        return normal(rows, columns, columns**-0.5)

    def ones(size: int, scale: float = 1.0) -> Tensor:
        return torch.full((size,), scale, device=device, dtype=dtype)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    head_deviation = _EMBEDDING_DEVIATION if config.tied_embeddings else hidden**-0.5
    weights = {
        "model.embed_tokens.weight": normal(config.vocab_size, hidden, _EMBEDDING_DEVIATION),
        "model.norm.weight": ones(hidden, LOGIT_DEVIATION / (head_deviation * hidden**0.5)),
    }
    if not config.tied_embeddings:
        weights["lm_head.weight"] = normal(config.vocab_size, hidden, head_deviation)
    for index in range(config.num_layers):
        layer = {
            "input_layernorm": ones(hidden),
            "self_attn.q_proj": matrix(config.num_heads * dim, hidden),
            "self_attn.k_proj": matrix(config.num_kv_heads * dim, hidden),
            "self_attn.v_proj": matrix(config.num_kv_heads * dim, hidden),
            "self_attn.o_proj": matrix(hidden, config.num_heads * dim),
            "post_attention_layernorm": ones(hidden),
            "mlp.gate_proj": matrix(inner, hidden),
            "mlp.up_proj": matrix(inner, hidden),
            "mlp.down_proj": matrix(hidden, inner),
        }
        if config.qk_norm:
            layer |= {"self_attn.q_norm": ones(dim), "self_attn.k_norm": ones(dim)}
        weights |= {f"model.layers.{index}.{name}.weight": weight for name, weight in layer.items()}
    return weights


def random_engine(name: str, config: ModelConfig, options: EngineOptions) -> DecoderEngine:
    """The built-in decoder on a random model; `options.model` is not looked at.

    Raises KernelUnavailable, UnknownName, or InvalidSetting for drafter `model`, which would need another checkpoint.
    """
    if options.drafter == "model":
        raise InvalidSetting("drafter", "model", "needs a draft model of the same vocabulary: not with a random model")
    dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)

    def load() -> Checkpoint:
        return Checkpoint(
            path=Path(name),
            config=config,
            weights=random_weights(config, device=options.device, dtype=dtype),
            tokenizer=load_checkpoint(resolve_model(_TOKENIZER_OF)).tokenizer,
            sha256=f"seed 0 of {equivtest.__version__}",
        )

    named = dataclasses.replace(options, model=f"random {name}", dtype=str(dtype).removeprefix("torch."))
    return DecoderEngine.open(named, load=load)
