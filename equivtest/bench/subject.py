"""The decoder that a benchmark times, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from equivtest.bench.random_model import random_engine, shape_named
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Request, SamplingParams
from equivtest.rng import stream_key

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
NAMES = {GREEDY: "greedy", SAMPLED: "T .8 top_p .95"}


def open_engine(
    options: EngineOptions, random_model: str | None = None, *, on_message: Callable[[str], None] | None = None
) -> DecoderEngine:
    """The decoder that `options` describe, or with `random_model` a random one of that shape instead.

    Raises what `DecoderEngine.open` and `random_engine` do.
    """
    if random_model is None:
        return DecoderEngine.open(options, on_message=on_message)
    return random_engine(random_model, shape_named(random_model), options)


def requests_for(engine: DecoderEngine, params: Sequence[SamplingParams], *, max_tokens: int) -> list[Request]:
    """One request per entry of `params`, on the built-in prompts in turn; the same coins in every call."""
    prompts = [engine.encode_prompt(prompt.conversation) for prompt in load_prompt_set("default").prompts]
    return [
        Request(
            prompt_token_ids=prompts[index % len(prompts)],
            params=law,
            stream_key=stream_key("bench", index),
            max_tokens=max_tokens,
        )
        for index, law in enumerate(params)
    ]
