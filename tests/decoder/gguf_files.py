"""Writes small GGUF files with the gguf package, as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor

from equivtest.decoder.config import ModelConfig

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TRAINING_TEXT = [
    "the cat sat on the mat and the other cat sat there too",
    "in the beginning they're counting 1 2 33 444",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")


def tiny_bpe(vocab_size: int = 320) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on two sentences; SPECIAL are its first tokens."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TRAINING_TEXT * 3, trainer)
    return backend


def tokenizer_metadata(pre: str = "gpt-2", **more: object) -> dict[str, object]:
    """`tokenizer.*` metadata of `tiny_bpe`; keyword arguments add `tokenizer.ggml.*` keys."""
    import json

    model = json.loads(tiny_bpe().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_metadata: Mapping[str, object] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Matrices are stored as `kind`, vectors as float32."""
    arch = config.architecture
    writer = gguf.GGUFWriter(path, arch)
    metadata: dict[str, object] = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_position,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.rope.freq_base": config.rope_theta,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    } | tokenizer_metadata()
    for key, value in (metadata | dict(extra_metadata or {})).items():
        add(writer, key, value)
    for name, weight in weights.items():
        data = weight.float().numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = llama_cpp_permutation(data, len(data) // config.head_dim)
        if data.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
        else:
            writer.add_tensor(gguf_name(name), quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.weight"
    return f"{GGUF_NAMES[stem]}.weight"


def llama_cpp_permutation(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
