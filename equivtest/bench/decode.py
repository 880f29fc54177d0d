"""Plain decoding against transformers on the same weights, side by side: whole steps, and forward passes alone."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equivtest.bench.latency import serve
from equivtest.bench.measured import describe_device
from equivtest.decoder.executor import Executor
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.transformers_model import transformers_model
from equivtest.decoder.weights import default_dtype, load_checkpoint
from equivtest.engines.decoder import require_device, require_served
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import RowParams, Streams
from equivtest.kernels.registry import get_backend
from equivtest.records import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Times of single decoding steps of the whole batch."""

    name: str
    median_s: float
    best_s: float
    num_steps: int
    tokens_per_s: float
    """Batch over median_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBench:
    """What was measured, on what."""

    batch: int
    context: int
    """Tokens in the cache of each sequence when the first timed step begins, less the warm-up steps."""
    dtype: str
    threads: int
    device: Mapping[str, Any]
    """Name, size and versions."""
    shared_prompt: bool
    """Our sequences share the pages of one prompt, as the samples of a protocol do; transformers cannot."""
    params: SamplingParams
    backend: str
    step: StepTiming
    """Ours: forward, head, filter and draw; on a GPU the whole of a step of the executor, which also commits."""
    forward: StepTiming
    """Ours: forward and head alone; on a GPU a graph."""
    hf_step: StepTiming
    """A step of transformers' `generate` under the same params."""
    hf_forward: StepTiming
    """transformers' forward and head alone, with its own cache."""

    def rows(self) -> list[dict[str, Any]]:
        """One table row a way of decoding; `speedup` is over transformers doing the same."""
        slower = {"step": self.hf_step, "forward": self.hf_forward}
        return [
            {
                "what": timing.name,
                "median_ms": 1e3 * timing.median_s,
                "best_ms": 1e3 * timing.best_s,
                "tokens_per_s": timing.tokens_per_s,
                "speedup": slower.get(timing.name, timing).median_s / timing.median_s,
            }
            for timing in (self.step, self.forward, self.hf_step, self.hf_forward)
        ]

    def settings(self) -> dict[str, Any]:
        """Everything but the timings."""
        timings = ("step", "forward", "hf_step", "hf_forward")
        return {key: value for key, value in asdict(self).items() if key not in timings}


