"""A server as an engine: one that does not speculate for arm off, and one that does for the others.

Prompts are sent as token ids, and tokens are read as ids where the server tells them. Where it does not, its texts are
tokenised again: a function of the text, which histograms and whole samples may be compared by, and no more.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

import torch

import equivtest
from equivtest.decoder.hub import file_sha256, resolve_model
from equivtest.decoder.tokenizer import Tokenizer
from equivtest.decoder.weights import Checkpoint, load_checkpoint, load_tokenizer
from equivtest.engines.base import Capabilities, EngineOptions, Messages, StagesWrap
from equivtest.engines.batches import alike
from equivtest.engines.decoder import require_device
from equivtest.engines.draft_counters import DraftCounters, read_counters
from equivtest.engines.http_client import JsonClient, RequestRefused, Unreadable
from equivtest.engines.plain_generation import generation_of
from equivtest.engines.probes import PROBE_CHAT, probe_request, repeats_seeds
from equivtest.engines.reference_law import LawAsAsked, reference_scorer, stop_ids
from equivtest.engines.server_apis import Answer, Api, Choice, Prompt, check_answer, get_api
from equivtest.errors import EngineUnavailable, InvalidSetting, RequestFailed, UnsupportedModel
from equivtest.records import Generation, Request, SamplingParams

_SEEDS = 2**31 - 1
"""Servers take seeds below this one: the largest that all of them can hold is left out, some take it for none."""
_FORBIDDEN = -100.0
"""The strongest logit bias that OpenAI's interface takes."""


