"""Executors, requests and laws that the tests of the executor share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy import stats

from equivtest.decoder.drafters.base import Drafter
from equivtest.decoder.drafters.registry import DrafterContext, make_drafter
from equivtest.decoder.executor import Executor
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.stages import Drafts, StepInput
from equivtest.kernels.contract import KernelBackend, RowParams
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, Request, SamplingParams
from equivtest.rng import stream_key
from tests.decoder.dflash_drafters import dflash_checkpoint
from tests.decoder.tiny_models import tiny_model

DRAFTERS = ("ngram", "early_exit", "sampled_exit", "self", "model", "dflash", "dflash with a Markov head")
RULES = (*((drafter, "chain") for drafter in DRAFTERS), ("early_exit", "match"))
"""Drafter and acceptance rule; one drafter under match, whose texts no draft changes (test_identity, for each)."""
CONFIGS = {
    "topp95": SamplingParams(temperature=0.8, top_p=0.95),
    "topk50": SamplingParams(temperature=1.0, top_k=50),
    "topk20p90": SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    "minp05": SamplingParams(temperature=0.8, min_p=0.05),
}
GREEDY = SamplingParams(temperature=0.0)


def build(
    backend: KernelBackend,
    drafter: str = "early_exit",
    *,
    architecture: str = "llama",
    acceptance: str = "chain",
    max_batch: int = 64,
    max_draft: int = 4,
    model: Model | None = None,
    draft_model: Model | None = None,
    plain_backend: KernelBackend | None = None,
    replace_drafter: Drafter | None = None,
    eos_token_ids: Sequence[int] = (),
) -> Executor:
    """A tiny target (or `model`); its draft model has the same first two layers, so that they often agree."""
    target = model or tiny_model(architecture, backend=backend)
    draft = draft_model or tiny_model(architecture, backend=backend, layers=2)
    context = DrafterContext(
        target=target,
        backend=backend,
        early_exit_layers=2,
        draft_model=lambda: (draft, "tiny"),
        draws=drafter != "dflash",
        block_drafter=lambda: dflash_checkpoint(target.config, markov_head=drafter != "dflash"),
    )
    return Executor(
        target,
        backend,
        replace_drafter or make_drafter(drafter.split()[0], context),
        acceptance=acceptance,
        max_batch=max_batch,
        max_draft=max_draft,
        plain_backend=plain_backend,
        eos_token_ids=eos_token_ids,
    )


def random_prompts(count: int, *, vocab_size: int = 97, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of 1 to 40 tokens; every other one repeats itself, so that prompt lookup finds something."""
    rng = np.random.default_rng(seed)
    prompts = []
    for index in range(count):
        tokens = rng.integers(vocab_size, size=1 + rng.integers(40)).tolist()
        prompts.append(tuple((tokens[: len(tokens) // 2 + 1] * 2) if index % 2 else tokens))
    return prompts


def requests_for(
    prompts: Sequence[tuple[int, ...]], params: SamplingParams, *, max_tokens: int = 24, run: object = 0
) -> list[Request]:
    return [
        Request(prompt_token_ids=prompt, params=params, stream_key=stream_key(run, index), max_tokens=max_tokens)
        for index, prompt in enumerate(prompts)
    ]


def requests_under_each(laws: Mapping[str, SamplingParams], prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """Every prompt under every law, law by law, in one list: a mixed batch, and each sample what it would be alone."""
    return [request for params in laws.values() for request in requests_for(prompts, params)]


def texts(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.token_ids.tolist() for generation in generations]


def fresh_logits(model: Model, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size] of a text computed in one go with an empty cache."""
    kv = PagedKVCache(model.config, num_pages=32, max_sequences=1, dtype=model.dtype)
    batch = kv.extend(np.array([kv.new_sequence()]), np.array([len(token_ids)]))
    return model.logits(model.forward(torch.tensor(token_ids), batch, kv))


def sequence_law(
    model: Model, backend: KernelBackend, prompt: tuple[int, ...], params: SamplingParams, length: int
) -> dict[tuple[int, ...], float]:
    """The exact probability of every continuation of `length` tokens, by walking the whole tree."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = torch.stack([fresh_logits(model, [*prompt, *prefix])[-1] for prefix in law])
        probs = backend.verify_probs(rows, RowParams.of([params] * len(law)), out=torch.empty(rows.shape))
        law = {
            (*prefix, token): mass * p
            for (prefix, mass), row in zip(law.items(), probs.double(), strict=True)
            for token, p in enumerate((row / row.sum()).tolist())
            if p > 0
        }
    return law


def slowly_processed(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    text: Sequence[int],
    *,
    eos_token_ids: Sequence[int] = (),
) -> list[float]:
    """What `process_logits` does to one row, token by token."""
    processed = []
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    bias = dict(params.logit_bias)
    for token, z in enumerate(logits):
        if token in prompt or token in text:
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
        z -= params.frequency_penalty * list(text).count(token)
        if token in text:
            z -= params.presence_penalty
        z += bias.get(token, 0.0)
        if token in stops and len(text) < params.min_tokens:
            z = -np.inf
        processed.append(z)
    return processed


def processed_sequence_law(
    model: Model,
    prompt: tuple[int, ...],
    params: SamplingParams,
    length: int,
    *,
    prompt_length: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> dict[tuple[int, ...], float]:
    """The exact probability of every text of `length` tokens, or fewer where a stop token ends it, from processed
    logits. prompt_length: where the prompt ends and text begins, default all of it."""
    backend, prompt_length = get_backend("reference"), len(prompt) if prompt_length is None else prompt_length
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    finished: dict[tuple[int, ...], float] = {}
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        rows = []
        for prefix in law:
            whole = [*prompt, *prefix]
            logits = fresh_logits(model, whole)[-1].tolist()
            rows.append(
                slowly_processed(
                    logits, params, whole[:prompt_length], whole[prompt_length:], eos_token_ids=eos_token_ids
                )
            )
        logits = torch.tensor(rows)
        probs = backend.verify_probs(logits, RowParams.of([params] * len(law)), out=torch.empty(logits.shape))
        longer = {
            (*prefix, token): mass * p
            for (prefix, mass), row in zip(law.items(), probs.double(), strict=True)
            for token, p in enumerate((row / row.sum()).tolist())
            if p > 0
        }
        finished |= {text: mass for text, mass in longer.items() if text[-1] in stops}
        law = {text: mass for text, mass in longer.items() if text[-1] not in stops}
    return finished | law


def law_p_value(law: dict[tuple[int, ...], float], outcomes: Sequence[Sequence[int]]) -> float:
    """Pearson chi-squared of whole sequences against their law; under 5 expected share a bin. 0 off the support."""
    index = {sequence: i for i, sequence in enumerate(law)}
    if any(tuple(outcome) not in index for outcome in outcomes):
        return 0.0
    counts = np.bincount([index[tuple(outcome)] for outcome in outcomes], minlength=len(law))
    expected = np.array(list(law.values())) * len(outcomes)
    common = expected >= 5
    observed_bins, expected_bins = counts[common], expected[common]
    if (~common).any():
        observed_bins = np.append(observed_bins, counts[~common].sum())
        expected_bins = np.append(expected_bins, expected[~common].sum())
    statistic = ((observed_bins - expected_bins) ** 2 / expected_bins).sum()
    return float(stats.chi2.sf(statistic, len(expected_bins) - 1))


class StubDrafter:
    """Proposes what `choose(step)` says; for tests of everything that a drafter must not be able to break."""

    name = "stub"
    follower = None
    on_device = None

    def __init__(self, choose: Callable[[StepInput], Drafts]) -> None:
        self.choose = choose

    def describe(self) -> dict[str, object]:
        return {}

    def start(self, table: object, *, max_batch: int, max_draft: int) -> None: ...
    def admit(self, requests: object) -> None: ...
    def release(self, requests: object) -> None: ...
    def stop(self) -> None: ...

    def propose(self, step: StepInput) -> Drafts:
        return self.choose(step)


def garbage(vocab_size: int) -> StubDrafter:
    """Drafts that are a hash of the committed text: in range, and otherwise nonsense."""

    def choose(step: StepInput) -> Drafts:
        width = int(step.limits.max())
        base = step.table.token_ids[step.requests].sum(axis=1)[:, None] * 31 + step.lengths[:, None]
        num_draft = np.minimum(step.limits, 1 + step.lengths % width).astype(np.int32)
        return Drafts((base * np.arange(7, 7 + width)) % vocab_size, num_draft, None)

    return StubDrafter(choose)
