"""The languages that servers speak: how each is asked for samples, and where it says the tokens.

Sources: the OpenAI completions reference with vLLM's extra fields (vllm/entrypoints/openai, CompletionRequest);
llama.cpp's tools/server/README.md, POST /completion; SGLang's sampling_params reference, POST /generate. Every field of
the law is sent, also where it asks for nothing: servers have defaults of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from equivtest.engines.http_client import Unreadable
from equivtest.errors import UnknownName
from equivtest.records import Request, SamplingParams

Prompt = Sequence[int] | str
"""A prompt as token ids; as text for servers that take no ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One text as a server tells of it."""

    token_ids: tuple[int, ...] | None
    """None where it does not tell."""
    text: str
    ended: bool
    """It says that something in the text ended it, rather than its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one request."""

    choices: tuple[Choice, ...]
    num_tokens: int | None
    """Of all texts together, as the server counts; None where it does not."""
    num_prompt_tokens: int | None = None
    num_drafted: int = 0
    """Draft tokens that it says it made."""
    num_accepted: int = 0


class CompletionsApi:
    """POST /v1/completions: OpenAI's, as vLLM and many others have it."""

    path: ClassVar[str] = "/v1/completions"
    names_models: ClassVar[bool] = True
    forbids_eos: ClassVar[bool] = False
    """Whether "ignore the end of text" means that it cannot come, rather than that the text goes on after it."""
    may_run_over: ClassVar[bool] = False
    """Whether a text may be longer than asked."""
    takes_text: ClassVar[bool] = True
    tells_drafts: ClassVar[bool] = False
    """Whether an answer says how many drafts went into it, if there were any."""

    def refusal(self, params: SamplingParams) -> str | None:
        return None

    def body(self, request: Request, prompt: Prompt, *, count: int, seed: int | None) -> dict[str, Any]:
        params = request.params
        body: dict[str, Any] = {
            "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
            "max_tokens": request.max_tokens,
            "n": count,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stream": False,
        }
        if params.logit_bias:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        if params.stop_token_ids or params.min_tokens:
            body |= {"stop_token_ids": list(params.stop_token_ids), "min_tokens": params.min_tokens}
        return body if seed is None else body | {"seed": seed}

    def read(self, answer: Any) -> Answer:
        choices = _list(_dict(answer, "the answer").get("choices"), "choices")
        tables = [_dict(choice, "a choice") for choice in choices]
        order = [table.get("index", position) for position, table in enumerate(tables)]
        if not all(isinstance(index, int) for index in order) or sorted(order) != list(range(len(tables))):
            message = f"choices have the indices {order}"
            raise Unreadable(message)
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        counts = [usage.get(name) for name in ("completion_tokens", "prompt_tokens")]
        num_tokens, num_prompt_tokens = (count if isinstance(count, int) else None for count in counts)
        return Answer(
            choices=tuple(
                Choice(
                    token_ids=_ids(table.get("token_ids")),
                    text=_text(table.get("text")),
                    ended=table.get("finish_reason") not in ("length", None),
                )
                for _, table in sorted(zip(order, tables, strict=True), key=lambda pair: pair[0])
            ),
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )


class LlamaCppApi:
    """POST /completion: llama.cpp's own, which says tokens and takes the samplers in the order of the law."""

    path: ClassVar[str] = "/completion"
    names_models: ClassVar[bool] = False
    forbids_eos: ClassVar[bool] = True
    may_run_over: ClassVar[bool] = True  # to the end of a character of several bytes
    takes_text: ClassVar[bool] = False
    tells_drafts: ClassVar[bool] = True

    def refusal(self, params: SamplingParams) -> str | None:
        if params.penalised:
            return "llama.cpp's penalties look at the prompt as well, and are another law"
        if params.stop_token_ids or params.min_tokens or not params.ignore_eos:
            return "llama.cpp's server has no stop token ids and no min_tokens"
        return None

    def body(self, request: Request, prompt: Prompt, *, count: int, seed: int | None) -> dict[str, Any]:
        params = request.params
        return {
            "prompt": list(prompt),
            "n_predict": request.max_tokens,
            "n_cmpl": count,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "ignore_eos": True,
            "logit_bias": [list(pair) for pair in params.logit_bias],
            "return_tokens": True,
            "stream": False,
            "seed": -1 if seed is None else seed,
        }

    def read(self, answer: Any) -> Answer:
        tables = [_dict(one, "an answer") for one in (answer if isinstance(answer, list) else [answer])]
        timings = [_dict(table.get("timings", {}), "timings") for table in tables]
        return Answer(
            choices=tuple(
                Choice(
                    token_ids=_ids(table.get("tokens")),
                    text=_text(table.get("content")),
                    ended=table.get("stop_type") not in ("limit", "none", None),
                )
                for table in tables
            ),
            num_tokens=None,  # its count leaves out what it cut off
            num_drafted=sum(_count(timing.get("draft_n")) for timing in timings),
            num_accepted=sum(_count(timing.get("draft_n_accepted")) for timing in timings),
        )


