"""The built-in decoder as an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import equivtest
from equivtest.decoder.acceptance import acceptance_rule
from equivtest.decoder.draft_laws import draft_laws
from equivtest.decoder.drafters.dflash import DFlashCheckpoint
from equivtest.decoder.drafters.registry import DrafterContext, check_drafter, make_drafter
from equivtest.decoder.executor import Executor
from equivtest.decoder.hub import resolve_model, shipped_block_drafter
from equivtest.decoder.model import Model
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.weights import Checkpoint, default_dtype, load_checkpoint
from equivtest.engines.base import AUTO, Capabilities, EngineOptions, Messages, StagesWrap
from equivtest.engines.draft_length import LONGEST, default_conversations, keep_to_best_length, measuring_requests
from equivtest.errors import InvalidSetting, KernelUnavailable, UnsupportedModel
from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend, resolve_auto
from equivtest.records import Generation, Request, SamplingParams

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

SCORER_ROWS: Mapping[str, Mapping[str, int]] = {
    "cpu": {},
    "cuda": {"max_forward_rows": 16_384, "max_law_rows": 2_048},
}
"""Batches in which a GPU has enough to do; they bound its memory, not the result."""


class DecoderEngine:
    """Loads a model and decodes with it, with and without speculation."""

    def __init__(
        self,
        executor: Executor,
        checkpoint: Checkpoint,
        description: Mapping[str, Any],
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self._executor, self._tokenizer, self._description = executor, checkpoint.tokenizer, description
        self._notes = dict(notes or {})
        self._scorer: Scorer | None = None

    @classmethod
    def open(
        cls,
        options: EngineOptions,
        *,
        load: Callable[[], Checkpoint] | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> DecoderEngine:
        """Fetch and load the model.

        load: makes the model in place of a file, and `options.model` only names it. `on_message` gets a line where
        something takes long, and one each that says which kernels and which drafter "auto" stands for: dflash where a
        drafter for the model ships, else early_exit.

        Raises ModelUnavailable, ChecksumMismatch, UnsupportedModel, KernelUnavailable, UnknownName or InvalidSetting.
        """
        shipped = None if load else shipped_block_drafter(options.model)
        if options.drafter == AUTO:
            options = options.settled("early_exit" if shipped is None else "dflash")
            if on_message is not None:
                on_message(f"drafter: {options.drafter}")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        require_device(options.device)
        kernels, refused = _resolve_kernels(options)
        if options.kernels == "auto" and on_message is not None:
            reasons = (f"; {other} is not available: {reason}" for other, reason in refused.items())
            on_message(f"kernels: {kernels}{''.join(reasons)}")
        backend = get_backend(kernels)
        require_served(backend, options.device)
        # What is wrong with the request is said before the model is fetched.
        acceptance_rule(options.acceptance, backend)
        draft_model = options.draft_model
        if draft_model is None and options.drafter == "dflash" and shipped is not None:
            draft_model = str(shipped)
        check_drafter(options.drafter, has_draft_model=draft_model is not None)
        dtype = _default_dtype(options.device) if options.dtype == "auto" else _DTYPES[options.dtype]
        require_attention(backend, dtype)
        checkpoint = load() if load else load_checkpoint(resolve_model(options.model, on_progress=on_message))
        model = Model(checkpoint.config, checkpoint.weights, backend, dtype=dtype, device=options.device)

        def load_draft_model() -> tuple[Model, str]:
            name = str(draft_model)
            small = load_checkpoint(resolve_model(name, on_progress=on_message))
            require_same_vocabulary(name, small, checkpoint)
            return Model(small.config, small.weights, backend, dtype=dtype, device=options.device), name

        def load_block_drafter() -> DFlashCheckpoint:
            name = str(draft_model)
            label = Path(name).name if Path(name).exists() else name
            return DFlashCheckpoint.load(resolve_model(name, on_progress=on_message), label)

        drafter = make_drafter(
            options.drafter,
            DrafterContext(
                target=model,
                backend=backend,
                draws=options.drafts == "drawn",
                early_exit_layers=options.early_exit_layers,
                draft_model=None if draft_model is None else load_draft_model,
                block_drafter=None if draft_model is None else load_block_drafter,
            ),
        )
        executor = Executor(
            model,
            backend,
            drafter,
            plain_backend=_plain_backend(backend, options.device),
            max_batch=options.max_batch,
            max_draft=LONGEST if options.draft_len is None else options.draft_len,
            acceptance=options.acceptance,
            eos_token_ids=checkpoint.tokenizer.eos_token_ids,
        )
        notes: dict[str, str] = {}
        if options.draft_len is None:
            notes["draft_len"] = _measure_draft_length(executor, checkpoint, on_message)
        description = {
            "engine": "decoder",
            # Where a file lies on this machine says nothing about it; its sha256 does.
            "model": checkpoint.path.name if Path(options.model).exists() else options.model,
            "model_sha256": checkpoint.sha256,
            "architecture": checkpoint.config.architecture,
            "num_layers": checkpoint.config.num_layers,
            "vocab_size": checkpoint.config.vocab_size,
            "eos_token_ids": list(checkpoint.tokenizer.eos_token_ids),
            "dtype": str(dtype).removeprefix("torch."),
            "device": options.device,
            "device_name": torch.cuda.get_device_name() if options.device == "cuda" else None,
            "kernels": backend.name,
            "kernels_refused": dict(refused),
            "drafter": drafter.name,
            "drafter_parameters": dict(drafter.describe()),
            "draft_len": executor.max_draft,
            "acceptance": options.acceptance,
            "max_batch": options.max_batch,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "equivtest": equivtest.__version__,
        }
        return cls(executor, checkpoint, description, notes)

    @property
    def executor(self) -> Executor:
        """What runs the requests."""
        return self._executor

    @property
    def model(self) -> Model:
        """What decodes."""
        return self._executor.model

    @property
    def capabilities(self) -> Capabilities:
        # In bfloat16 near ties fall differently in batches of another shape, and many texts change.
        exact = self._description["dtype"] == "float32"
        return Capabilities(takes_faults=True, replays=exact, exact=exact)

    def refusal(self, params: SamplingParams) -> str | None:
        return None  # what the kernels cannot represent is decoded plain

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
        return self._executor.generate(requests, speculative=speculative, fault=fault, on_tokens=on_tokens)

    def scorer(self) -> Scorer:
        """Scores what this engine generated, with the same model and kernels; made at the first call and kept.

        Where the drafter draws, its drafts are held against its own law; elsewhere they are sure.
        """
        if self._scorer is None:
            model, drafter = self._executor.model, self._executor.drafter
            self._scorer = Scorer(
                model,
                self._executor.plain_backend,
                drafts=draft_laws(drafter, self._executor.plain_backend),
                eos_token_ids=self._executor.eos_token_ids,
                **SCORER_ROWS[model.device.type],
            )
        return self._scorer

    def describe(self) -> Mapping[str, Any]:
        return dict(self._description)

    def notes(self) -> Mapping[str, str]:
        return dict(self._notes)

    def close(self) -> None:
        pass


def _measure_draft_length(executor: Executor, checkpoint: Checkpoint, on_message: Callable[[str], None] | None) -> str:
    """Let the executor keep to the length that pays; what was found, in words."""
    prompts = [tuple(checkpoint.tokenizer.encode_chat(one)) for one in default_conversations()]
    found = keep_to_best_length(executor, measuring_requests(prompts, executor.max_batch))
    text = (
        f"drafts a step: {executor.max_draft}, measured at {executor.max_batch} requests; "
        f"{found.tokens:.2f} tokens of a request in a step, {1e3 * found.token_s:.3g} ms a token"
    )
    if not found.num_draft:
        text = f"drafts a step: 1, though at {executor.max_batch} requests none would be faster still"
    if on_message is not None:
        on_message(text)
    return text


def require_device(device: str) -> None:
    """Raise InvalidSetting unless torch can use the device here."""
    if device == "cuda" and not torch.cuda.is_available():
        requirement = (
            f"torch {torch.__version__} finds no usable CUDA device: take device cpu, or check the driver with "
            "nvidia-smi and install a torch that is built for CUDA"
        )
        raise InvalidSetting("device", device, requirement)


def require_served(backend: KernelBackend, device: str) -> None:
    """Raise KernelUnavailable unless the backend's kernels run on the device."""
    if device not in backend.capabilities.devices:
        served = ", ".join(sorted(backend.capabilities.devices))
        raise KernelUnavailable(backend.name, f"it runs on {served} only, not on {device}; take kernels auto")


