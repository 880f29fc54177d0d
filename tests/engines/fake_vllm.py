"""As much of the module vllm as the adapter uses, on the built-in decoder. It misbehaves where a test wants it.

Names and meanings are those of vLLM's LLM, SamplingParams and metrics reader."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from equivtest.engines.base import EngineOptions, StagesWrap
from equivtest.engines.decoder import DecoderEngine
from equivtest.records import Origin, Request
from equivtest.records import SamplingParams as Law

LAW_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "stop_token_ids", "ignore_eos", "min_tokens",
)  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """What vLLM's takes; other names are refused, as there."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    max_tokens: int
    seed: int
    detokenize: bool

    def law(self) -> Law:
        bias = tuple(sorted((self.logit_bias or {}).items()))
        own = {name: getattr(self, name) for name in LAW_FIELDS} | {"ignore_eos": True, "logit_bias": bias}
        return Law(**own | {"stop_token_ids": tuple(self.stop_token_ids)})


class FakeVllm:
    """Stands in for the module. `trouble` is what goes wrong with the first request of every call, or with all of them;
    `fault` is planted in what speculates."""

    __version__ = "0.0.fake"
    SamplingParams = SamplingParams

    def __init__(self, trouble: str = "", fault: StagesWrap | None = None) -> None:
        self.trouble, self.fault = trouble, fault
        self.loaded: list[dict[str, Any]] = []
        """Arguments of every LLM so far."""
        self.asked: list[list[SamplingParams]] = []
        self.alive = 0

    def LLM(self, **arguments: Any) -> FakeLLM:
        self.loaded.append(arguments)
        return FakeLLM(self, **arguments)


class FakeLLM:
    def __init__(
        self,
        module: FakeVllm,
        *,
        model: str,
        dtype: str,
        generation_config: str,
        max_num_seqs: int,
        disable_log_stats: bool,
        speculative_config: Mapping[str, Any] | None = None,
        enforce_eager: bool = False,
    ) -> None:
        if module.trouble == "no_start":
            message = "engine core\n  initialisation failed"
            raise RuntimeError(message)
        assert generation_config == "vllm"
        assert not disable_log_stats
        self._module, self._spec = module, speculative_config
        draft_len = speculative_config["num_speculative_tokens"] if speculative_config else 1
        self._engine = DecoderEngine.open(
            EngineOptions(model=model, dtype=dtype, drafter="ngram", draft_len=draft_len, max_batch=max_num_seqs)
        )
        self._counters = {"draft": 0, "accepted": 0}
        self._num_streams = 0
        self._dead = False
        module.alive += 1
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shutdown))

    def _shutdown(self) -> None:
        self._module.alive -= 1

    def generate(
        self, prompts: Sequence[Mapping[str, Any]], params: Sequence[SamplingParams], *, use_tqdm: bool
    ) -> Any:
        trouble = self._module.trouble
        assert not use_tqdm
        self._module.asked.append(list(params))
        if self._spec and any(one.min_p or one.logit_bias for one in params):
            message = "The min_p and logit_bias sampling parameters\nare not yet supported with speculative decoding."
            raise ValueError(message)
        self._dead |= trouble == "dies_of_top_k" and any(one.top_k for one in params)
        if self._dead:
            message = "EngineCore died of top_k"
            raise RuntimeError(message)
        collecting = params[0].max_tokens != 24  # the questions before are answered well
        if trouble == "dies" and collecting:
            message = "EngineCore died"
            raise RuntimeError(message)
        speculates = self._spec is not None and trouble != "does_not_speculate"
        made = self._engine.generate(
            [self._request(prompt, one) for prompt, one in zip(prompts, params, strict=True)],
            speculative=speculates,
            fault=self._module.fault if speculates else None,
        )
        self._counters["draft"] += sum(int(one.num_drafts.sum()) for one in made)
        self._counters["accepted"] += sum(origin is Origin.ACCEPTED for one in made for origin in one.origins)
        texts = [one.token_ids.tolist() for one in made]
        outputs = [SimpleNamespace(outputs=[SimpleNamespace(token_ids=text)]) for text in texts]
        if collecting:
            first = outputs[0].outputs
            if trouble == "lost_text":
                outputs.pop()
            elif trouble == "two_texts":
                first.append(first[0])
            elif trouble == "too_many":
                first[0].token_ids = [*texts[0], 7]
            elif trouble == "too_few":
                first[0].token_ids = texts[0][:-1]
            elif trouble == "nothing":
                first[0].token_ids = []
        return outputs

    def get_metrics(self) -> list[Any]:
        if not self._spec:
            return [SimpleNamespace(name="vllm:num_requests_running", value=0.0)]
        names = {kind: f"vllm:spec_decode_num_{kind}_tokens" for kind in self._counters}
        return [SimpleNamespace(name=names[kind], value=number) for kind, number in self._counters.items()]

    def _request(self, prompt: Mapping[str, Any], params: SamplingParams) -> Request:
        key = params.seed
        if self._module.trouble == "one_text":
            key = 0
        elif self._module.trouble == "own_stream":
            self._num_streams += 1
            key = self._num_streams
        return Request(
            prompt_token_ids=tuple(prompt["prompt_token_ids"]),
            params=params.law(),
            stream_key=key,
            max_tokens=params.max_tokens,
        )
