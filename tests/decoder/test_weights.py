"""Checkpoints come back as they were written, whatever the format, and damaged or foreign ones are refused."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from equivtest.decoder.gguf_reader import GgufFile
from equivtest.decoder.weights import default_dtype, load_checkpoint
from equivtest.errors import ModelUnavailable, UnsupportedModel
from tests.decoder.gguf_files import write_gguf
from tests.decoder.hf_folder import write_folder
from tests.decoder.tiny_models import tiny_checkpoint

if TYPE_CHECKING:
    from equivtest.decoder.weights import Checkpoint

SHAPES = [
    ("llama", {}),
    ("llama", {"tied_embeddings": True}),
    ("qwen3", {"heads": 4, "kv_heads": 1, "head_dim": 32}),
    ("qwen3", {"tied_embeddings": True}),
]


def same_weights(checkpoint: Checkpoint, weights: dict[str, Tensor], tolerance: float = 0.0) -> bool:
    assert set(checkpoint.weights) == set(weights)
    return all(torch.allclose(checkpoint.weights[n].float(), w, rtol=0, atol=tolerance) for n, w in weights.items())


@pytest.mark.parametrize(("architecture", "shape"), SHAPES)
def test_a_gguf_file_comes_back_as_it_was_written(architecture: str, shape: dict[str, int], tmp_path: Path) -> None:
    config, weights = tiny_checkpoint(architecture, vocab_size=320, **shape)
    write_gguf(tmp_path / "m.gguf", config, weights)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert replace(checkpoint.config, rms_norm_eps=config.rms_norm_eps) == config
    assert checkpoint.config.rms_norm_eps == pytest.approx(config.rms_norm_eps, rel=1e-6)
    assert same_weights(checkpoint, weights)
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("the cat")) == "the cat"


def test_rows_that_were_not_permuted_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the round trip: a converter that skips the permutation."""
    monkeypatch.setattr("tests.decoder.gguf_files.llama_cpp_permutation", lambda weight, num_heads: weight)
    config, weights = tiny_checkpoint("llama", vocab_size=320)
    write_gguf(tmp_path / "m.gguf", config, weights)
    assert not same_weights(load_checkpoint(tmp_path / "m.gguf"), weights)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F16", 5e-3), ("BF16", 0.03), ("Q8_0", 0.03), ("Q5_1", 0.15), ("Q5_0", 0.3), ("Q4_1", 0.3), ("Q4_0", 0.6)],
)
def test_quantised_files_come_back_to_their_precision(kind: str, tolerance: float, tmp_path: Path) -> None:
    config, weights = tiny_checkpoint("llama", vocab_size=320, hidden=64, intermediate=64)
    write_gguf(tmp_path / "m.gguf", config, weights, kind=GGMLQuantizationType[kind])
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert same_weights(checkpoint, weights, tolerance)
    assert not same_weights(checkpoint, weights, tolerance / 100)
    name = "model.layers.1.mlp.down_proj.weight"
    stored = dequantize(quantize(weights[name].numpy(), GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
    assert np.array_equal(checkpoint.weights[name].numpy(), stored)


def test_the_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    config, weights = tiny_checkpoint("qwen3", vocab_size=320, hidden=64, intermediate=64)
    more = {"a.flag": True, "a.number": 7, "a.text": "naïve 東京", "a.list": [1.5, 2.5], "a.names": ["x", ""]}
    write_gguf(tmp_path / "m.gguf", config, weights, kind=GGMLQuantizationType.Q8_0, extra_metadata=more)
    ours, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert more.items() <= ours.metadata.items()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert np.array_equal(ours.tensor(tensor.name), dequantize(tensor.data, tensor.tensor_type))


def test_llama3_rope_factors_are_taken_from_the_file(tmp_path: Path) -> None:
    config, weights = tiny_checkpoint("llama", vocab_size=320)
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", config, weights, extra_tensors={"rope_freqs.weight": factors})
    assert load_checkpoint(tmp_path / "m.gguf").config.rope_divisors == tuple(factors.tolist())


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("architecture", "shape"), SHAPES)
def test_a_folder_comes_back_as_it_was_written(
    architecture: str, shape: dict[str, int], shards: int, tmp_path: Path
) -> None:
    config, weights = tiny_checkpoint(architecture, vocab_size=320, **shape)
    write_folder(tmp_path / "m", config, weights, shards=shards)
    checkpoint = load_checkpoint(tmp_path / "m")
    assert checkpoint.config == config
    assert same_weights(checkpoint, weights)
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("the cat")) == "the cat"


def test_a_folder_keeps_its_dtype(tmp_path: Path) -> None:
    config, weights = tiny_checkpoint(vocab_size=320)
    write_folder(tmp_path / "m", config, {name: weight.bfloat16() for name, weight in weights.items()})
    assert {weight.dtype for weight in load_checkpoint(tmp_path / "m").weights.values()} == {torch.bfloat16}


