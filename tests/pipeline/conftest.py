"""A Hugging Face folder small enough that a whole smoke run takes seconds."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.decoder.tiny_models import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over a byte-level vocabulary of 256 tokens, as a config.json, weights and tokenizer.json."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    config, weights = tiny_checkpoint("llama", seed=3, vocab_size=256, layers=4)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
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
                "hidden_act": "silu",
            }
        )
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