class SglangApi:
    """POST /generate: SGLang's own, which says tokens."""

    path: ClassVar[str] = "/generate"
    names_models: ClassVar[bool] = False
    forbids_eos: ClassVar[bool] = False
    may_run_over: ClassVar[bool] = False
    takes_text: ClassVar[bool] = False
    tells_drafts: ClassVar[bool] = False

    def refusal(self, params: SamplingParams) -> str | None:
        return None

    def body(self, request: Request, prompt: Prompt, *, count: int, seed: int | None) -> dict[str, Any]:
        params = request.params
        sampling = {
            "max_new_tokens": request.max_tokens,
            "n": count,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "ignore_eos": params.ignore_eos,
            "min_new_tokens": params.min_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": False,
        }
        if params.logit_bias:
            sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
        if seed is not None:
            sampling["sampling_seed"] = seed
        return {"input_ids": list(prompt), "sampling_params": sampling, "stream": False}

    def read(self, answer: Any) -> Answer:
        tables = [_dict(one, "an answer") for one in (answer if isinstance(answer, list) else [answer])]
        facts = [_dict(table.get("meta_info", {}), "meta_info") for table in tables]
        counts = [fact.get("completion_tokens") for fact in facts]
        counted = [count for count in counts if isinstance(count, int)]
        return Answer(
            choices=tuple(
                Choice(
                    token_ids=_ids(table.get("output_ids")),
                    text=_text(table.get("text", "")),
                    ended=_dict(fact.get("finish_reason") or {}, "finish_reason").get("type", "length") != "length",
                )
                for table, fact in zip(tables, facts, strict=True)
            ),
            num_tokens=sum(counted) if len(counted) == len(counts) else None,
        )


Api = CompletionsApi | LlamaCppApi | SglangApi

APIS: Mapping[str, type[Api]] = {"completions": CompletionsApi, "llamacpp": LlamaCppApi, "sglang": SglangApi}


def get_api(name: str) -> Api:
    """Raises UnknownName."""
    if name not in APIS:
        raise UnknownName("api", name, APIS)
    return APIS[name]()


def check_answer(answer: Answer, count: int, max_tokens: int, *, may_run_over: bool, tells: bool) -> None:
    """Raise Unreadable for an answer that is not one to the request."""
    problem = None
    lengths = [len(choice.token_ids or ()) for choice in answer.choices]
    if len(answer.choices) != count:
        problem = f"{len(answer.choices)} choices where {count} were asked for"
    elif tells and not all(lengths):
        problem = "a choice without token ids"
    elif tells and max(lengths) > max_tokens and not may_run_over:
        problem = f"{max(lengths)} tokens where {max_tokens} were asked for"
    elif tells and any(
        length < max_tokens and not choice.ended for length, choice in zip(lengths, answer.choices, strict=True)
    ):
        problem = f"{min(lengths)} tokens where {max_tokens} were asked for, and nothing that ended the text"
    elif tells and answer.num_tokens not in (None, sum(lengths)):
        problem = f"{sum(lengths)} token ids, and a count of {answer.num_tokens}"
    if problem:
        raise Unreadable(problem)


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        message = f"{what} is no JSON object"
        raise Unreadable(message)
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        message = f"{what} is no list"
        raise Unreadable(message)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        message = "a choice holds no text"
        raise Unreadable(message)
    return value


def _count(value: Any) -> int:
    """0 where the server does not say."""
    return value if isinstance(value, int) else 0


def _ids(value: Any) -> tuple[int, ...] | None:
    """None where there are none."""
    if not value:
        return None
    ids = _list(value, "token ids")
    if not all(isinstance(id_, int) and not isinstance(id_, bool) and 0 <= id_ < 2**31 for id_ in ids):
        message = "token ids are not whole numbers of at least 0 and below 2^31"
        raise Unreadable(message)
    return tuple(ids)
