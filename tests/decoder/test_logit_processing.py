"""Penalties, bias and min_tokens: the arithmetic against a slow loop, and the stage on a block of drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.logit_processing import RowTexts, process_logits
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.stages import Drafts, Scored, StepInput
from equivtest.decoder.standard_stages import ProcessLogits
from equivtest.decoder.token_rules import TokenRules
from equivtest.errors import InvalidSetting
from equivtest.kernels.registry import get_backend
from equivtest.records import SPEC, Request, SamplingParams
from tests.decoder.scenarios import (
    GREEDY,
    build,
    requests_for,
    slowly_processed,
)

VOCAB = 23
PENALTIES = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.3)
EVERYTHING = dataclasses.replace(
    PENALTIES, logit_bias=((7, -1.5), (2, 3.0), (3, -100.0)), stop_token_ids=(4, 5, 4), min_tokens=3
)


def row_of(
    params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], out: Sequence[Sequence[int]]
) -> RowTexts:
    """One row after each prompt and text."""
    whole = [[*prompt, *text] for prompt, text in zip(prompts, out, strict=True)]
    padded = np.full((len(whole), max(map(len, whole)) + 2), 1)  # what stands past the row must not count
    for row, text in zip(padded, whole, strict=True):
        row[: len(text)] = text
    return RowTexts(
        requests=np.arange(len(params)),
        texts=padded,
        rows=np.arange(len(params)),
        prompt_lengths=np.array([len(prompt) for prompt in prompts]),
        lengths=np.array([len(text) for text in whole]),
    )


SEQUENCES = st.lists(st.integers(0, VOCAB - 1), max_size=12)
SCALES = st.sampled_from([0.0, 0.7, -0.4])


@st.composite
def some_params(draw: Callable[..., object]) -> SamplingParams:
    bias = draw(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32), max_size=4))
    return SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.4, 0.8])),  # type: ignore[arg-type]
        frequency_penalty=draw(SCALES),  # type: ignore[arg-type]
        presence_penalty=draw(SCALES),  # type: ignore[arg-type]
        logit_bias=tuple(bias.items()),  # type: ignore[attr-defined]
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))),  # type: ignore[call-overload]
        ignore_eos=draw(st.booleans()),  # type: ignore[arg-type]
        min_tokens=draw(st.integers(0, 8)),  # type: ignore[arg-type]
    )


@given(
    rows=st.lists(st.tuples(some_params(), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), SEQUENCES),
                  min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_logits_are_those_of_a_loop_over_tokens(
    rows: list[tuple[SamplingParams, list[int], list[int]]], dtype: torch.dtype, seed: int
) -> None:
    params, prompts, out = zip(*rows, strict=True)
    logits = (3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)
    kept = logits.clone()
    rules = TokenRules.of(params, eos_token_ids=(11,), vocab_size=VOCAB)
    processed = process_logits(logits, rules, row_of(params, prompts, out))
    assert logits.equal(kept)
    for row, (own, prompt, text) in enumerate(rows):
        expected = slowly_processed(logits[row].tolist(), own, prompt, text, eos_token_ids=(11,))
        np.testing.assert_allclose(processed[row].tolist(), expected, rtol=1e-5, atol=1e-5)
    asked = any(p.penalised or p.logit_bias for p in params) or rules.min_tokens.any()
    assert rules.asks_processing == asked
    assert processed is logits or (asked and processed.dtype == torch.float32)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    rng = np.random.default_rng(0)
    params = [SamplingParams(repetition_penalty=1.7)] * 8
    logits = 3 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    prompts, out = rng.integers(VOCAB, size=(8, 5)), rng.integers(VOCAB, size=(8, 4))
    rules = TokenRules.of(params, eos_token_ids=(), vocab_size=VOCAB)
    ours = process_logits(logits, rules, row_of(params, prompts.tolist(), out.tolist()))
    theirs = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    whole = torch.from_numpy(np.concatenate([prompts, out], axis=1))
    torch.testing.assert_close(ours, theirs(whole, logits.clone()))


def test_the_prompt_counts_for_repetition_only() -> None:
    logits = torch.ones(1, VOCAB)
    for params, changed in (
        (SamplingParams(repetition_penalty=2.0), {6, 8}),
        (SamplingParams(frequency_penalty=1.0), {8}),
        (SamplingParams(presence_penalty=1.0), {8}),
    ):
        rules = TokenRules.of([params], eos_token_ids=(), vocab_size=VOCAB)
        processed = process_logits(logits, rules, row_of([params], [[6, 6]], [[8]]))
        assert set(np.flatnonzero(processed[0].numpy() != 1).tolist()) == changed


def test_a_request_that_asks_for_nothing_gets_the_logits_of_the_model() -> None:
    logits = torch.randn(1, VOCAB).bfloat16()
    before = row_of([GREEDY], [[1]], [[2, 3]])
    for params in (GREEDY, SamplingParams(stop_token_ids=(3,)), SamplingParams(min_tokens=5),
                   SamplingParams(stop_token_ids=(3,), min_tokens=2)):  # fmt: skip
        rules = TokenRules.of([params], eos_token_ids=(11,), vocab_size=VOCAB)
        assert process_logits(logits, rules, before) is logits
        assert rules.asks_processing == (params.min_tokens == 2)


def test_bfloat16_logits_are_processed_in_float32() -> None:
    """A bias of 1e-3 would be lost in bfloat16 on logits above 1."""
    logits = torch.tensor([[5.0, 5.0, 1.0]], dtype=torch.bfloat16)
    params = SamplingParams(logit_bias=((1, 1e-3),))
    rules = TokenRules.of([params], eos_token_ids=(), vocab_size=3)
    assert int(process_logits(logits, rules, row_of([params], [[2]], [[]])).argmax()) == 1


def step_of(params: SamplingParams, drafts: Sequence[int]) -> tuple[StepInput, Drafts, Scored]:
    """A step of one request with prompt (6, 6) and text (8,), and drafts for it."""
    request = Request(prompt_token_ids=(6, 6), params=params, stream_key=0, max_tokens=9)
    table = RequestTable([request], [SPEC], vocab_size=VOCAB, device=torch.device("cpu"))
    table.append(np.array([0]), 0, np.array([[8]]), np.array([0]), np.empty((1, 0), np.int64), np.zeros(1, np.int32))
    step = dataclasses.replace(_EMPTY, table=table, requests=np.array([0]), lengths=table.lengths.copy())
    rows = len(drafts) + 1
    scored = Scored(torch.ones(rows, VOCAB), np.zeros(rows, np.int64), np.arange(rows))
    return step, Drafts(np.array([drafts]), np.array([len(drafts)], np.int32), None), scored


_EMPTY = StepInput(
    index=0, table=None, requests=None, num_main=1, sequences=None, lengths=None, limits=None,
    params=None, streams=None, kv=None, scratch=None,
)  # type: ignore[arg-type] # fmt: skip


def test_each_token_of_a_block_enters_the_history_before_the_next_is_judged() -> None:
    step, drafts, scored = step_of(SamplingParams(frequency_penalty=1.0), [9, 8, 9])
    processed = ProcessLogits()(step, drafts, scored)
    assert (scored.logits == 1).all()
    seen = [{t: 1 - z for t, z in enumerate(row) if z != 1} for row in processed.logits.tolist()]
    assert seen == [{8: 1}, {8: 1, 9: 1}, {8: 2, 9: 1}, {8: 2, 9: 2}]


def test_stop_tokens_are_masked_on_the_rows_of_positions_below_min_tokens() -> None:
    step, drafts, scored = step_of(SamplingParams(stop_token_ids=(4, 5), min_tokens=3), [9, 8, 9])
    masked = ProcessLogits()(step, drafts, scored).logits.isneginf()
    assert masked[:, [4, 5]].tolist() == [[True, True], [True, True], [False, False], [False, False]]
    assert masked.sum() == 4


def test_nothing_is_done_for_requests_that_ask_for_nothing() -> None:
    step, drafts, scored = step_of(SamplingParams(temperature=0.7), [9])
    assert ProcessLogits()(step, drafts, scored) is scored


@pytest.mark.parametrize(
    ("params", "setting"),
    [
        (SamplingParams(logit_bias=((97, 1.0),)), "logit_bias"),
        (SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias"),
        (SamplingParams(stop_token_ids=(3, 97)), "stop_token_ids"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_before_any_work(params: SamplingParams, setting: str) -> None:
    executor = build(get_backend("reference"))
    with pytest.raises(InvalidSetting, match=rf"{setting} = \[(97|-1)\]: ids must be in 0..96"):
        executor.generate(requests_for([(1, 2)], params), speculative=True)
    samples = FinishedSamples(
        prompt_token_ids=(1, 2), params=params, token_ids=np.ones((1, 2)), draft_token_ids=-np.ones((1, 2)),
        slots=-np.ones((1, 2)),
        stream_keys=np.zeros(1),
    )  # fmt: skip
    with pytest.raises(InvalidSetting, match=setting):
        Scorer(executor.model, executor.backend).score(samples)
    with pytest.raises(InvalidSetting, match="eos_token_ids"):
        build(get_backend("reference"), eos_token_ids=(97,))


def test_min_tokens_needs_a_token_that_does_not_stop_the_text() -> None:
    executor = build(get_backend("reference"))
    for num_stops, refused in ((97, True), (96, False)):
        params = SamplingParams(stop_token_ids=tuple(range(num_stops)), min_tokens=2)
        requests = requests_for([(1, 2)], params)
        if refused:
            with pytest.raises(InvalidSetting, match=r"min_tokens.*does not stop the text"):
                executor.generate(requests, speculative=True)
        else:
            (generation,) = executor.generate(requests, speculative=True)
            assert generation.token_ids[:2].tolist() == [96, 96]
