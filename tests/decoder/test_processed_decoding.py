"""With penalties, bias, min_tokens and stops, speculation still leaves texts and their law alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from equivtest.decoder.logit_processing import RowTexts, process_logits, row_texts
from equivtest.decoder.model import Model
from equivtest.decoder.stages import Drafts, Scored, Stages, StepInput
from equivtest.decoder.token_rules import TokenRules
from equivtest.kernels.registry import get_backend
from equivtest.records import Origin, SamplingParams
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import (
    CONFIGS,
    DRAFTERS,
    GREEDY,
    RULES,
    build,
    garbage,
    law_p_value,
    processed_sequence_law,
    random_prompts,
    requests_for,
    requests_under_each,
    texts,
)
from tests.decoder.tiny_models import tiny_model

TINY_BIAS = tuple((i, -100.0 if i % 4 == 1 else 1.0) for i in range(97) if i % 4 in (1, 2))
PROCESSED = {
    "penalties": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.6,
                                presence_penalty=0.4),
    "bias": SamplingParams(temperature=0.8, min_p=0.02, logit_bias=TINY_BIAS),
    "min_tokens": SamplingParams(temperature=0.9, stop_token_ids=tuple(range(5, 97, 8)), min_tokens=6),
    "everything": SamplingParams(temperature=0.8, top_k=40, repetition_penalty=1.2, frequency_penalty=0.6,
                                 logit_bias=TINY_BIAS, stop_token_ids=tuple(range(0, 97, 24)), min_tokens=4,
                                 ignore_eos=False),
}  # fmt: skip
GREEDILY_PROCESSED = {name: dataclasses.replace(params, temperature=0.0) for name, params in PROCESSED.items()}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_match_gives_the_text_of_plain_sampling_whatever_is_asked(drafter: str) -> None:
    executor = build(get_backend("cpp"), drafter, acceptance="match", max_batch=96, eos_token_ids=(50,))
    requests = requests_under_each(PROCESSED, random_prompts(24))
    off = executor.generate(requests, speculative=False)
    on = executor.generate(requests, speculative=True)
    assert texts(on) == texts(off)
    kept = {r.params for r, g in zip(requests, on, strict=True) if Origin.ACCEPTED in g.origins}
    assert kept == {*PROCESSED.values()}


@pytest.mark.parametrize(("drafter", "acceptance"), [*RULES, ("garbage", "chain"), ("garbage", "match")])
def test_greedy_text_is_the_same_with_and_without_speculation_whatever_is_asked(drafter: str, acceptance: str) -> None:
    executor = build(
        get_backend("cpp"),
        "ngram" if drafter == "garbage" else drafter,
        acceptance=acceptance,
        eos_token_ids=(50,),
        replace_drafter=garbage(97) if drafter == "garbage" else None,
    )
    requests = requests_under_each(GREEDILY_PROCESSED, random_prompts(16))
    off = executor.generate(requests, speculative=False)
    on = executor.generate(requests, speculative=True)
    assert texts(on) == texts(off)


@pytest.mark.parametrize("name", list(PROCESSED))
def test_what_is_asked_changes_the_greedy_text(name: str) -> None:
    """What the test above compares would be different from one another if a request's wish were lost on one side."""
    executor = build(get_backend("cpp"), eos_token_ids=(50,))
    asked, plain = (
        executor.generate(requests_for(random_prompts(16), params), speculative=False)
        for params in (GREEDILY_PROCESSED[name], GREEDY)
    )
    assert texts(asked) != texts(plain)


@pytest.mark.parametrize("name", list(PROCESSED))
def test_greedy_text_is_the_argmax_of_the_processed_logits(name: str) -> None:
    """Against a loop that computes every prefix anew."""
    params = GREEDILY_PROCESSED[name]
    executor = build(get_backend("cpp"), eos_token_ids=(50,))
    for request in requests_for(random_prompts(4), params, max_tokens=12):
        text = executor.generate([request], speculative=True)[0].token_ids.tolist()
        for position, token in enumerate(text):
            law = processed_sequence_law(
                executor.model, (*request.prompt_token_ids, *text[:position]), params, 1,
                prompt_length=len(request.prompt_token_ids), eos_token_ids=(50,),
            )  # fmt: skip
            assert law == {(token,): 1.0}


def test_both_backends_and_a_backend_of_few_features_serve_processed_requests_speculatively() -> None:
    requests = requests_for(random_prompts(8), PROCESSED["everything"])
    backends = (get_backend("cpp"), get_backend("reference"), IncapableBackend(get_backend("cpp")))
    results = [
        build(backend, "model", eos_token_ids=(50,)).generate(requests, speculative=True) for backend in backends
    ]
    assert texts(results[0]) == texts(results[1]) == texts(results[2])
    assert all(g.route.speculative for result in results for g in result)


# The law of whole texts, and four errors that it rejects.

LAW_VOCAB = 13
LAW_PROMPT = (9, 10, 10, 5, 5, 3, 2, 9, 10)
LAW_PARAMS = SamplingParams(
    temperature=1.2, top_k=6, repetition_penalty=1.5, frequency_penalty=0.8, presence_penalty=0.5,
    logit_bias=((2, 2.0), (5, -2.0)), stop_token_ids=(1, 8, 12), min_tokens=2,
)  # fmt: skip
LAW_LENGTH = 4
NUM_TEXTS = 4_000
ALPHA = 1e-4
"""False-alarm rate of one law test; with fixed seeds its outcome is fixed."""


