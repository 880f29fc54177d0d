"""Tokenizers built from metadata: special tokens, the begin-of-text rule, display text and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from equivtest.decoder.chat_template import ChatTemplate
from equivtest.decoder.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from equivtest.errors import InvalidSetting, UnsupportedModel
from tests.decoder.gguf_files import CHAT_TEMPLATE, SPECIAL, tiny_bpe, tokenizer_metadata

CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def from_metadata(pre: str = "gpt-2", **more: object) -> Tokenizer:
    return tokenizer_from_gguf("m", tokenizer_metadata(pre, **more))


def folder_tokenizer(path: Path, **config: object) -> Tokenizer:
    tiny_bpe().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer_from_folder(path)[0]


def test_metadata_and_tokenizer_json_give_the_same_ids(tmp_path: Path) -> None:
    texts = ["the cat sat on the mat", "they're 1 22 333 \n\n x", "naïve 東京 🙂", "<|user|>hi<|end|>"]
    folder = folder_tokenizer(tmp_path)
    for text in texts:
        assert from_metadata().encode(text) == folder.encode(text)


def test_special_tokens_are_taken_whole() -> None:
    tokenizer = from_metadata()
    assert tokenizer.encode("<|user|>the<|end|>")[::2] == [SPECIAL.index("<|user|>"), SPECIAL.index("<|end|>")]
    assert len(tokenizer.encode("<|use|>")) > 3


@pytest.mark.parametrize(
    ("pre", "keys", "begins"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_the_begin_of_text_rule_is_the_files(pre: str, keys: dict[str, object], begins: bool) -> None:
    plain = from_metadata("gpt-2").encode("the cat")
    assert from_metadata(pre, **keys).encode("the cat") == ([0] if begins else []) + plain


def test_a_chat_never_gets_a_second_begin_of_text() -> None:
    assert from_metadata(add_bos_token=True).encode_chat(CHAT)[0] == SPECIAL.index("<|user|>")


def test_pre_tokenizers_cut_digits_each_in_its_way() -> None:
    """Merges cannot cross a cut: 333 is one token only where digits may stay together."""
    metadata = tokenizer_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "33", "333", "3333"]  # type: ignore[misc]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 1, 1]  # type: ignore[misc]
    metadata["tokenizer.ggml.merges"] = [*metadata["tokenizer.ggml.merges"], "3 3", "33 3", "33 33"]  # type: ignore[misc]
    lengths = {}
    for pre in ("gpt-2", "default", "smollm", "qwen2", "llama-bpe"):
        tokenizer = tokenizer_from_gguf(
            "m", metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
        )
        lengths[pre] = len(tokenizer.encode("3333"))
    assert lengths == {"gpt-2": 1, "default": 1, "smollm": 4, "qwen2": 4, "llama-bpe": 2}


def test_every_byte_survives_and_has_a_display_text() -> None:
    tokenizer = from_metadata()
    text = "tab\t nul\x00 é 東 🙂 \\x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(tokenizer.token_text(i) for i in tokenizer.encode("tab\t nul\x00 \\x")) == "tab\t nul\x00 \\x"
    assert [tokenizer.token_text(i) for i in tokenizer.encode("é")] == ["\\xc3", "\\xa9"]


def test_display_text_of_specials_padding_and_wrong_ids() -> None:
    tokenizer = from_metadata()
    assert tokenizer.token_text(0) == "<|end|>"
    assert tokenizer.token_text(tokenizer.vocab_size) == f"<unused {tokenizer.vocab_size}>"
    with pytest.raises(InvalidSetting, match="token_id"):
        tokenizer.token_text(-1)


def test_a_gguf_file_names_the_tokens_that_end_a_text() -> None:
    assert from_metadata().eos_token_ids == (0,)
    assert from_metadata(eos_token_id=2, eot_token_id=1, eom_token_id=2).eos_token_ids == (1, 2)
    assert from_metadata(eos_token_id=2**32 - 1).eos_token_ids == ()


@pytest.mark.parametrize(
    ("own", "model", "generation", "expected"),
    [
        ("<|end|>", None, None, (0,)),
        ({"content": "<|user|>"}, None, None, (1,)),
        (None, {"eos_token_id": 2}, None, (2,)),
        ("<|end|>", {"eos_token_id": 2}, {"eos_token_id": [7, 0]}, (0, 7)),
        ("<|end|>", {"eos_token_id": 2}, {"do_sample": True}, (0,)),
        ("no such token", None, {"eos_token_id": 5}, (5,)),
        (None, None, None, ()),
    ],
)
def test_a_folder_names_the_tokens_that_end_a_text(
    own: object, model: object, generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    for name, table in (("config.json", model), ("generation_config.json", generation)):
        if table is not None:
            (tmp_path / name).write_text(json.dumps(table))
    assert folder_tokenizer(tmp_path, **({} if own is None else {"eos_token": own})).eos_token_ids == expected


def test_without_a_template_a_chat_is_its_plain_text() -> None:
    metadata = {k: v for k, v in tokenizer_metadata(add_bos_token=True).items() if k != "tokenizer.chat_template"}
    tokenizer = tokenizer_from_gguf("m", metadata)
    assert tokenizer.encode_chat(CHAT) == tokenizer.encode("the cat\n\nsat")
    assert tokenizer.encode_chat(CHAT)[0] == 0


@pytest.mark.parametrize("place", ["config", "named list", "jinja file"])
def test_a_folders_template_is_found_wherever_it_lies(place: str, tmp_path: Path) -> None:
    wrong = "{{ raise_exception('not this one') }}"
    config: dict[str, object] = {"eos_token": {"content": "<|end|>"}, "chat_template": CHAT_TEMPLATE}
    if place == "named list":
        config["chat_template"] = [
            {"name": "tool_use", "template": wrong},
            {"name": "default", "template": CHAT_TEMPLATE},
        ]
    if place == "jinja file":
        config["chat_template"] = wrong
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert folder_tokenizer(tmp_path, **config).encode_chat(CHAT) == from_metadata().encode_chat(CHAT)


TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if loop.first %}\n[{{ bos_token }}]\n  {% endif %}\n{{ m.role }}\n"
    "{% endfor %}\n",
    "tojson": "{{ messages | tojson }}{{ {'a': '<&é>'} | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "absent tools": "{% if tools %}tools{% endif %}{% if documents is none %}none{% endif %}{{ eos_token }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "year": "{{ strftime_now('%Y') | length }}",
    "generation prompt": "{% if add_generation_prompt %}go{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    hf = PreTrainedTokenizerFast(tokenizer_object=tiny_bpe(), bos_token="<|user|>", eos_token="<|end|>")
    expected = hf.apply_chat_template(CHAT, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False)
    ours = ChatTemplate("m", TEMPLATES[name], {"bos_token": "<|user|>", "eos_token": "<|end|>"}).render(CHAT)
    assert ours == expected
    assert ours


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "does not compile"),
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages[9].content.x }}", "refuses"),
    ],
)
def test_a_template_that_fails_or_oversteps_is_refused(template: str, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        ChatTemplate("m", template, {}).render(CHAT)


@pytest.mark.parametrize("key", ["tokens", "merges", "model", "pre"])
def test_metadata_that_is_missing_or_foreign_is_named(key: str) -> None:
    wrong: dict[str, object] = {"tokens": [], "merges": [], "model": "llama", "pre": "tekken"}
    with pytest.raises(UnsupportedModel, match=f"tokenizer.ggml.{key}|{key}"):
        from_metadata(**{"pre": "gpt-2"} | {key: wrong[key]} if key == "pre" else {key: wrong[key]})


@pytest.mark.parametrize("merges", [["nothing here"], ["noblank"]])
def test_merges_that_do_not_fit_the_tokens_are_refused(merges: list[str]) -> None:
    with pytest.raises(UnsupportedModel, match="merges do not fit"):
        from_metadata(merges=merges)