def require_attention(backend: KernelBackend, dtype: torch.dtype) -> None:
    """Raise InvalidSetting unless the backend's attention takes models of that dtype."""
    served = backend.capabilities.attention_dtypes
    if dtype not in served:
        names = sorted(str(one).removeprefix("torch.") for one in served)
        takes = f"kernels {backend.name} attend in {' or '.join(names)} only: --dtype {names[0]}"
        raise InvalidSetting("dtype", str(dtype).removeprefix("torch."), takes)


def _resolve_kernels(options: EngineOptions) -> tuple[str, Mapping[str, str]]:
    """The name of the backend, and why those that `auto` would rather have had do not work."""
    if options.kernels != "auto":
        return options.kernels, {}
    return resolve_auto(options.device)


def _plain_backend(backend: KernelBackend, device: str) -> KernelBackend | None:
    """What draws for requests that the backend cannot represent; None: the executor's own choice."""
    capable = backend.capabilities.min_p and backend.capabilities.per_request_seed
    return None if capable or device == "cpu" else get_backend(resolve_auto(device)[0])


def _default_dtype(device: str) -> torch.dtype:
    if device == "cpu":
        return default_dtype()
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32


def require_same_vocabulary(name: str, small: Checkpoint, target: Checkpoint) -> None:
    """Raise UnsupportedModel unless every token id means the same text to both models."""
    sizes = small.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UnsupportedModel(
            name, f"a draft model must share the target's vocabulary: it has {sizes[0]} tokens, the target {sizes[1]}"
        )
    for token_id in range(min(small.tokenizer.vocab_size, target.tokenizer.vocab_size)):
        texts = small.tokenizer.token_text(token_id), target.tokenizer.token_text(token_id)
        if texts[0] != texts[1]:
            raise UnsupportedModel(
                name,
                f"a draft model must share the target's vocabulary: token {token_id} is "
                f"{texts[0]!r}, the target's {texts[1]!r}",
            )
