"""vLLM in this process: its LLM class without a speculative config for arm off, and with one for the others.

One of the two is loaded at a time, because a GPU seldom has room for both. Prompts go in and texts come out as token
ids. Every request has a seed of its own.

Sources: vllm/entrypoints/llm.py (LLM), vllm/sampling_params.py (SamplingParams), vllm/v1/metrics/reader.py.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import equivtest
from equivtest.decoder.export import export_folder
from equivtest.decoder.hub import file_sha256, resolve_model
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.tokenizer import Tokenizer
from equivtest.decoder.weights import Checkpoint, load_checkpoint, load_tokenizer
from equivtest.engines.base import Capabilities, EngineOptions, Messages, StagesWrap
from equivtest.engines.decoder import require_device
from equivtest.engines.draft_counters import DraftCounters
from equivtest.engines.plain_generation import generation_of
from equivtest.engines.probes import PROBE_CHAT, probe_request, repeats_seeds
from equivtest.engines.reference_law import reference_scorer, stop_ids
from equivtest.errors import EngineUnavailable, InvalidSetting, RequestFailed, UnsupportedModel
from equivtest.records import Generation, Request, SamplingParams

_COUNTERS = {
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
_SEEDS = 2**63
_REPORT = "this is no answer to the request: report it to vLLM with its version"


class VllmEngine:
    """Loads a model into vLLM and generates with it."""

    def __init__(self, options: EngineOptions, vllm: Any, path: Path, on_message: Callable[[str], None]) -> None:
        assert options.vllm is not None  # checked by the registry
        self._options, self._own, self._vllm, self._tell = options, options.vllm, vllm, on_message
        self._dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
        self._checkpoint: Checkpoint | None = None
        self._unpacked: tempfile.TemporaryDirectory[str] | None = None
        self._folder = path
        try:
            self._checkpoint = load_checkpoint(path)
        except UnsupportedModel as error:
            if not path.is_dir():
                raise
            on_message(f"samples are not held against a law: {error}")
        self._tokenizer, self._sha256 = self._identity(path)
        if self._checkpoint is not None and not path.is_dir():
            self._unpacked = tempfile.TemporaryDirectory(prefix="equivtest-vllm-")
            self._folder = Path(self._unpacked.name)
            export_folder(self._checkpoint, self._folder, dtype=self._dtype)
        self._loaded: tuple[bool, Any] | None = None
        """Whether what is loaded speculates, and its LLM."""
        self._scorer: Scorer | None = None
        self._counted = DraftCounters(0, 0)
        self._notes: dict[str, str] = {}

    @classmethod
    def open(cls, options: EngineOptions, *, on_message: Callable[[str], None] | None = None) -> VllmEngine:
        """Load the model with the speculative config, in float32 unless `options.dtype` says otherwise.

        Raises ModelUnavailable, ChecksumMismatch, UnsupportedModel or InvalidSetting, and EngineUnavailable with vLLM's
        own words where it does not start, or draws no samples.
        """
        require_device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        path = resolve_model(options.model, on_progress=on_message)
        try:
            vllm = importlib.import_module("vllm")
        except ImportError as error:
            raise EngineUnavailable("vllm", f"it is installed and cannot be imported: {error}") from error
        engine = cls(options, vllm, path, on_message or (lambda line: None))
        try:
            engine._llm(speculative=True)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact=self._dtype == torch.float32)

    def refusal(self, params: SamplingParams) -> str | None:
        """Laws of another order than ours, and what vLLM itself refuses where it speculates, in its words.

        Raises RequestFailed where it dies of them.
        """
        if params.min_p and params.top_p < 1:
            return "vLLM applies min_p before top_p, and the law here after it"
        if params.repetition_penalty != 1 and params.logit_bias:
            return "vLLM adds a logit bias before the repetition penalty, and the law here after it"
        prompt = self.encode_prompt(PROBE_CHAT)
        request = Request(
            prompt_token_ids=prompt, params=params, stream_key=1, max_tokens=1, label="a first question with its law"
        )
        try:
            self._ask([request], speculative=True)
        except RequestFailed as failed:
            if self._answers(probe_request(prompt, 1)):
                return f"vLLM refuses them: {failed.problem}"
            raise  # it did not refuse, it died
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
        """Raises InvalidSetting for a fault, RequestFailed naming a request that was not answered as asked."""
        if fault is not None:
            raise InvalidSetting("fault", fault, "no fault can be put into vLLM")
        generations: list[Generation] = []
        for start in range(0, len(requests), self._options.max_batch):
            texts = self._ask(requests[start : start + self._options.max_batch], speculative=speculative)
            generations += [generation_of(t, batch_row=row, speculative=speculative) for row, t in enumerate(texts)]
            if on_tokens is not None:
                on_tokens(sum(map(len, texts)))
        if speculative:
            self._note_drafts()
        return generations

    def scorer(self) -> Scorer | None:
        """Our scorer on the same weights; None where the built-in decoder does not run them. vLLM makes room for it: it
        keeps most of a GPU's memory to itself."""
        self._unload()
        if self._checkpoint is not None and self._scorer is None:
            self._scorer = reference_scorer(self._checkpoint, dtype=self._dtype, device=self._options.device)
        return self._scorer

    def describe(self) -> Mapping[str, Any]:
        options = self._options
        model = Path(options.model)
        return {
            "engine": "vllm",
            "model": model.name if model.exists() else options.model,
            "model_sha256": self._sha256,
            "vocab_size": self._checkpoint.config.vocab_size if self._checkpoint else self._tokenizer.vocab_size,
            "eos_token_ids": list(self._tokenizer.eos_token_ids),
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": options.device,
            "drafter": self._own.speculative_config.get("method", "a model"),
            "speculative_config": dict(self._own.speculative_config),
            "engine_args": dict(self._own.engine_args),
            "max_batch": options.max_batch,
            "vllm": self._vllm.__version__,
            "torch": torch.__version__,
            "equivtest": equivtest.__version__,
        }

    def notes(self) -> Mapping[str, str]:
        return dict(self._notes)

    def close(self) -> None:
        self._unload()
        if self._unpacked is not None:
            self._unpacked.cleanup()

    def _identity(self, path: Path) -> tuple[Tokenizer, str]:
        if self._checkpoint is not None:
            return self._checkpoint.tokenizer, self._checkpoint.sha256
        tokenizer, files = load_tokenizer(path)
        return tokenizer, ",".join(file_sha256(file) for file in files)

    def _llm(self, *, speculative: bool) -> Any:
        """The LLM that decodes so; the other one makes room for it."""
        if self._loaded is not None and self._loaded[0] == speculative:
            return self._loaded[1]
        self._unload()
        self._tell(f"loading vLLM {'with' if speculative else 'without'} speculation")
        arguments: dict[str, Any] = {
            "model": str(self._folder),
            "dtype": str(self._dtype).removeprefix("torch."),
            "generation_config": "vllm",  # what a model's files ask for beside the request would be another law
            "max_num_seqs": self._options.max_batch,
            "disable_log_stats": False,  # it counts drafts there
        } | dict(self._own.engine_args)
        if speculative:
            arguments["speculative_config"] = dict(self._own.speculative_config)
        try:
            llm = self._vllm.LLM(**arguments)
        except Exception as error:  # of whatever kind: its settings, its workers, its device
            raise EngineUnavailable("vllm", f"it does not start: {_words(error)}") from error
        self._loaded = speculative, llm
        self._counted = DraftCounters(0, 0)
        self._find_seeds(speculative=speculative)
        self._counted = self._drafts()
        return llm

    def _unload(self) -> None:
        if self._loaded is not None:
            self._loaded[1].llm_engine.engine_core.shutdown()
            self._loaded = None

    def _find_seeds(self, *, speculative: bool) -> None:
        prompt, arm = self.encode_prompt(PROBE_CHAT), "on" if speculative else "off"
        repeats = repeats_seeds(lambda seed: self._ask([probe_request(prompt, seed)], speculative=speculative)[0])
        if repeats is None:
            raise EngineUnavailable("vllm", f"arm {arm} gives the same text to every seed: such texts are no samples")
        if not repeats:
            self._notes[f"seeds {arm}"] = f"vLLM does not repeat a text for its seed in arm {arm}"

    def _drafts(self) -> DraftCounters:
        """Since it was loaded."""
        assert self._loaded is not None
        counted = {"drafted": 0, "accepted": 0}
        for metric in self._loaded[1].get_metrics():
            if metric.name in _COUNTERS:
                counted[_COUNTERS[metric.name]] += int(metric.value)
        return DraftCounters(**counted)

    def _note_drafts(self) -> None:
        drafted, accepted = self._drafts().since(self._counted)
        self._notes["drafts"] = (
            f"vLLM says that it accepted {accepted:,} of {drafted:,} drafts since it was last loaded"
            if drafted
            else "vLLM counts no drafts in arm on: it does not seem to speculate"
        )

    def _ask(self, requests: Sequence[Request], *, speculative: bool) -> list[tuple[int, ...]]:
        """Token ids of each request, as many as were asked for or up to what ends the text."""
        llm = self._llm(speculative=speculative)
        prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
        params = [self._sampling_params(request) for request in requests]
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        except Exception as error:  # of whatever kind: a refusal, a worker that died
            remedy = "vLLM's log above says more"
            raise RequestFailed(_labels(requests), f"vLLM failed: {_words(error)}", remedy) from error
        if len(outputs) != len(requests):
            problem = f"{len(outputs)} texts for {len(requests)} requests"
            raise RequestFailed(_labels(requests), problem, _REPORT)
        return [self._token_ids(output, request) for output, request in zip(outputs, requests, strict=True)]

    def _answers(self, request: Request) -> bool:
        try:
            self._ask([request], speculative=True)
        except RequestFailed:
            return False
        return True

    def _token_ids(self, output: Any, request: Request) -> tuple[int, ...]:
        if len(output.outputs) != 1:
            raise RequestFailed(request.label, f"{len(output.outputs)} texts for one request", _REPORT)
        token_ids = tuple(map(int, output.outputs[0].token_ids))
        num, ends = request.max_tokens, self._ends(request.params)
        if not token_ids or len(token_ids) > num:
            raise RequestFailed(request.label, f"{len(token_ids)} tokens where {num} were asked for", _REPORT)
        if len(token_ids) < num and token_ids[-1] not in ends:
            problem = f"its text ended after {len(token_ids)} of {num} tokens, where nothing ends a text"
            raise RequestFailed(request.label, problem, "raise max_model_len with --engine-args, or report it to vLLM")
        return token_ids

    def _sampling_params(self, request: Request) -> Any:
        params = request.params
        return self._vllm.SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            logit_bias=dict(params.logit_bias) or None,
            stop_token_ids=list(self._ends(params)),
            ignore_eos=params.ignore_eos,
            min_tokens=min(params.min_tokens, request.max_tokens),
            max_tokens=request.max_tokens,
            seed=(request.stream_key if request.seed is None else request.seed) % _SEEDS,
            detokenize=False,
        )

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        return stop_ids(params.stop_token_ids, self._tokenizer.eos_token_ids, ignore_eos=params.ignore_eos)


def _labels(requests: Sequence[Request]) -> str:
    first, last = requests[0].label, requests[-1].label
    return first if len(requests) == 1 else f"{first} to {last}"


def _words(error: Exception) -> str:
    """The error's own, on one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
