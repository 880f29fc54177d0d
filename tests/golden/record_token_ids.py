"""Writes token_ids.json: what transformers' AutoTokenizer makes of TEXTS and CHATS with the built-in model's file.

Run from the root of the source tree: python -m tests.golden.record_token_ids
AutoTokenizer takes a quarter of a minute to read a GGUF file, so its answers are recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RECORD = Path(__file__).with_name("token_ids.json")
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   three\tand a tab \n\n\n newlines\r\n",
    "def f(x: int) -> int:\n    return x ** 2  # 1_000_000\n\n\tif x != 3.14: pass",
    "They're here, aren't they? I'LL say we've NOT'd.",
    "1234567890 12.5e-3 0xFF 2024-12-31",
    "naïve café — “quotes” … 東京は日本の首都です。 Привет мир مرحبا",
    "emoji 🙂👩‍👩‍👧‍👦🇫🇷 and \u200b zero width \u0301 combining",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|> <|im_end|>spaced<repo_name>x",
    "<|im_star|> almost <im_end>",
    "\\frac{a}{b} \\sum_{i=0}^n x_i",
    "a" * 300,
    "\x00\x01\x7f\xff",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Bonjour\n\n"}],
    [
        {"role": "user", "content": "  hi "},
        {"role": "assistant", "content": "Hello <b>there</b> & \"you\""},
        {"role": "user", "content": "東京 <|im_end|> 🙂"},
    ],
]  # fmt: skip


def main() -> None:
    import transformers

    from equivtest.decoder.hub import resolve_model

    with TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(resolve_model("smollm2-135m"))
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    record = {
        "program": f"transformers {transformers.__version__}, AutoTokenizer",
        "texts": [tokenizer(text)["input_ids"] for text in TEXTS],
        "decoded": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in TEXTS],
        "chats": [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
            for chat in CHATS
        ],
    }
    RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
