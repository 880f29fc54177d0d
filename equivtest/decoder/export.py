"""A checkpoint as a Hugging Face folder: what engines that do not read its file can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from equivtest.decoder.config import ModelConfig
from equivtest.decoder.weights import Checkpoint
from equivtest.errors import InvalidSetting, UnsupportedModel

_CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def export_folder(checkpoint: Checkpoint, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json, model.safetensors and the tokenizer into a new folder, which `load_checkpoint` reads as the
    same model.

    Weights of a GGUF file are written as they decode with, so that nothing is rounded again in float32. Raises
    InvalidSetting where the folder holds something, UnsupportedModel for scaled rotary frequencies.
    """
    if checkpoint.config.rope_divisors:
        raise UnsupportedModel(str(checkpoint.path), "a model with rope scaling cannot be exported")
    if folder.exists() and any(folder.iterdir()):
        raise InvalidSetting("folder", str(folder), "holds something already: name one that is new or empty")
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", _config(checkpoint.config, checkpoint.tokenizer.eos_token_ids, dtype))
    weights = {name: weight.to(dtype).contiguous() for name, weight in checkpoint.weights.items()}
    if checkpoint.config.tied_embeddings:
        weights.pop("lm_head.weight", None)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint.tokenizer.save(folder)


def _config(config: ModelConfig, eos_token_ids: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_position,
        "eos_token_id": list(eos_token_ids) or None,
    }


def _write(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