def bench_decode(
    model: str = "smollm2-135m",
    *,
    device: str = "cpu",
    kernels: str | None = None,
    batch: int = 256,
    context: int = 60,
    steps: int = 8,
    dtype: str = "auto",
    threads: int | None = None,
    shared_prompt: bool = True,
    params: SamplingParams | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> DecodeBench:
    """Time both decoders, one after the other in each of two rounds.

    model: as `--model` takes it. kernels: default cpp on a CPU and cuda on a GPU. dtype: float32, bfloat16 or auto.
    Raises UsageError without transformers.
    """
    threads = torch.get_num_threads() if threads is None else threads
    for name, value in (("batch", batch), ("context", context), ("steps", steps), ("threads", threads)):
        if value < 1:
            raise InvalidSetting(name, value, "must be at least 1")
    params = params or SamplingParams(temperature=0.8, top_p=0.95)
    tell = on_progress or (lambda line: None)
    require_device(device)
    backend = get_backend(kernels or {"cpu": "cpp", "cuda": "cuda"}[device])
    require_served(backend, device)
    checkpoint = load_checkpoint(resolve_model(model, on_progress=on_progress))
    own_dtype = default_dtype() if device == "cpu" else torch.bfloat16
    weights_dtype = own_dtype if dtype == "auto" else getattr(torch, dtype)
    config = checkpoint.config
    prompt = torch.randint(config.vocab_size, (context,), generator=torch.Generator().manual_seed(0))
    with _threads(threads):
        ours = Model(config, checkpoint.weights, backend, dtype=weights_dtype, device=device)
        theirs = transformers_model(config, checkpoint.weights, dtype=weights_dtype).to(device)
        step, forward, hf_step, hf_forward = [], [], [], []
        for round_ in (1, 2):
            tell(f"round {round_} of 2: equivtest")
            if device == "cpu":
                step += _our_steps(ours, prompt, batch, steps, params, shared_prompt)
            else:
                step += _executor_steps(ours, prompt, batch, steps, params, shared_prompt)
            forward += _our_steps(ours, prompt, batch, steps, None, shared_prompt)
            tell(f"round {round_} of 2: transformers")
            hf_forward += _hf_forwards(theirs, prompt, batch, steps)
            hf_step += _hf_steps(theirs, prompt, batch, steps, params)
    timings = {
        name: _timing(name, seconds, batch)
        for name, seconds in (
            ("step", step),
            ("forward", forward),
            ("hf_step", hf_step),
            ("hf_forward", hf_forward),
        )
    }
    return DecodeBench(
        batch=batch,
        context=context,
        dtype=str(weights_dtype).removeprefix("torch."),
        threads=threads,
        shared_prompt=shared_prompt,
        params=params,
        backend=backend.name,
        device=describe_device(device),
        **timings,
    )


def _our_steps(
    model: Model, prompt: Tensor, batch: int, steps: int, params: SamplingParams | None, shared_prompt: bool
) -> list[float]:
    """Seconds of each step; with `params` None, of the forward and the head alone."""
    config, total = model.config, len(prompt) + steps + _WARM_UP_STEPS
    kv = PagedKVCache(
        config, num_pages=batch * -(-total // 16), max_sequences=batch, dtype=model.dtype, device=model.device
    )
    sequences = np.array([kv.new_sequence()])
    model.forward(prompt.to(model.device), kv.extend(sequences, np.array([len(prompt)])), kv)
    while len(sequences) < batch:
        sequences = np.append(sequences, kv.fork(int(sequences[0])))
    if not shared_prompt:
        _unshare(kv, sequences)
    rows = RowParams.of([params or SamplingParams()] * batch)
    probs = torch.empty(batch, config.vocab_size)
    tokens = prompt[-1:].repeat(batch)
    keys = torch.arange(batch)
    _wait(model.device)
    seconds = []
    for position in range(steps + _WARM_UP_STEPS):
        start = time.perf_counter()
        logits = model.step_logits(tokens, kv.extend(sequences, np.ones_like(sequences)), kv)
        if params is not None:
            model.backend.verify_probs(logits, rows, out=probs)
            streams = Streams(keys=keys, positions=torch.full((batch,), position))
            model.backend.sample(probs, streams, out=tokens)
        _wait(model.device)
        seconds.append(time.perf_counter() - start)
    return seconds[_WARM_UP_STEPS:]


def _executor_steps(
    model: Model, prompt: Tensor, batch: int, steps: int, params: SamplingParams, shared_prompt: bool
) -> list[float]:
    """Seconds between the moments at which the host had read the tokens of two steps, in the second of two equal
    calls: the first captures what graphs the second replays."""
    prompts = [prompt if shared_prompt else prompt.roll(row) for row in range(batch)]
    requests = [
        Request(
            prompt_token_ids=tuple(token_ids.tolist()),
            params=params,
            stream_key=row,
            max_tokens=steps + _WARM_UP_STEPS + 1,
        )
        for row, token_ids in enumerate(prompts)
    ]
    executor = Executor(model, model.backend, None, max_batch=batch)
    serve(executor, requests, speculative=False)
    seconds = np.diff(serve(executor, requests, speculative=False).step_ends_s)
    return [float(each) for each in seconds[_WARM_UP_STEPS:]]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _unshare(kv: PagedKVCache, sequences: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Give each sequence its own copy of the first one's pages."""
    lengths = kv.lengths(sequences)
    first = kv.extend(sequences[:1], np.ones(1, dtype=np.int64)).page_table[0].astype(np.int64)
    kv.truncate(sequences[:1], lengths[:1])
    contents = kv.pages[:, first]
    for sequence in sequences[1:]:
        kv.truncate(np.array([sequence]), np.zeros(1, dtype=np.int64))
        own = kv.extend(np.array([sequence]), lengths[:1]).page_table[0].astype(np.int64)
        kv.pages[:, own] = contents[:, : len(own)]


def _hf_forwards(model: PreTrainedModel, prompt: Tensor, batch: int, steps: int) -> list[float]:
    from transformers import DynamicCache

    tokens = prompt.repeat(batch, 1).to(model.device)
    # Older versions call the argument past_key_values.
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    cache = {name: DynamicCache()}
    seconds = []
    with torch.inference_mode():
        model(tokens, logits_to_keep=1, use_cache=True, **cache)
        _wait(model.device)
        for _ in range(steps + _WARM_UP_STEPS):
            start = time.perf_counter()
            model(tokens[:, -1:], use_cache=True, **cache)
            _wait(model.device)
            seconds.append(time.perf_counter() - start)
    return seconds[_WARM_UP_STEPS:]


def _hf_steps(model: PreTrainedModel, prompt: Tensor, batch: int, steps: int, params: SamplingParams) -> list[float]:
    from transformers import GenerationConfig, StoppingCriteriaList

    marks = []

    def mark(input_ids: Tensor, scores: Tensor, **unused: object) -> Tensor:
        """Called once at the end of every step."""
        _wait(input_ids.device)
        marks.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    generation_config: Any = GenerationConfig
    generation = generation_config(
        do_sample=not params.greedy,
        temperature=params.temperature or 1.0,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        max_new_tokens=steps + _WARM_UP_STEPS + 1,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens = prompt.repeat(batch, 1).to(model.device)
    criteria = StoppingCriteriaList([mark])
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), generation_config=generation, stopping_criteria=criteria
    )
    return [float(gap) for gap in np.diff(marks)[_WARM_UP_STEPS:]]


def _timing(name: str, seconds: list[float], batch: int) -> StepTiming:
    median = statistics.median(seconds)
    return StepTiming(
        name=name, median_s=median, best_s=min(seconds), num_steps=len(seconds), tokens_per_s=batch / median
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
