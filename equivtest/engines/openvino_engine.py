"""OpenVINO GenAI as an engine: its continuous-batching pipeline, without and with prompt lookup or a draft model.

A pipeline speculates always or never, so there are two of them on one model. Every request has a generation config of
its own and so a random stream of its own. It says only the tokens, not how it came by them.

Sources: openvino.genai's src/cpp/include/openvino/genai (GenerationConfig, SchedulerConfig, ContinuousBatchingPipeline)
and src/cpp/src/sampling/logit_transformers.hpp for the order of its law.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equivtest
from equivtest.decoder.hub import file_sha256, resolve_model
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.tokenizer import Tokenizer
from equivtest.decoder.weights import Checkpoint, load_checkpoint, load_tokenizer
from equivtest.engines.base import Capabilities, EngineOptions, Messages, StagesWrap
from equivtest.engines.plain_generation import generation_of
from equivtest.engines.reference_law import reference_scorer, stop_ids
from equivtest.errors import EngineUnavailable, InvalidSetting, RequestFailed, UnknownName, UnsupportedModel
from equivtest.records import Generation, Request, SamplingParams

DRAFTERS = ("ngram", "model")
MAX_NGRAM = 3
"""Longest n-gram that prompt lookup looks for, as in the built-in decoder."""
_SEEDS = 2**32
"""Its generators take no larger seeds: they would be cut off."""
_REMEDY = "ask again with --max-batch or the budget smaller, or look for it among the issues of openvino.genai"


class OpenvinoEngine:
    """Compiles a model for OpenVINO and generates with it."""

    def __init__(
        self,
        options: EngineOptions,
        genai: Any,
        pipelines: Mapping[bool, Any],
        tokenizer: Tokenizer,
        checkpoint: Checkpoint | None,
        description: Mapping[str, Any],
    ) -> None:
        self._options, self._genai, self._pipelines = options, genai, pipelines
        self._tokenizer, self._checkpoint, self._description = tokenizer, checkpoint, description
        self._scorer: Scorer | None = None
        self._num_drafted = self._num_accepted = 0

    @classmethod
    def open(cls, options: EngineOptions, *, on_message: Callable[[str], None] | None = None) -> OpenvinoEngine:
        """Fetch and compile the model, a GGUF file or an OpenVINO folder, in float32 unless `options.dtype` says
        otherwise.

        Raises ModelUnavailable, ChecksumMismatch, UnsupportedModel, UnknownName, InvalidSetting or EngineUnavailable.
        """
        tell = on_message or (lambda line: None)
        options = options.settled("ngram")
        if options.drafter not in DRAFTERS:
            raise UnknownName("drafter of openvino", options.drafter, DRAFTERS)
        if options.drafter == "model" and options.draft_model is None:
            raise InvalidSetting("draft_model", None, "drafter 'model' needs a draft model")
        genai = _import_genai()
        path = resolve_model(options.model, on_progress=on_message)
        tokenizer, files = load_tokenizer(path)
        checkpoint = None
        try:
            checkpoint = load_checkpoint(path)
        except UnsupportedModel as error:
            tell(f"samples are not held against a law: {error}")
        properties = _properties(options)
        drafting: dict[str, Any] = {"prompt_lookup": True}
        parameters: dict[str, Any] = {"max_ngram": MAX_NGRAM}
        with tempfile.TemporaryDirectory() as folder:
            if options.draft_model is not None:
                small = resolve_model(options.draft_model, on_progress=on_message)
                as_folder = small if small.is_dir() else _unpacked(genai, small, Path(folder))
                drafting = {"draft_model": genai.draft_model(str(as_folder), "CPU", **properties)}
                parameters = {"draft_model": small.name, "sha256": None if small.is_dir() else file_sha256(small)}
            pipelines = {
                speculative: _pipeline(genai, path, options, properties | (drafting if speculative else {}))
                for speculative in (False, True)
            }
        return cls(
            options,
            genai,
            pipelines,
            tokenizer,
            checkpoint,
            {
                "model": path.name,
                "model_sha256": checkpoint.sha256 if checkpoint else ",".join(map(file_sha256, files)),
                "vocab_size": checkpoint.config.vocab_size if checkpoint else tokenizer.vocab_size,
                "drafter_parameters": parameters,
                "properties": properties,
            },
        )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact=self._options.dtype != "bfloat16")

    def refusal(self, params: SamplingParams) -> str | None:
        if params.logit_bias:
            return "OpenVINO GenAI has no logit bias"
        if params.frequency_penalty or params.presence_penalty:
            return "OpenVINO GenAI adds frequency and presence penalties to negative logits, which is another law"
        return None

    def encode_prompt(self, messages: Messages) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_chat(messages))

    def token_text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculative: bool,
        fault: StagesWrap | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """Raises InvalidSetting for a fault, and RequestFailed naming the first request that was not answered."""
        if fault is not None:
            raise InvalidSetting("fault", fault, "no fault can be put into OpenVINO")
        generations: list[Generation] = []
        for start in range(0, len(requests), self._options.max_batch):
            batch = requests[start : start + self._options.max_batch]
            texts = self._texts(batch, speculative=speculative)
            for row, text in enumerate(texts, start=start):
                generations.append(generation_of(text, batch_row=row, speculative=speculative))
            if on_tokens is not None:
                on_tokens(sum(map(len, texts)))
        return generations

    def scorer(self) -> Scorer | None:
        """Our scorer on the weights of the file; None where the built-in decoder does not run them."""
        if self._checkpoint is None:
            return None
        if self._scorer is None:
            dtype = torch.bfloat16 if self._options.dtype == "bfloat16" else torch.float32
            self._scorer = reference_scorer(self._checkpoint, dtype=dtype, device="cpu")
        return self._scorer

    def describe(self) -> Mapping[str, Any]:
        options = self._options
        return {
            "engine": "openvino",
            **self._description,
            "eos_token_ids": list(self._tokenizer.eos_token_ids),
            "drafter": options.drafter,
            "draft_len": options.draft_len,
            "max_batch": options.max_batch,
            "openvino_genai": self._genai.get_version(),
            "equivtest": equivtest.__version__,
        }

    def notes(self) -> Mapping[str, str]:
        if not self._num_drafted:
            return {}
        return {"drafts": f"OpenVINO says that it accepted {self._num_accepted:,} of {self._num_drafted:,} drafts"}

    def close(self) -> None:
        self._pipelines = {}

    def _texts(self, batch: Sequence[Request], *, speculative: bool) -> list[list[int]]:
        """The token ids of every request's text."""
        tensor: Any = import_module("openvino").Tensor
        prompts = [tensor(np.array([request.prompt_token_ids], np.int64)) for request in batch]
        label = batch[0].label if len(batch) == 1 else f"{batch[0].label} to {batch[-1].label}"
        try:
            configs = [self._config(request, speculative=speculative) for request in batch]
            results = self._pipelines[speculative].generate(prompts, configs)
        except RuntimeError as error:
            raise RequestFailed(label, f"OpenVINO stopped: {_first_lines(error)}", _REMEDY) from error
        if len(results) != len(batch):
            raise RequestFailed(label, f"{len(results)} results for {len(batch)} requests", _REMEDY)
        if speculative and (metrics := results[0].extended_perf_metrics) is not None:  # of the whole batch
            self._num_drafted += metrics.get_num_draft_tokens()
            self._num_accepted += metrics.get_num_accepted_tokens()
        return [self._text(result, request) for result, request in zip(results, batch, strict=True)]

    def _text(self, result: Any, request: Request) -> list[int]:
        """Raises RequestFailed for one that is not as long as was asked for and that nothing ended."""
        if len(result.m_generation_ids) != 1:
            raise RequestFailed(request.label, f"{len(result.m_generation_ids)} texts for one request", _REMEDY)
        text: list[int] = list(result.m_generation_ids[0])
        length, ends = len(text), self._ends(request.params)
        if not 0 < length <= request.max_tokens or (length < request.max_tokens and text[-1] not in ends):
            problem = f"{length} tokens where {request.max_tokens} were asked for, and nothing that ended the text"
            raise RequestFailed(request.label, problem, _REMEDY)
        return text

    def _config(self, request: Request, *, speculative: bool) -> Any:
        params, ends = request.params, self._ends(request.params)
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.apply_chat_template = False
        config.do_sample = not params.greedy
        config.rng_seed = (request.stream_key if request.seed is None else request.seed) % _SEEDS
        config.ignore_eos = not ends
        config.stop_token_ids = set(ends)
        config.min_new_tokens = params.min_tokens if ends else 0
        config.repetition_penalty = params.repetition_penalty
        if not params.greedy:
            config.temperature = params.temperature
            config.top_p = params.top_p
            config.min_p = params.min_p
            if params.top_k:  # its default keeps all
                config.top_k = params.top_k
        if speculative:
            config.num_assistant_tokens = self._options.draft_len
            if self._options.drafter == "ngram":
                config.max_ngram_size = MAX_NGRAM
        return config

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        return stop_ids(params.stop_token_ids, self._tokenizer.eos_token_ids, ignore_eos=params.ignore_eos)


