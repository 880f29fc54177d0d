"""Text to token ids and back, from GGUF metadata or from a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from equivtest.decoder.chat_template import ChatTemplate
from equivtest.errors import InvalidSetting, ModelUnavailable, UnsupportedModel

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS = ("default", "gpt-2", "llama-bpe", "qwen2", "smollm")
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched whole, ahead of the merges
_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


class Tokenizer:
    """A tokenizer and its chat template.

    Ids and texts are those of transformers' tokenizer for the same files.
    """

    def __init__(
        self,
        model: str,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """eos_token_ids: the tokens with which the model ends its text."""
        self.eos_token_ids = eos_token_ids
        self._model, self._backend, self._chat_template = model, backend, chat_template
        added = sorted(backend.get_added_tokens_decoder().items())
        self._added = {id_: token.content for id_, token in added}
        self.special_token_ids = tuple(id_ for id_, token in added if token.special)
        """Tokens that stand for no text, rising."""
        self._byte_level = "ByteLevel" in str(backend.decoder)

    @property
    def vocab_size(self) -> int:
        """Ids that have a text; the model's vocabulary may be padded past it."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, with the model's begin-of-text token where its rule asks for one.

        Special tokens written out in the text become those tokens.
        """
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a part of a text: as `encode`, without a begin-of-text token."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat (tables with `role` and `content`) up to and including the header of the answer.

        A model without a chat template gets the contents as plain text, one message a paragraph.
        """
        if self._chat_template is None:
            return self.encode("\n\n".join(message["content"] for message in messages))
        return self.encode_text(self._chat_template.render(messages))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ids, special tokens written out unless skipped; bytes that are not UTF-8 become replacement
        characters."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `tokenizer_from_folder` reads as the same tokenizer but
        for `eos_token_ids`, which the model's own files name."""
        self._backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self._chat_template is not None:
            config |= {"chat_template": self._chat_template.source, **self._chat_template.special_tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def token_text(self, token_id: int) -> str:
        """One token's own text for display; bytes that are not UTF-8 on their own are written as \\xNN.

        An id of the padding between the tokenizer's vocabulary and the model's shows as <unused ID>.
        """
        if token_id < 0:
            raise InvalidSetting("token_id", token_id, "must be at least 0")
        if token_id in self._added:
            return self._added[token_id]
        token = self._backend.id_to_token(token_id)
        if token is None:
            return f"<unused {token_id}>"
        if self._byte_level and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token).decode("utf-8", "backslashreplace")
        return str(token).replace("▁", " ")


def tokenizer_from_gguf(model: str, metadata: Mapping[str, object]) -> Tokenizer:
    """Build from `tokenizer.*` metadata. Raises UnsupportedModel naming the key that is not implemented."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UnsupportedModel(model, f"tokenizer.ggml.model = {kind!r} is not implemented (only gpt2)")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModel(model, f"tokenizer.ggml.pre = {pre!r} is not implemented (only {known})")
    tokens = cast("list[str]", metadata.get("tokenizer.ggml.tokens", []))
    merges = cast("list[str]", metadata.get("tokenizer.ggml.merges", []))
    kinds = cast("list[int]", metadata.get("tokenizer.ggml.token_type", [1] * len(tokens)))
    if not tokens or not merges or len(kinds) != len(tokens):
        raise UnsupportedModel(model, "tokenizer.ggml.tokens, merges or token_type is missing")
    try:
        pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
        bpe = BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UnsupportedModel(model, f"tokenizer.ggml.merges do not fit its tokens: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(str(pre))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_added(tokens, kinds, _CONTROL))
    backend.add_tokens(_added(tokens, kinds, _USER_DEFINED))
    special = {
        name: tokens[id_]
        for key, name in _SPECIAL_NAMES.items()
        if isinstance(id_ := metadata.get(f"tokenizer.ggml.{key}_token_id"), int) and 0 <= id_ < len(tokens)
    }
    # llama.cpp's rule where the key is absent: only the Llama 3 family begins with its begin-of-text token.
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    source = metadata.get("tokenizer.chat_template")
    ends = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return Tokenizer(
        model,
        backend,
        ChatTemplate(model, source, special) if isinstance(source, str) else None,
        eos_token_ids=_distinct_ids(id_ for id_ in ends if isinstance(id_, int) and id_ < len(tokens)),
    )


def tokenizer_from_folder(path: Path) -> tuple[Tokenizer, list[Path]]:
    """Build from tokenizer.json and, if there, tokenizer_config.json, chat_template.jinja, generation_config.json; and
    the files read.

    What ends a text is the tokenizer's end-of-text token and what generation_config.json names, in its absence
    config.json, as in transformers and vLLM.
    """
    file, config_file, template_file, generation_file = (
        path / name
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    )
    if not file.is_file():
        raise ModelUnavailable(str(path), "the folder has no tokenizer.json", "fetch the whole folder again")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
        config = _json(config_file)
        generation = _json(generation_file if generation_file.is_file() else path / "config.json")
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UnsupportedModel(str(path), f"its tokenizer files are not readable: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if template_file.is_file():
        source = template_file.read_text(encoding="utf-8")
    special = {}
    for name in _SPECIAL_NAMES.values():
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[name] = token
    template = ChatTemplate(str(path), source, special) if isinstance(source, str) else None
    named = generation.get("eos_token_id")
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    ends = _distinct_ids([own, *(named if isinstance(named, list) else [named])])
    read = (file, config_file, template_file, generation_file)
    return Tokenizer(str(path), backend, template, eos_token_ids=ends), [f for f in read if f.is_file()]


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _distinct_ids(values: Iterable[object]) -> tuple[int, ...]:
    return tuple(sorted({value for value in values if isinstance(value, int) and value >= 0}))


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = Regex(_LLAMA3_PATTERN if pre == "llama-bpe" else _QWEN2_PATTERN)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _added(tokens: Sequence[str], kinds: Sequence[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, its_kind in zip(tokens, kinds, strict=True)
        if its_kind == kind
    ]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Mapping[str, int] = _byte_alphabet()
