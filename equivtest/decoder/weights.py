"""Loads a checkpoint from a GGUF file or a Hugging Face folder: config, weights, tokenizer and what identifies them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from equivtest.decoder.config import ModelConfig, config_from_gguf, config_from_hf
from equivtest.decoder.gguf_reader import GgufFile
from equivtest.decoder.hub import file_sha256
from equivtest.decoder.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from equivtest.errors import ModelUnavailable, UnsupportedModel

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>[a-z_]+)\.weight")
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model at rest."""

    path: Path
    config: ModelConfig
    weights: Mapping[str, Tensor]
    """Hugging Face names to CPU tensors, float32 from a GGUF file, as stored from a folder."""
    tokenizer: Tokenizer
    sha256: str
    """Of the GGUF file, or of the names and hashes of the folder's files that were read."""


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a .gguf file, or a folder with config.json, *.safetensors and tokenizer.json.

    Raises ModelUnavailable when there is nothing there, UnsupportedModel naming what this decoder does not implement.
    """
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise ModelUnavailable(str(path), "no such file or folder", "check the path")
    return _load_gguf(path)


def load_tokenizer(path: Path) -> tuple[Tokenizer, list[Path]]:
    """The tokenizer alone, of a .gguf file or of a folder that need not hold weights; and the files read.

    Raises as `load_checkpoint`.
    """
    if path.is_dir():
        return tokenizer_from_folder(path)
    if not path.is_file():
        raise ModelUnavailable(str(path), "no such file or folder", "check the path")
    return tokenizer_from_gguf(str(path), GgufFile(path).metadata), [path]


def _load_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModel(str(path), "split GGUF files are not implemented; merge the parts into one file")
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModel(str(path), "the tensor token_embd.weight is missing")
    divisors: tuple[float, ...] = ()
    if _ROPE_DIVISORS in file.tensors:
        divisors = tuple(float(x) for x in file.tensor(_ROPE_DIVISORS))
    config = config_from_gguf(
        str(path),
        file.metadata,
        tied_embeddings="output.weight" not in file.tensors,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        rope_divisors=divisors,
    )
    weights = {}
    for name in file.tensors:
        if name == _ROPE_DIVISORS:
            continue
        weight = torch.from_numpy(file.tensor(name))
        if config.architecture == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
            weight = _undo_row_permutation(weight, config.head_dim)
        weights[_hugging_face_name(path, name)] = weight
    return Checkpoint(
        path=path,
        config=config,
        weights=weights,
        tokenizer=tokenizer_from_gguf(str(path), file.metadata),
        sha256=file_sha256(path),
    )


def _hugging_face_name(path: Path, name: str) -> str:
    match = _GGUF_TENSOR.fullmatch(name)
    if match is None or match["part"] not in _GGUF_NAMES:
        raise UnsupportedModel(str(path), f"this decoder has no place for the tensor {name}")
    layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{layer}{_GGUF_NAMES[match['part']]}.weight"


def _undo_row_permutation(weight: Tensor, head_dim: int) -> Tensor:
    """From llama.cpp's order of a head's rows, which rotates neighbours, to the order that rotates halves.

    llama.cpp's converter interleaves the two halves of each head (`permute` in its convert_hf_to_gguf.py).
    """
    heads = weight.unflatten(0, (-1, head_dim // 2, 2))  # type: ignore[no-untyped-call]
    return heads.transpose(1, 2).reshape(weight.shape).contiguous()  # type: ignore[no-any-return]


def _load_folder(path: Path) -> Checkpoint:
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelUnavailable(str(path), "the folder has no config.json", "give a Hugging Face folder or a GGUF file")
    config = config_from_hf(str(path), read_json(config_file))
    tokenizer, tokenizer_files = tokenizer_from_folder(path)
    return Checkpoint(
        path=path,
        config=config,
        weights=load_weights(path),
        tokenizer=tokenizer,
        sha256=weights_sha256(path, *tokenizer_files),
    )


def weights_sha256(path: Path, *more: Path) -> str:
    """Of the names and hashes of a folder's config.json and *.safetensors, and of `more` files."""
    return _files_sha256([path / "config.json", *_shards(path), *more])


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder's *.safetensors, as stored. Raises ModelUnavailable or UnsupportedModel."""
    weights: dict[str, Tensor] = {}
    for shard in _shards(path):
        try:
            weights |= load_file(shard)
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(str(shard), f"not a readable safetensors file: {error}; fetch it again") from error
    # Old exports carry the rotary frequencies, which follow from the config.
    return {name: weight for name, weight in weights.items() if not name.endswith("rotary_emb.inv_freq")}


def _shards(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UnsupportedModel(str(index), "it has no weight_map; fetch it again")
        shards = sorted({path / Path(str(name)).name for name in weight_map.values()})
    else:
        shards = sorted(path.glob("*.safetensors"))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing or not shards:
        what = ", ".join(missing) or "*.safetensors"
        raise ModelUnavailable(str(path), f"the folder has no {what}", "fetch the whole folder again")
    return shards


def read_json(path: Path) -> dict[str, object]:
    """A JSON table. Raises UnsupportedModel when it is not one."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(str(path), f"not readable JSON: {error}; fetch it again") from error
    if not isinstance(table, dict):
        raise UnsupportedModel(str(path), "not a JSON table; fetch it again")
    return table


def _files_sha256(paths: Iterable[Path]) -> str:
    lines = "".join(f"{file_sha256(path)}  {path.name}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()


def default_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies bfloat16 matrices natively, otherwise float32."""
    capabilities = torch.cpu.get_capabilities()
    native = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if native else torch.float32
