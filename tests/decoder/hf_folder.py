"""Writes models as Hugging Face folders: config.json, weights in one or more files, tokenizer."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from tests.decoder.gguf_files import CHAT_TEMPLATE, tiny_bpe


def write_folder(path: Path, config: ModelConfig, weights: dict[str, Tensor], *, shards: int = 1) -> None:
    path.mkdir(exist_ok=True)
    table = {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": config.max_position,
    }
    (path / "config.json").write_text(json.dumps(table))
    tiny_bpe().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"}))
    names = sorted(weights)
    parts = [names[i::shards] for i in range(shards)]
    files = ["model.safetensors"] if shards == 1 else [f"model-{i}-of-{shards}.safetensors" for i in range(shards)]
    for file, part in zip(files, parts, strict=True):
        save_file({name: weights[name].contiguous() for name in part}, path / file)
    if shards > 1:
        index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
