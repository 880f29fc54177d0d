"""A speculative decoder in numpy: exact where it should be, wrong where a test wants it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.scorer import RIGHT, Law, Reading
from equivtest.engines.base import Capabilities
from equivtest.records import SPEC, Generation, LawColumns, Origin, Request, Route, SamplingParams
from equivtest.rng import Purpose, uniforms

VOCAB_SIZE = 12


class FakeEngine:
    """The law at a position depends on the prompt and the position alone; the draft is its likeliest token, one a step.

    `on_epsilon` inflates the acceptance of arms on and on_null: a decoder whose speculative path is wrong. The planted
    fault of the biased arm has `biased_epsilon`. Texts stop at a stop token; `runs_on` and `ends_after` (a number of
    tokens) are faults of that on the speculative path. What it reports there is off by `logprob_error` nats.
    """

    def __init__(
        self,
        *,
        on_epsilon: float = 0.0,
        biased_epsilon: float = 0.5,
        drift: float = 0.0,
        speculates: bool = True,
        scorer: "FakeScorer | None" = None,
        has_law: bool = True,
        runs_on: bool = False,
        ends_after: int | None = None,
        logprob_error: float = 0.0,
        reports: bool = True,
        dtype: str | None = None,
        capabilities: Capabilities | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self.capabilities, self.said = capabilities or Capabilities(takes_faults=True), notes or {}
        self.on_epsilon, self.biased_epsilon = on_epsilon, biased_epsilon
        self.drift, self.speculates = drift, speculates
        self.runs_on, self.ends_after, self.logprob_error = runs_on, ends_after, logprob_error
        self.reports = reports
        self._dtype = {"dtype": dtype} if dtype else {}
        self.num_calls = 0
        self._scorer = (scorer or FakeScorer()) if has_law else None

    def encode_prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return tuple(messages[-1]["content"].encode())

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>"

    def describe(self) -> Mapping[str, Any]:
        return {"engine": "fake", "model": "fake", "drafter": "mode", "vocab_size": VOCAB_SIZE, **self._dtype}

    def scorer(self) -> "FakeScorer | None":
        return self._scorer

    def refusal(self, params: SamplingParams) -> str | None:
        return None

    def notes(self) -> Mapping[str, str]:
        return self.said

    def close(self) -> None:
        pass

    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculative: bool,
        fault: Callable[[Any], Any] | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        self.num_calls += 1
        epsilon = self.biased_epsilon if fault else self.on_epsilon
        # A drifting engine changes from call to call: its A/A control must see it.
        extra = self.drift * self.num_calls if speculative else 0.0
        speculative = speculative and self.speculates
        keys, longest = np.array([r.stream_key for r in requests]), max(r.max_tokens for r in requests)
        purposes = (Purpose.ACCEPT, Purpose.RECOVER) if speculative else (Purpose.PLAIN,)
        coins = np.stack([uniforms(keys[:, None], np.arange(longest), purpose) for purpose in purposes], axis=1)
        generations = [
            self._one(request, own[:, : request.max_tokens], speculative, min(epsilon + extra, 1.0))
            for request, own in zip(requests, coins, strict=True)
        ]
        if on_tokens is not None:
            on_tokens(sum(len(generation.token_ids) for generation in generations))
        return generations

    def _one(self, request: Request, coins: np.ndarray, speculative: bool, epsilon: float) -> Generation:
        """coins: of every purpose and position."""
        length = request.max_tokens
        position = np.arange(length)
        laws = laws_of(request.prompt_token_ids, length, request.params)
        draft = laws.argmax(axis=1)
        if not speculative:
            tokens = self._draw(laws, coins[0])
            accepted = np.zeros(length, bool)
        else:
            accepted = coins[0] < laws[position, draft] + epsilon
            residual = laws.copy()
            residual[position, draft] = 0.0
            recovered = self._draw(residual, coins[1])
            tokens = np.where(accepted, draft, recovered)
        origins = np.where(accepted, Origin.ACCEPTED, Origin.RECOVERED) if speculative else [Origin.PLAIN] * length
        logprobs = np.log(laws[position, tokens]) + self.logprob_error * speculative
        end = length if self.runs_on and speculative else lengths_of(tokens[None], request.params)[0]
        if self.ends_after and speculative:
            end = min(end, self.ends_after)
        return Generation(
            token_ids=tokens[:end].astype(np.int32),
            origins=tuple(Origin(origin) for origin in origins[:end]),
            slots=np.full(end, 0 if speculative else -1, np.int8),
            draft_token_ids=(draft[:end] if speculative else np.full(end, -1)).astype(np.int32),
            steps=position[:end].astype(np.int32),
            batch_rows=np.zeros(end, np.int32),
            num_drafts=np.full(end, 1 if speculative else 0, np.int8),
            route=SPEC if speculative else Route(False, "speculation is off"),
            logprobs=logprobs[:end].astype(np.float32) if self.reports and request.logprobs == "processed" else None,
        )

    @staticmethod
    def _draw(laws: np.ndarray, coins: np.ndarray) -> np.ndarray:
        cumulative = np.cumsum(laws, axis=1)
        return (cumulative > (coins * cumulative[:, -1])[:, None]).argmax(axis=1)


def laws_of(prompt_token_ids: Sequence[int], num_positions: int, params: SamplingParams) -> np.ndarray:
    """[num_positions, VOCAB_SIZE], read-only; of the parameters only the stop tokens and min_tokens count."""
    return _laws(len(prompt_token_ids), num_positions, params)


@functools.cache
def _laws(seed: int, num_positions: int, params: SamplingParams) -> np.ndarray:
    laws = np.random.default_rng(seed).dirichlet(np.ones(VOCAB_SIZE), size=num_positions)
    laws[: params.min_tokens, [token for token in params.stop_token_ids if token < VOCAB_SIZE]] = 0.0
    laws /= laws.sum(axis=1, keepdims=True)
    laws.flags.writeable = False
    return laws


def lengths_of(tokens: np.ndarray, params: SamplingParams) -> np.ndarray:
    """[n] tokens of each row of [n, num_positions] up to its first stop token, that one included."""
    stops = np.isin(tokens, params.stop_token_ids)
    return np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, tokens.shape[1])


class FakeScorer:
    """What the laws say of finished samples. No law has ties, so ranks need no care. `heat` makes them other laws."""

    def __init__(self, heat: float = 1.0) -> None:
        self.heat, self.num_calls = heat, 0

    def score_as(self, samples: FinishedSamples, laws: Sequence[Law]) -> list[LawColumns]:
        return [self.score(dataclasses.replace(samples, params=law.params), reading=law.reading) for law in laws]

    def score(
        self,
        samples: FinishedSamples,
        *,
        on_tokens: Callable[[int], None] | None = None,
        reading: Reading = RIGHT,
    ) -> LawColumns:
        tokens, drafts = samples.token_ids, samples.draft_token_ids
        position = np.arange(tokens.shape[1])
        self.num_calls += 1
        laws = laws_of(samples.prompt_token_ids, tokens.shape[1], samples.params) ** (1 / self.heat)
        laws = laws[np.clip(position + reading.row, 0, len(laws) - 1)]
        lengths = lengths_of(tokens, samples.params)
        ended = position >= lengths[:, None]
        last = np.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        # A text that has stopped has one law: its stop token again.
        laws = np.where(ended[:, :, None], np.arange(VOCAB_SIZE) == last[:, :, None], laws)
        laws /= laws.sum(axis=2, keepdims=True)
        p_token, has_draft = np.take_along_axis(laws, tokens[:, :, None], axis=2)[:, :, 0], drafts >= 0
        p_draft = np.where(has_draft, np.take_along_axis(laws, drafts[:, :, None], axis=2)[:, :, 0], 0.0)
        coins = [uniforms(samples.stream_keys[:, None], position, Purpose.SCORE, draw=draw) for draw in range(2)]
        above = (laws * (laws > p_token[:, :, None])).sum(axis=2)
        before = (laws * (np.arange(VOCAB_SIZE) < tokens[:, :, None])).sum(axis=2)
        logs = np.log(np.where(laws > 0, laws, 1.0))
        entropy = -(laws * logs).sum(axis=2)
        variance = (laws * (-logs - entropy[:, :, None]) ** 2).sum(axis=2)
        if on_tokens is not None:
            on_tokens(tokens.size)
        return LawColumns(
            p_token=p_token,
            has_draft=has_draft,
            p_draft=p_draft,
            q_token=(has_draft & (tokens == drafts)).astype(float),
            q_mean=p_draft,
            q_variance=p_draft * (1 - p_draft),
            pit_rank=np.clip(above + coins[0] * p_token, 0, 1),
            pit_vocab=np.clip(before + coins[1] * p_token, 0, 1),
            entropy=np.abs(entropy),
            var_surprisal=variance,
            support_violation=p_token == 0,
        )
