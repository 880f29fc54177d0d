"""Makes the models `tiny` and `tiny-draft` that ship with the package.

    python -m equivtest.bench.tiny_model --out DIR

Both learn, from nothing, the answers of the built-in model to a few hundred prompts: real language models with a lively
law, small enough that a whole catalogue of decoder faults is measured in seconds on a CPU. Needs the extra `test`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from equivtest.bench.tiny_text import END, Chat, sample_text
from equivtest.bench.tiny_training import Shape, held_out_loss, train
from equivtest.decoder.chat_template import ChatTemplate
from equivtest.files import write_whole

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELD_OUT_PROMPTS = 20
"""One prompt in so many is not trained on, with all its answers."""
SHAPES = {
    "tiny": Shape(
        hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=320, num_steps=800,
        exit_weight=0.3,
    ),
    "tiny-draft": Shape(
        hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=192, num_steps=800,
        exit_weight=0.0,
    ),
}  # fmt: skip

Tell = Callable[[str], None]


def make(out: Path, shapes: Mapping[str, Shape], *, seed: int, text: Path | None, tell: Tell) -> None:
    """Write a folder for each shape into `out`.

    text: where the teacher's text is kept; made when it is not there. None: it is not kept.
    """
    chats = read_or_sample(text, seed, tell)
    tell(f"text: sha256 {hashlib.sha256(_lines(chats).encode()).hexdigest()}")
    tokenizer = train_tokenizer(chats)
    held_out = set(sorted({chat.question for chat in chats})[::HELD_OUT_PROMPTS])
    to_train: list[list[int]] = []
    to_test: list[list[int]] = []
    for chat in _shuffled(chats, seed):
        (to_test if chat.question in held_out else to_train).append(tokenizer.encode(_conversation(chat)).ids)
    num_tokens = sum(len(ids) for ids in to_train)
    tell(f"text: {len(to_train):,} chats of {num_tokens:,} tokens to train on, {len(to_test):,} chats held out")
    for name, shape in shapes.items():
        config = shape.config() | {"vocab_size": VOCAB_SIZE, "eos_token_id": SPECIAL_TOKENS.index(END)}
        tell(f"train: {name}")
        model = train(config, shape, to_train, seed=seed, tell=tell)
        tell(f"train: {name}, held-out loss {held_out_loss(model, to_test):.3f} nats a token")
        write_folder(out / name, config, model, tokenizer)
        tell(f"write: {out / name}")


def read_or_sample(text: Path | None, seed: int, tell: Tell) -> list[Chat]:
    """The teacher's text, one JSON table a line in the file."""
    if text is not None and text.is_file():
        tell(f"text: read from {text}")
        return [Chat(**json.loads(line)) for line in text.read_text("utf-8").splitlines()]
    chats = sample_text(seed, tell)
    if text is not None:
        write_whole(text, _lines(chats))
    return chats


def train_tokenizer(chats: list[Chat]) -> Tokenizer:
    """Byte-level BPE; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for chat in chats for part in chat), trainer)
    return tokenizer


def write_folder(path: Path, config: dict[str, Any], model: Any, tokenizer: Tokenizer) -> None:
    """A Hugging Face folder with bfloat16 weights; the head is the embedding and is not written twice."""
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / "config.json", json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    del weights["lm_head.weight"]
    write_whole(path / "model.safetensors", save(weights, metadata={"format": "pt"}))
    write_whole(path / "tokenizer.json", tokenizer.to_str())
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    write_whole(path / "tokenizer_config.json", json.dumps(table, indent=2) + "\n")


def _conversation(chat: Chat) -> str:
    template = ChatTemplate("tiny", CHAT_TEMPLATE, {})
    return f"{template.render([{'role': 'user', 'content': chat.question}])}{chat.answer}{END}\n"


def _shuffled(chats: list[Chat], seed: int) -> list[Chat]:
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed))
    return [chats[i] for i in order.tolist()]


def _lines(chats: list[Chat]) -> str:
    return "".join(json.dumps(chat._asdict(), ensure_ascii=False) + "\n" for chat in chats)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the models and their card.")
@click.option("--seed", default=1, show_default=True, help="Of the text, of the order, and of the first weights.")
@click.option("--text", type=click.Path(path_type=Path), help="JSONL file that keeps the teacher's text for next time.")
@click.option("--steps", type=click.IntRange(1), help="Training steps of each model, for a quick try.")
def main(out: Path, seed: int, text: Path | None, steps: int | None) -> None:
    """Sample the text, train the tokenizer, the target and the draft model, and write them: about half an hour."""
    shapes = {name: replace(shape, num_steps=steps or shape.num_steps) for name, shape in SHAPES.items()}
    make(out, shapes, seed=seed, text=text, tell=lambda line: click.echo(line, err=True))


if __name__ == "__main__":
    main()
