"""The text that the tiny model learns from: answers sampled from the built-in model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from equivtest.bench.tiny_prompts import prompts
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.records import Request, SamplingParams
from equivtest.rng import stream_key

TEACHER = "smollm2-135m"
PARAMS = SamplingParams(temperature=0.8, top_p=0.95)
ANSWERS_PER_PROMPT = 8
MAX_TOKENS = 60
"""Of the teacher's tokens; a longer answer is cut back to the end of a sentence."""
END = "<|im_end|>"

_SENTENCE_END = re.compile(r"[.!?](?=\s)|\n")


class Chat(NamedTuple):
    """One question and its answer."""

    question: str
    answer: str


def sample_text(seed: int, tell: Callable[[str], None]) -> list[Chat]:
    """`ANSWERS_PER_PROMPT` answers of the teacher to every prompt, in a fixed order; those without a sentence drop out.

    The same for the same seed, torch version and kind of processor.
    """
    engine = DecoderEngine.open(EngineOptions(model=TEACHER, drafter="ngram"), on_message=tell)
    questions = [question for question in prompts(seed) for _ in range(ANSWERS_PER_PROMPT)]
    requests = [
        Request(
            prompt_token_ids=engine.encode_prompt([{"role": "user", "content": question}]),
            params=PARAMS,
            stream_key=stream_key("tiny model", seed, number),
            max_tokens=MAX_TOKENS,
        )
        for number, question in enumerate(questions)
    ]
    done, total = 0, len(requests) * MAX_TOKENS

    def on_tokens(num_tokens: int) -> None:
        nonlocal done
        if done // 20_000 != (done + num_tokens) // 20_000:
            tell(f"text: {done + num_tokens:,} of {total:,} tokens")
        done += num_tokens

    generations = engine.generate(requests, speculative=False, on_tokens=on_tokens)
    answers = ["".join(map(engine.token_text, generation.token_ids.tolist())) for generation in generations]
    chats = [Chat(question, ended(answer)) for question, answer in zip(questions, answers, strict=True)]
    return [chat for chat in chats if chat.answer]


def ended(answer: str) -> str:
    """What stands before the end of the turn, or else up to the end of the last whole sentence; may be empty."""
    before, found, _ = answer.partition(END)
    if found:
        return before.strip()
    return before[: max((match.end() for match in _SENTENCE_END.finditer(before)), default=0)].strip()