def test_a_vocabulary_padded_past_the_tokenizer_is_kept(tmp_path: Path) -> None:
    config, weights = tiny_checkpoint(vocab_size=384)
    write_folder(tmp_path / "m", config, weights)
    write_gguf(tmp_path / "m.gguf", config, weights)
    for path in (tmp_path / "m", tmp_path / "m.gguf"):
        checkpoint = load_checkpoint(path)
        assert checkpoint.config.vocab_size == 384
        assert checkpoint.tokenizer.vocab_size < 384
        assert checkpoint.tokenizer.token_text(383) == "<unused 383>"


def test_the_hash_names_the_contents(tmp_path: Path) -> None:
    config, weights = tiny_checkpoint(vocab_size=320)
    hashes = set()
    for seed in (0, 0, 1):
        _, weights = tiny_checkpoint(vocab_size=320, seed=seed)
        write_folder(tmp_path / "m", config, weights)
        hashes.add(load_checkpoint(tmp_path / "m").sha256)
    assert len(hashes) == 2


@pytest.mark.parametrize("size", [0, 3, 10, 400, -40])
def test_a_damaged_gguf_file_is_refused(size: int, tmp_path: Path) -> None:
    config, weights = tiny_checkpoint(vocab_size=320)
    write_gguf(tmp_path / "m.gguf", config, weights)
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:size])
    with pytest.raises(UnsupportedModel, match=r"fetch (it|the file) again"):
        load_checkpoint(tmp_path / "m.gguf")


def gguf_header(num_tensors: int, num_entries: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries)


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def nested_array(levels: int) -> bytes:
    """A file whose one entry is arrays of one array each, around one that holds the byte 7."""
    start, inside, innermost = struct.pack("<I", 9), struct.pack("<IQ", 9, 1), struct.pack("<IQB", 0, 1, 7)
    return gguf_header(0, 1) + gguf_string("a.key") + start + inside * (levels - 1) + innermost


@pytest.mark.parametrize("levels", [9, 100_000])
def test_arrays_nested_without_end_are_refused(levels: int, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(nested_array(levels))
    with pytest.raises(UnsupportedModel, match="arrays are nested more than 8 deep; fetch it again"):
        load_checkpoint(tmp_path / "m.gguf")


def test_arrays_nested_a_few_times_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(nested_array(8))
    value: object = [7]
    for _ in range(7):
        value = [value]
    assert GgufFile(tmp_path / "m.gguf").metadata == {"a.key": value}


@pytest.mark.parametrize("shape", [(), (0,), (4, 0)], ids=str)
def test_a_tensor_that_holds_nothing_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    entry = gguf_string("rope_freqs.weight") + dimensions + struct.pack("<IQ", 0, 0)
    (tmp_path / "m.gguf").write_bytes(gguf_header(1, 0) + entry + bytes(100))
    message = re.escape(f"the tensor rope_freqs.weight has the shape {list(shape)}; fetch it again")
    with pytest.raises(UnsupportedModel, match=message):
        load_checkpoint(tmp_path / "m.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UnsupportedModel, match="does not start with GGUF"):
        load_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"llama.expert_count": 4}, {}, "expert_count"),
        ({"split.count": 3}, {}, "split"),
        ({}, {"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}, "blk.0.attn_q.bias"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, {}, "deepseek-llm.*qwen2, smollm"),
        ({"tokenizer.ggml.model": "llama"}, {}, "tokenizer.ggml.model"),
    ],
)
def test_what_a_gguf_file_asks_in_vain_is_named(
    metadata: dict[str, object], tensors: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    config, weights = tiny_checkpoint("llama", vocab_size=320)
    write_gguf(tmp_path / "m.gguf", config, weights, extra_metadata=metadata, extra_tensors=tensors)
    with pytest.raises(UnsupportedModel, match=message):
        load_checkpoint(tmp_path / "m.gguf")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no such file"):
        load_checkpoint(tmp_path / "nothing")
    config, weights = tiny_checkpoint(vocab_size=320)
    for file in ("tokenizer.json", "model-1-of-3.safetensors", "config.json"):
        write_folder(tmp_path / "m", config, weights, shards=3)
        (tmp_path / "m" / file).unlink()
        with pytest.raises(ModelUnavailable, match=file):
            load_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_damaged_folder_is_refused(file: str, tmp_path: Path) -> None:
    config, weights = tiny_checkpoint(vocab_size=320)
    write_folder(tmp_path / "m", config, weights)
    (tmp_path / "m" / file).write_bytes((tmp_path / "m" / file).read_bytes()[:-30])
    with pytest.raises(UnsupportedModel, match="readable"):
        load_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"amx_bf16": True, "avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": False, "avx512_bf16": True}, torch.bfloat16),
        ({"avx2": True}, torch.float32),
    ],
)
def test_bfloat16_is_the_default_only_where_the_cpu_has_it(
    capabilities: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert default_dtype() is expected
