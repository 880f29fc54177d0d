"""Hugging Face transformers as an engine: `generate`, and assisted generation for speculation.

Assisted generation takes one text at a time, so the speculative arms are decoded sample by sample; plain decoding goes
in batches. The drafters have the names of the built-in decoder's: ngram is prompt lookup, model an assistant model,
early_exit the model's own first layers, whose drafts transformers samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import equivtest
from equivtest.decoder.drafters.early_exit import default_layers
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.model import Model
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.tokenizer import Tokenizer, tokenizer_from_folder
from equivtest.decoder.transformers_model import transformers_model
from equivtest.decoder.weights import Checkpoint, load_checkpoint
from equivtest.engines.assisted_rounds import AssistedRounds
from equivtest.engines.base import Capabilities, EngineOptions, Messages, StagesWrap
from equivtest.engines.batches import alike
from equivtest.engines.decoder import require_device, require_same_vocabulary
from equivtest.engines.plain_generation import generation_of
from equivtest.engines.reference_law import reference_scorer, stop_ids
from equivtest.errors import InvalidSetting, UnknownName, UnsupportedModel
from equivtest.records import Generation, Request, SamplingParams

DRAFTERS = ("ngram", "early_exit", "model")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """A model in transformers, and what else is known of its files."""

    model: Any
    """A PreTrainedModel in evaluation mode, with a generation config that asks for nothing."""
    tokenizer: Tokenizer
    checkpoint: Checkpoint | None
    """The same weights for the scorer; None where the built-in decoder does not run them."""
    sha256: str | None
    refused: str = ""
    """Why there is no checkpoint."""


class TransformersEngine:
    """Loads a model into transformers and generates with it."""

    def __init__(self, target: _Loaded, assistant: _Loaded | None, options: EngineOptions, dtype: torch.dtype) -> None:
        self._target, self._assistant, self._options, self._dtype = target, assistant, options, dtype
        self._scorer: Scorer | None = None

    @classmethod
    def open(cls, options: EngineOptions, *, on_message: Callable[[str], None] | None = None) -> TransformersEngine:
        """Fetch and load the model, in float32 unless `options.dtype` says otherwise.

        Raises ModelUnavailable, ChecksumMismatch, UnsupportedModel, UnknownName or InvalidSetting.
        """
        options = options.settled("early_exit")
        if options.drafter not in DRAFTERS:
            raise UnknownName("drafter of transformers", options.drafter, DRAFTERS)
        if options.drafter == "model" and options.draft_model is None:
            raise InvalidSetting("draft_model", None, "drafter 'model' needs a draft model")
        require_device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
        target = _load(options.model, dtype, options.device, on_message)
        assistant = None
        if options.draft_model is not None:
            assistant = _load(options.draft_model, dtype, options.device, on_message)
            if assistant.checkpoint and target.checkpoint:
                require_same_vocabulary(options.draft_model, assistant.checkpoint, target.checkpoint)
        engine = cls(target, assistant, options, dtype)
        drafting = (assistant or target).model.generation_config
        # As many drafts in every round: transformers would adapt their number to what was accepted.
        drafting.num_assistant_tokens = options.draft_len
        drafting.num_assistant_tokens_schedule = "constant"
        drafting.assistant_confidence_threshold = 0.0
        if on_message is not None:
            on_message("transformers drafts for one text at a time: the speculative arms are decoded one by one")
            if target.refused:
                on_message(f"samples are not held against a law: {target.refused}")
        return engine

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact=self._dtype == torch.float32)

    def refusal(self, params: SamplingParams) -> str | None:
        if params.frequency_penalty or params.presence_penalty:
            return "transformers has no frequency or presence penalty"
        if params.repetition_penalty != 1 and params.logit_bias:
            return "transformers adds a logit bias before the repetition penalty, and the law here after it"
        return None

    def encode_prompt(self, messages: Messages) -> tuple[int, ...]:
        return tuple(self._target.tokenizer.encode_chat(messages))

    def token_text(self, token_id: int) -> str:
        return self._target.tokenizer.token_text(token_id)

    def text(self, token_ids: Sequence[int]) -> str:
        return self._target.tokenizer.decode(token_ids, skip_special=True)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculative: bool,
        fault: StagesWrap | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """Raises InvalidSetting for a fault. torch's own random state is left as it was."""
        if fault is not None:
            raise InvalidSetting("fault", fault, "no fault can be put into transformers")
        tell = on_tokens or (lambda number: None)
        generations: list[Generation] = []
        device = self._target.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for batch in alike(requests, 1 if speculative else self._options.max_batch):
                made = self._assisted(batch[0], len(generations)) if speculative else self._plain(batch, generations)
                generations += made
                tell(sum(len(generation.token_ids) for generation in made))
        return generations

    def scorer(self) -> Scorer | None:
        """Our scorer on the same weights; None where the built-in decoder does not run them."""
        target, assistant = self._target.checkpoint, self._assistant
        if target is None or (assistant is not None and assistant.checkpoint is None):
            return None
        if self._scorer is None:
            drafts = {"model": self._assistant_model, "early_exit": self._first_layers}.get(self._options.drafter)
            self._scorer = reference_scorer(target, dtype=self._dtype, device=self._options.device, draft_model=drafts)
        return self._scorer

    def describe(self) -> Mapping[str, Any]:
        import transformers

        options, config = self._options, self._target.model.config
        parameters: dict[str, Any] = {}
        if options.drafter == "early_exit":
            parameters = {"num_layers": self._exit_layers}
        elif self._assistant is not None:
            parameters = {"draft_model": _shown(str(options.draft_model)), "sha256": self._assistant.sha256}
        return {
            "engine": "transformers",
            "model": _shown(options.model),
            "model_sha256": self._target.sha256,
            "architecture": config.model_type,
            "num_layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
            "eos_token_ids": list(self._target.tokenizer.eos_token_ids),
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": options.device,
            "drafter": options.drafter,
            "drafter_parameters": parameters,
            "draft_len": options.draft_len,
            "max_batch": options.max_batch,
            "threads": torch.get_num_threads(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "equivtest": equivtest.__version__,
        }

    def notes(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        pass

    @property
    def _exit_layers(self) -> int:
        return self._options.early_exit_layers or default_layers(self._target.model.config.num_hidden_layers)

    def _first_layers(self, target: Model) -> Model:
        return target.first_layers(self._exit_layers)

    def _assistant_model(self, target: Model) -> Model:
        assert self._assistant is not None  # checked by open
        assert self._assistant.checkpoint is not None  # checked by scorer
        small = self._assistant.checkpoint
        return Model(small.config, small.weights, target.backend, dtype=self._dtype, device=self._options.device)

    def _plain(self, batch: Sequence[Request], before: Sequence[Generation]) -> list[Generation]:
        """Texts of one prompt in one call, all from the stream of the first."""
        request, ends = batch[0], self._ends(batch[0].params)
        texts = self._call(request, count=len(batch))
        made = []
        for row, text in enumerate(texts.tolist(), start=len(before)):
            token_ids = text[len(request.prompt_token_ids) :]
            length = next((i + 1 for i, token in enumerate(token_ids) if token in ends), len(token_ids))
            made.append(generation_of(token_ids[:length], batch_row=row, speculative=False))
        return made

    def _assisted(self, request: Request, row: int) -> list[Generation]:
        rounds, draft_len = AssistedRounds(), self._options.draft_len
        ways: dict[str, dict[str, Any]] = {
            "ngram": {"prompt_lookup_num_tokens": draft_len},
            "early_exit": {"assistant_early_exit": self._exit_layers},
            "model": {},
        }
        self._call(
            request,
            extra={
                "assistant_model": None if self._assistant is None else self._assistant.model,
                "streamer": rounds,
                "logits_processor": [rounds],
            },
            **ways[self._options.drafter],
        )
        return [rounds.generation(batch_row=row)]

    def _call(
        self, request: Request, *, count: int = 1, extra: Mapping[str, Any] | None = None, **settings: Any
    ) -> torch.Tensor:
        """[count, length], the prompt and what follows it, padded after its end."""
        from transformers import GenerationConfig, LogitsProcessorList

        params, ends = request.params, self._ends(request.params)
        if not params.greedy:
            settings |= {
                "do_sample": True,
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p or None,
            }
        if params.logit_bias:
            settings["sequence_bias"] = [[[token_id], bias] for token_id, bias in params.logit_bias]
        if ends:
            settings |= {"eos_token_id": list(ends), "min_new_tokens": params.min_tokens or None}
        config: Any = GenerationConfig
        arguments = dict(extra or {})
        if "logits_processor" in arguments:
            arguments["logits_processor"] = LogitsProcessorList(arguments["logits_processor"])
        prompt = torch.tensor([request.prompt_token_ids] * count, device=self._target.model.device)
        torch.manual_seed((request.stream_key if request.seed is None else request.seed) % 2**63)
        texts: torch.Tensor = self._target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config(
                max_new_tokens=request.max_tokens,
                repetition_penalty=params.repetition_penalty,
                pad_token_id=ends[0] if ends else 0,
                **settings,
            ),
            **arguments,
        )
        return texts

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        return stop_ids(params.stop_token_ids, self._target.tokenizer.eos_token_ids, ignore_eos=params.ignore_eos)


def _load(name: str, dtype: torch.dtype, device: str, on_message: Callable[[str], None] | None) -> _Loaded:
    """A folder is read by transformers itself, a GGUF file by us."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # equivtest shows its own
    path = resolve_model(name, on_progress=on_message)
    checkpoint, refused = None, ""
    try:
        checkpoint = load_checkpoint(path)
    except UnsupportedModel as error:
        if not path.is_dir():
            raise
        refused = str(error)
    if path.is_dir():
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
            model = model.to(dtype).eval()
        except (OSError, ValueError) as error:
            raise UnsupportedModel(str(path), f"transformers cannot read it: {error}") from error
    else:
        assert checkpoint is not None  # a file that is not read raises
        model = transformers_model(checkpoint.config, checkpoint.weights, dtype=dtype)
    # What a model's files ask for beside the request, such as an end of text, would be another law.
    generation_config: Any = GenerationConfig
    model.generation_config = generation_config()
    return _Loaded(
        model=model.to(device),
        tokenizer=checkpoint.tokenizer if checkpoint else tokenizer_from_folder(path)[0],
        checkpoint=checkpoint,
        sha256=checkpoint.sha256 if checkpoint else None,
        refused=refused,
    )


def _shown(name: str) -> str:
    """Where a file lies on this machine says nothing about it; its sha256 does."""
    return Path(name).name if Path(name).exists() else name