def _import_genai() -> Any:
    try:
        import_module("openvino")
        return import_module("openvino_genai")
    except ImportError as error:
        reason = f"{error}; openvino, openvino-tokenizers and openvino-genai must be of one release"
        raise EngineUnavailable("openvino", reason) from error


def _properties(options: EngineOptions) -> dict[str, Any]:
    """Of the compiled model. By default OpenVINO rounds activations and the cache to 8 bits, and texts to come by it
    would depend on their batch."""
    precision = "bf16" if options.dtype == "bfloat16" else "f32"
    threads = {} if options.threads is None else {"INFERENCE_NUM_THREADS": options.threads}
    return {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        **threads,
    }


def _unpacked(genai: Any, path: Path, folder: Path) -> Path:
    """A GGUF file as a folder of OpenVINO's own: draft models are read from nothing else."""
    beside = folder / path.name
    beside.symlink_to(path.resolve())
    try:
        genai.LLMPipeline(str(beside), "CPU", enable_save_ov_model=True)
    except RuntimeError as error:
        raise UnsupportedModel(path.name, f"OpenVINO cannot read it: {_first_lines(error)}") from error
    return folder


def _pipeline(genai: Any, path: Path, options: EngineOptions, properties: Mapping[str, Any]) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = options.max_batch
    scheduler.enable_prefix_caching = False
    try:
        return genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)
    except RuntimeError as error:
        raise UnsupportedModel(path.name, f"OpenVINO cannot compile it: {_first_lines(error)}") from error


def _first_lines(error: RuntimeError) -> str:
    """Its words without its addresses in a source tree."""
    return " ".join(line for line in str(error).strip().splitlines() if "/src/" not in line)[:300] or "without a word"
