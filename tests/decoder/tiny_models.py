"""Small random models that run in milliseconds and still have a peaked, varied law."""

from __future__ import annotations

import torch
from torch import Tensor

from equivtest.decoder.config import Architecture, ModelConfig
from equivtest.decoder.model import Model
from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend

LOGIT_SCALE = 3.0
"""Standard deviation of the logits: the most probable of 97 tokens then has about a third of the mass."""


def tiny_config(
    architecture: Architecture = "llama",
    *,
    vocab_size: int = 97,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 48,
    tied_embeddings: bool = False,
    max_position: int = 512,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=tied_embeddings,
        max_position=max_position,
    )


def tiny_weights(config: ModelConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """Float32 weights under their Hugging Face names.

    Later layers add less and less to the residual stream, so an early exit often agrees with the whole model.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden, LOGIT_SCALE),
        "model.norm.weight": norm(hidden),
    }
    if not config.tied_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden, LOGIT_SCALE)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(config.num_heads * dim, hidden, 1.5),
            f"{prefix}.self_attn.k_proj.weight": matrix(config.num_kv_heads * dim, hidden, 1.5),
            f"{prefix}.self_attn.v_proj.weight": matrix(config.num_kv_heads * dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, config.num_heads * dim, 1.5 / (1 + i)),
            f"{prefix}.post_attention_layernorm.weight": norm(hidden),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden, 1.5),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden, 1.5),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner, 1.5 / (1 + i)),
        }
        if config.qk_norm:
            weights[f"{prefix}.self_attn.q_norm.weight"] = norm(dim)
            weights[f"{prefix}.self_attn.k_norm.weight"] = norm(dim)
    return weights


def tiny_checkpoint(
    architecture: Architecture = "llama", *, seed: int = 0, **shape: int
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A config (`shape` as in `tiny_config`) and random weights for it."""
    config = tiny_config(architecture, **shape)
    return config, tiny_weights(config, seed=seed)


def tiny_model(
    architecture: Architecture = "llama",
    *,
    seed: int = 0,
    backend: KernelBackend | None = None,
    dtype: torch.dtype = torch.float32,
    **shape: int,
) -> Model:
    """A runnable model on the reference kernels, or on `backend`."""
    config, weights = tiny_checkpoint(architecture, seed=seed, **shape)
    return Model(config, weights, backend or get_backend("reference"), dtype=dtype)