class ServerEngine:
    """Asks servers for samples. `open` finds out how they answer before anything is collected."""

    def __init__(
        self,
        options: EngineOptions,
        api: Api,
        client: JsonClient,
        tokenizer: Tokenizer,
        checkpoint: Checkpoint | None,
        tokenizer_sha256: str,
    ) -> None:
        assert options.server is not None  # checked by the registry
        self._options, self._server, self._api, self._client = options, options.server, api, client
        self._tokenizer, self._checkpoint, self._tokenizer_sha256 = tokenizer, checkpoint, tokenizer_sha256
        self._scorer: LawAsAsked | None = None
        self._served_model = options.server.served_model
        self._sends_text = self._retokenises = False
        self._lock = Lock()
        self._notes: dict[str, str] = {}
        self._num_texts = self._num_changed = 0
        self._told = DraftCounters(0, 0)
        """What answers told of drafts."""
        self._at_first: DraftCounters | None = None
        """What the server of arm on had counted before the first sample; None where it shows no counters."""

    @classmethod
    def open(cls, options: EngineOptions, *, on_message: Callable[[str], None] | None = None) -> ServerEngine:
        """Load the tokenizer, and the weights for the law where there are any, and ask the servers a few questions.

        Raises ModelUnavailable, UnsupportedModel, UnknownName, InvalidSetting, RequestFailed for a server that does not
        answer, and EngineUnavailable for one whose answers are no samples.
        """
        assert options.server is not None  # checked by the registry
        tell = on_message or (lambda line: None)
        require_device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        api = get_api(options.server.api)
        name = options.server.tokenizer or options.model
        path = resolve_model(name, on_progress=on_message)
        tokenizer, files = load_tokenizer(path)
        checkpoint = None
        if options.server.tokenizer is None:
            try:
                checkpoint = load_checkpoint(path)
            except UnsupportedModel as error:
                tell(f"samples are not held against a law: {error}")
        sha256 = checkpoint.sha256 if checkpoint else ",".join(file_sha256(file) for file in files)
        engine = cls(options, api, JsonClient(options.server), tokenizer, checkpoint, sha256)
        try:
            engine._probe()
        except BaseException:
            engine.close()
            raise
        for line in engine.notes().values():
            tell(line)
        return engine

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            decodes_plain=self._server.spec_off is not None, decodes_speculatively=self._server.spec_on is not None
        )

    def refusal(self, params: SamplingParams) -> str | None:
        if self._retokenises and (params.stop_token_ids or not params.ignore_eos):
            return "the server tells no token ids, so that it cannot be known which token ended a text"
        return self._api.refusal(self._asked(params))

    def encode_prompt(self, messages: Messages) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_chat(messages))

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=True)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculative: bool,
        fault: StagesWrap | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """Raises RequestFailed naming the first request that failed; those under way are waited for."""
        if fault is not None:
            raise InvalidSetting("fault", fault, "no fault can be put into a server")
        url = self._server.spec_on if speculative else self._server.spec_off
        if url is None:
            raise InvalidSetting("spec_on" if speculative else "spec_off", None, "this arm needs a server")
        texts: list[tuple[int, ...]] = [()] * len(requests)
        self._client.restart()
        with ThreadPoolExecutor(self._server.concurrency) as pool:
            asked: dict[Future[list[tuple[int, ...]]], int] = {}
            try:
                start = 0
                for batch in alike(requests, self._server.choices):
                    asked[pool.submit(self._sample, url, batch)] = start
                    start += len(batch)
                for done in as_completed(asked):
                    own = done.result()
                    texts[asked[done] : asked[done] + len(own)] = own
                    if on_tokens is not None:
                        on_tokens(sum(map(len, own)))
            except BaseException:
                self._client.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if speculative:
            self._note_drafts(url)
        return [generation_of(text, batch_row=row, speculative=speculative) for row, text in enumerate(texts)]

    def scorer(self) -> LawAsAsked | None:
        """The law of the same weights; None without them, or where the server does not tell its token ids."""
        if self._checkpoint is None or self._retokenises:
            return None
        if self._scorer is None:
            dtype = torch.bfloat16 if self._options.dtype == "bfloat16" else torch.float32
            scorer = reference_scorer(self._checkpoint, dtype=dtype, device=self._options.device)
            self._scorer = LawAsAsked(scorer, self._asked if self._forbids_eos else lambda params: params)
        return self._scorer

    def describe(self) -> Mapping[str, Any]:
        server, name = self._server, self._server.tokenizer or self._options.model
        return {
            "engine": "openai",
            "api": server.api,
            "model": self._served_model or Path(name).name,
            "drafter": "the server's",
            "tokenizer": Path(name).name if Path(name).exists() else name,
            "tokenizer_sha256": self._tokenizer_sha256,
            "vocab_size": self._checkpoint.config.vocab_size if self._checkpoint else self._tokenizer.vocab_size,
            "prompts_as": "text" if self._sends_text else "token ids",
            "token_ids": "tokenised again" if self._retokenises else "the server's",
            "choices": server.choices,
            "seeded": server.seeded,
            "forbid_eos": server.forbid_eos,
            "extra_body": dict(server.extra_body),
            "dtype": "bfloat16" if self._options.dtype == "bfloat16" else "float32",
            "equivtest": equivtest.__version__,
        }

    def notes(self) -> Mapping[str, str]:
        found = dict(self._notes)
        if self._client.repeats:
            reasons = ", ".join(f"{reason}: {number}" for reason, number in self._client.repeats.most_common())
            found["repeats"] = f"{self._client.repeats.total()} requests were sent again ({reasons})"
        if self._num_changed:
            found["retokenised"] += f"; that changed the number of tokens in {self._num_changed} of {self._num_texts}"
        return found

    def close(self) -> None:
        self._client.close()

    @property
    def _forbids_eos(self) -> bool:
        return self._server.forbid_eos or self._api.forbids_eos

    def _asked(self, params: SamplingParams) -> SamplingParams:
        """The parameters as the server is given them: end-of-text tokens are forbidden where they cannot be ignored."""
        if not (self._forbids_eos and params.ignore_eos):
            return params
        biases = dict(params.logit_bias) | dict.fromkeys(self._tokenizer.eos_token_ids, _FORBIDDEN)
        return dataclasses.replace(params, logit_bias=tuple(sorted(biases.items())))

    def _sample(self, url: str, batch: Sequence[Request]) -> list[tuple[int, ...]]:
        """Token ids of requests that are asked in one."""
        first, last = batch[0], batch[-1]
        label = first.label if len(batch) == 1 else f"{first.label} to {last.label}"
        answer = self._ask(url, first, len(batch), label)
        with self._lock:
            drafted, accepted = self._told
            self._told = DraftCounters(drafted + answer.num_drafted, accepted + answer.num_accepted)
        return [self._token_ids(choice, first, label) for choice in answer.choices]

    def _ask(self, url: str, request: Request, count: int, label: str) -> Answer:
        prompt: Prompt = request.prompt_token_ids
        if self._sends_text:
            prompt = self._tokenizer.decode(request.prompt_token_ids)
        seed = (request.stream_key if request.seed is None else request.seed) % _SEEDS if self._server.seeded else None
        asked = dataclasses.replace(request, params=self._asked(request.params))
        body = self._api.body(asked, prompt, count=count, seed=seed)
        if self._served_model is not None:
            body["model"] = self._served_model

        body |= self._server.extra_body

        def read(answer: Any) -> Answer:
            read = self._api.read(answer)
            check_answer(
                read, count, request.max_tokens, may_run_over=self._api.may_run_over, tells=not self._retokenises
            )
            return read

        return self._client.ask(f"{_root(url)}{self._api.path}", body, read, label=label)

    def _token_ids(self, choice: Choice, request: Request, label: str) -> tuple[int, ...]:
        """The text's tokens, as many as were asked for or up to its end. Raises RequestFailed for one that ends where
        nothing ends it: asking until it does not would be another law."""
        params, num = request.params, request.max_tokens
        ends = stop_ids(params.stop_token_ids, self._tokenizer.eos_token_ids, ignore_eos=params.ignore_eos)
        if self._retokenises:
            if choice.ended:
                raise _ended_early(label)
            token_ids = tuple(self._tokenizer.encode_text(choice.text)) or (0,)
            with self._lock:
                self._num_texts += 1
                self._num_changed += len(token_ids) != num
            return (*token_ids[:num], *token_ids[-1:] * (num - len(token_ids)))
        assert choice.token_ids is not None  # checked when it was read
        if len(choice.token_ids) < num and choice.token_ids[-1] not in ends:
            raise _ended_early(label)
        return choice.token_ids[:num]

    def _probe(self) -> None:
        """Ask every server whether it is there, takes token ids and tells them; whether other seeds give other texts,
        and the same seed the same one."""
        for url in (self._server.spec_off, self._server.spec_on):
            if url is not None:
                self._find_model(url)
                self._find_ways(url)
        for arm, url in (("off", self._server.spec_off), ("on", self._server.spec_on)):
            if url is not None:
                self._find_seeds(arm, url)
        self._told = DraftCounters(0, 0)
        if self._server.spec_on is not None:
            self._at_first = self._counted(self._server.spec_on)

    def _counted(self, url: str) -> DraftCounters | None:
        page = self._client.page(f"{_root(url)}/metrics")
        return None if page is None else read_counters(page)

    def _note_drafts(self, url: str) -> None:
        """What the server says of its drafts, by its answers or its counters. One that says nothing is trusted."""
        now, before = self._counted(url), self._at_first
        drafted, accepted = self._told if now is None or before is None else now.since(before)
        if drafted:
            self._notes["drafts"] = f"the server says that it accepted {accepted:,} of {drafted:,} drafts"
        elif now is not None or self._api.tells_drafts:
            self._notes["drafts"] = "the server of arm on counts no drafts: it does not seem to speculate"

    def _find_model(self, url: str) -> None:
        if self._served_model is not None or not self._api.names_models:
            return
        names = self._client.ask(f"{_root(url)}/v1/models", None, _model_names, label="the list of models")
        if len(names) != 1:
            raise InvalidSetting("served_model", None, f"name one of what the server has: {', '.join(names) or 'none'}")
        self._served_model = names[0]

    def _find_ways(self, url: str) -> None:
        request, label = self._probe_request(0), f"a first question to {url}"
        self._retokenises, told = True, self._retokenises  # whatever it tells is looked at
        try:
            answer = self._ask(url, request, 1, label)
        except RequestRefused as refused:
            if self._sends_text or not self._api.takes_text:
                raise
            self._sends_text = True
            answer = self._ask(url, request, 1, label)
            own, counted = len(request.prompt_token_ids), answer.num_prompt_tokens
            self._notes["prompts"] = f"prompts were sent as text: the server takes no token ids ({refused.problem})"
            if counted not in (None, own):
                self._notes["prompts"] += f"; it makes {counted} tokens of one where the tokenizer makes {own}"
        tells = answer.choices[0].token_ids is not None
        if not tells and not self._api.takes_text:
            raise EngineUnavailable("openai", f"{url} tells no token ids, which api {self._server.api} does")
        self._retokenises = told or not tells
        if self._retokenises:
            self._notes["retokenised"] = (
                "the server tells no token ids: its texts were tokenised again, and are not held against a law"
            )

    def _find_seeds(self, arm: str, url: str) -> None:
        repeats = repeats_seeds(lambda seed: self._sample(url, [self._probe_request(seed)])[0])
        self._num_texts = self._num_changed = 0
        if repeats is None:
            raise EngineUnavailable("openai", f"{url} gives the same text to every seed: such texts are no samples")
        if self._server.choices > 1:
            together = self._sample(url, [self._probe_request(1)] * min(self._server.choices, 4))
            if len(set(together)) == 1:
                reason = f"{url} gives the same text for every choice of a request; ask with --choices 1"
                raise EngineUnavailable("openai", reason)
        if self._server.seeded and not repeats:
            self._notes[f"seeds {arm}"] = f"the server of arm {arm} does not repeat a text for its seed"

    def _probe_request(self, seed: int) -> Request:
        return probe_request(self.encode_prompt(PROBE_CHAT), seed)


def _ended_early(label: str) -> RequestFailed:
    remedy = "where the server cannot ignore the end of text, forbid it with --forbid-eos"
    return RequestFailed(label, "its text ended where nothing ends a text", remedy)


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _model_names(answer: Any) -> list[str]:
    try:
        return [str(entry["id"]) for entry in answer["data"]]
    except (TypeError, KeyError) as error:
        message = f"not a list of models: {json.dumps(answer)[:200]}"
        raise Unreadable(message) from error