def small_model(layers: int = 3) -> Model:
    return tiny_model(vocab_size=LAW_VOCAB, hidden=16, layers=layers, intermediate=24, backend=get_backend("cpp"))


@pytest.fixture(scope="module")
def exact_law() -> dict[tuple[int, ...], float]:
    return processed_sequence_law(small_model(), LAW_PROMPT, LAW_PARAMS, LAW_LENGTH)


def law_texts(
    drafter: str, acceptance: str, fault: Callable[[Stages], Stages] | None = None, *, speculative: bool = True
) -> list[list[int]]:
    executor = build(
        get_backend("cpp"), drafter, acceptance=acceptance, model=small_model(), draft_model=small_model(layers=1),
        max_batch=4096, max_draft=3,
    )  # fmt: skip
    requests = requests_for([LAW_PROMPT] * NUM_TEXTS, LAW_PARAMS, max_tokens=LAW_LENGTH, run=("processed", drafter))
    return texts(executor.generate(requests, speculative=speculative, fault=fault))


@pytest.mark.parametrize("drafter", ["early_exit", "model", "ngram"])
def test_speculation_reproduces_the_law_with_penalties_bias_min_tokens_and_stops(
    drafter: str, exact_law: dict[tuple[int, ...], float]
) -> None:
    """Chi-squared of 4,000 whole texts against the enumerated law; false-alarm rate 1e-4 a case. The match rule's
    texts are those of plain sampling, tested above token for token."""
    assert law_p_value(exact_law, law_texts(drafter, "chain")) > ALPHA


def test_plain_decoding_reproduces_the_law_with_penalties_bias_min_tokens_and_stops(
    exact_law: dict[tuple[int, ...], float],
) -> None:
    """False-alarm rate 1e-4."""
    assert law_p_value(exact_law, law_texts("early_exit", "chain", speculative=False)) > ALPHA


def processing(change: Callable[[TokenRules, RowTexts, Scored, Drafts], Scored]) -> Callable[[Stages], Stages]:
    def process(step: StepInput, drafts: Drafts, scored: Scored) -> Scored:
        return change(step.table.rules, row_texts(step, drafts, scored), scored, drafts)

    return lambda stages: dataclasses.replace(stages, process=process)


def stale_history(rules: TokenRules, before: RowTexts, scored: Scored, drafts: Drafts) -> Scored:
    """Penalties do not see the drafts of the block; min_tokens does."""
    penalties = dataclasses.replace(rules, min_tokens=np.zeros_like(rules.min_tokens))
    rest = dataclasses.replace(
        rules,
        repetition_penalty=np.ones_like(rules.repetition_penalty),
        frequency_penalty=np.zeros_like(rules.frequency_penalty),
        presence_penalty=np.zeros_like(rules.presence_penalty),
        bias=np.zeros_like(rules.bias),
    )
    logits = process_logits(scored.logits, penalties, before._replace(lengths=before.lengths - scored.slots))
    return scored._replace(logits=process_logits(logits, rest, before))


def bias_skips_drafts(rules: TokenRules, before: RowTexts, scored: Scored, drafts: Drafts) -> Scored:
    with_bias = process_logits(scored.logits, rules, before)
    without = process_logits(scored.logits, dataclasses.replace(rules, bias=np.zeros_like(rules.bias)), before)
    skipped = torch.from_numpy(scored.slots < drafts.num_draft[scored.batch_rows])
    return scored._replace(logits=torch.where(skipped[:, None], without, with_bias))


def min_tokens_off_by_one(rules: TokenRules, before: RowTexts, scored: Scored, drafts: Drafts) -> Scored:
    one_more = dataclasses.replace(rules, min_tokens=rules.min_tokens + 1)
    return scored._replace(logits=process_logits(scored.logits, one_more, before))


def text_not_cropped(stages: Stages) -> Stages:
    class NotCropped(type(stages.commit)):  # type: ignore[misc]
        def crop(self, step: StepInput, output_token_ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
            return counts

    return dataclasses.replace(stages, commit=NotCropped())


@pytest.mark.parametrize(
    "fault",
    [processing(stale_history), processing(bias_skips_drafts), processing(min_tokens_off_by_one), text_not_cropped],
    ids=["stale history", "bias skips drafts", "min_tokens off by one", "text not cropped"],
)
def test_a_decoder_that_processes_wrongly_is_rejected_by_the_law(
    fault: Callable[[Stages], Stages], exact_law: dict[tuple[int, ...], float]
) -> None:
    """The twins: each error moves hundreds of the 4,000 texts or puts out one that the law does not hold."""
    assert law_p_value(exact_law, law_texts("early_exit", "chain", fault)) < 1e-6


def test_the_law_of_the_tests_is_one_of_processed_logits(exact_law: dict[tuple[int, ...], float]) -> None:
    assert math.isclose(sum(exact_law.values()), 1.0, rel_tol=1e-4)
    lengths = {len(text) for text in exact_law}
    assert lengths == {3, 4}
    unprocessed = processed_sequence_law(small_model(), LAW_PROMPT, CONFIGS["topk50"], 1)
    assert len(unprocessed) == LAW_VOCAB
