"""Token ids and rendered chats against transformers' tokenizers.

Reference: token_ids.json, made by transformers' AutoTokenizer from the same GGUF file (record_token_ids.py). Its
conversion ignores `tokenizer.ggml.pre`, which for this model matters only for a space before a digit other than 0-9;
there the rule is the one of SmolLM2's own tokenizer.json: digits one by one, then GPT-2's cut.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import Regex, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from equivtest.decoder import tokenizer as tokenizer_module
from tests.golden.record_token_ids import CHATS, RECORD, TEXTS

if TYPE_CHECKING:
    from equivtest.decoder.weights import Checkpoint

EXPECTED = json.loads(RECORD.read_text("utf-8"))


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_texts_have_transformers_ids(index: int, smollm2_checkpoint: Checkpoint) -> None:
    tokenizer = smollm2_checkpoint.tokenizer
    ids = tokenizer.encode(TEXTS[index])
    assert ids == EXPECTED["texts"][index]
    assert tokenizer.decode(ids) == EXPECTED["decoded"][index] == TEXTS[index]


@pytest.mark.parametrize("index", range(len(CHATS)))
def test_chats_have_transformers_ids(index: int, smollm2_checkpoint: Checkpoint) -> None:
    assert smollm2_checkpoint.tokenizer.encode_chat(CHATS[index]) == EXPECTED["chats"][index]


def test_a_space_before_a_foreign_digit_stands_alone(smollm2_checkpoint: Checkpoint) -> None:
    tokenizer = smollm2_checkpoint.tokenizer
    assert tokenizer.encode(" ²") == tokenizer.encode(" ") + tokenizer.encode("²")


@pytest.mark.parametrize("text", TEXTS)
def test_pre_tokenizers_cut_as_those_of_transformers(text: str) -> None:
    """Reference: the patterns of transformers' Qwen2 tokenizer and of its converter for Llama 3's."""
    for pre, pattern in (("qwen2", PRETOKENIZE_REGEX), ("llama-bpe", TikTokenConverter().pattern)):
        theirs = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        assert tokenizer_module._pre_tokenizer(pre).pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
