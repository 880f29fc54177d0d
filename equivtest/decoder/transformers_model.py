"""A checkpoint as a model of Hugging Face transformers, for those who compare the two or test the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from equivtest.errors import UnsupportedModel, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def transformers_model(config: ModelConfig, weights: Mapping[str, Tensor], *, dtype: torch.dtype) -> PreTrainedModel:
    """The same model in Hugging Face transformers. Raises UsageError when transformers is not installed."""
    try:
        import transformers
    except ImportError as error:
        message = "transformers is not installed; run: pip install 'equivtest[transformers]'"
        raise UsageError(message) from error
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    if config.rope_divisors:
        raise UnsupportedModel(config.architecture, "a model with rope scaling cannot be rebuilt in transformers")
    config_class, model_class = classes[config.architecture]
    model = model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tied_embeddings,
            max_position_embeddings=config.max_position,
        )
    )
    weights = dict(weights)
    if config.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model.to(dtype).eval()
