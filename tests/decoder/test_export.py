"""Models written as Hugging Face folders are the same models."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from equivtest.decoder.export import export_folder
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.weights import load_checkpoint
from equivtest.errors import InvalidSetting, UnsupportedModel
from equivtest.kernels.registry import get_backend
from tests.decoder.gguf_files import write_gguf
from tests.decoder.tiny_models import tiny_checkpoint

CHAT = [{"role": "user", "content": "the cat sat on 33 mats"}]


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("llama", False), ("qwen3", True)])
def test_the_folder_holds_the_same_model_and_tokenizer(tmp_path: Path, architecture, tied: bool) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    write_gguf(file, *tiny_checkpoint(architecture, vocab_size=320, layers=2, tied_embeddings=tied))
    one = load_checkpoint(file)
    export_folder(one, folder)
    other = load_checkpoint(folder)
    assert other.config == one.config
    assert other.weights.keys() == one.weights.keys()
    assert all(torch.equal(other.weights[name], weight) for name, weight in one.weights.items())
    assert other.tokenizer.encode_chat(CHAT) == one.tokenizer.encode_chat(CHAT)
    assert other.tokenizer.eos_token_ids == one.tokenizer.eos_token_ids
    assert other.tokenizer.special_token_ids == one.tokenizer.special_token_ids


def test_transformers_reads_the_folder_as_the_same_model(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    config, weights = tiny_checkpoint(vocab_size=320, layers=2)
    write_gguf(file, dataclasses.replace(config, rope_theta=700.0), weights)  # not what is taken where none is said
    one = load_checkpoint(file)
    export_folder(one, folder)
    ids = one.tokenizer.encode_chat(CHAT)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False) == ids
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float32
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    model = Model(one.config, one.weights, get_backend("reference"), dtype=torch.float32)
    kv = PagedKVCache(model.config, num_pages=64, max_sequences=1, dtype=torch.float32)
    batch = kv.extend(np.array([kv.new_sequence()]), np.array([len(ids)]))
    ours = model.logits(model.forward(torch.tensor(ids), batch, kv))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, *tiny_checkpoint(vocab_size=320, layers=2))
    one = load_checkpoint(file)
    with pytest.raises(InvalidSetting, match="holds something already"):
        export_folder(one, tmp_path)
    stretched = dataclasses.replace(one.config, rope_divisors=(2.0,) * (one.config.head_dim // 2))
    with pytest.raises(UnsupportedModel, match="rope scaling cannot be exported"):
        export_folder(dataclasses.replace(one, config=stretched), tmp_path / "new")
