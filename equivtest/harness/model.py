"""An engine as a model of the harness: it answers what a task asks, by sampling."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lm_eval.api.model import LM

from equivtest.engines.base import Engine, StagesWrap
from equivtest.errors import InvalidSetting
from equivtest.records import Request, SamplingParams
from equivtest.rng import stream_key

DEFAULT_MAX_TOKENS = 256
"""Longest answer to a task that does not say `max_gen_toks`."""


class EngineModel(LM):  # type: ignore[misc]
    """One arm of an engine. A question is a conversation, in the form that the engine's model has.

    The first time that a task is asked it is answered under every seed, so that its prompts are computed once; each
    time that it is asked again it gets the answers of the next seed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        speculative: bool,
        temperature: float,
        num_seeds: int,
        stream: Sequence[object],
        fault: StagesWrap | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        """temperature: in place of the task's own. stream: names the random streams, with a seed and
        a question's number."""
        super().__init__()
        self._engine, self._speculative, self._fault = engine, speculative, fault
        self._params = SamplingParams(temperature=temperature, ignore_eos=False)
        self._stream, self._num_seeds, self._on_tokens = tuple(stream), num_seeds, on_tokens
        self._answers: list[list[str]] = []
        self.num_tokens = 0
        """Tokens of the answers so far; fewer than were allowed where answers end early."""

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The answer to each request under the next seed, up to the first of its stop texts."""
        if not self._answers:
            self._answers = self._ask(requests)
        return self._answers.pop(0)

    def _ask(self, requests: Sequence[Any]) -> list[list[str]]:
        """Answers [num_seeds][num_requests]."""
        settings = [one.args[1] for one in requests]
        prompts = [self._engine.encode_prompt(json.loads(one.args[0])) for one in requests]
        asked = [
            Request(
                prompt_token_ids=prompt,
                params=self._params,
                stream_key=stream_key(*self._stream, seed, index),
                max_tokens=int(own.get("max_gen_toks", DEFAULT_MAX_TOKENS)),
                label=f"question {index}, seed {seed}",
            )
            # The seeds of a question side by side: they share its prompt.
            for index, (prompt, own) in enumerate(zip(prompts, settings, strict=True))
            for seed in range(self._num_seeds)
        ]
        answers = self._engine.generate(
            asked, speculative=self._speculative, fault=self._fault, on_tokens=self._on_tokens
        )
        self.num_tokens += sum(len(answer.token_ids) for answer in answers)
        texts = [self._engine.text(answer.token_ids.tolist()) for answer in answers]
        return [
            [
                _before_first(text, own.get("until") or ())
                for text, own in zip(texts[seed :: self._num_seeds], settings, strict=True)
            ]
            for seed in range(self._num_seeds)
        ]

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text that `generate_until` reads again."""
        if not add_generation_prompt:
            raise InvalidSetting("task", "gen_prefix", "no engine takes the beginning of an answer; take another task")
        return json.dumps(list(chat_history))

    @property
    def tokenizer_name(self) -> str:
        return "conversation"

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        raise InvalidSetting("task", requests[0].task_name, "asks for log-likelihoods, and samples nothing")

    loglikelihood_rolling = loglikelihood


def _before_first(text: str, stops: Sequence[str] | str) -> str:
    for stop in (stops,) if isinstance(stops, str) else stops:
        text = text.partition(stop)[0] if stop else text
    return text
