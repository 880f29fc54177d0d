"""Texts end at their first stop token, wherever in a draft block it stands, and nobody else notices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from equivtest.decoder.drafters.draft_model import ModelDrafter
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Stages, StepInput
from equivtest.decoder.standard_stages import CommitEmitted
from equivtest.decoder.token_rules import TokenSets
from equivtest.kernels.registry import get_backend
from equivtest.records import SPEC, Generation, Origin, Request, SamplingParams
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import (
    CONFIGS,
    GREEDY,
    RULES,
    build,
    random_prompts,
    requests_for,
    requests_under_each,
    texts,
)

EOS = 50
STOPS = tuple(range(5, 97, 16))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, stop_token_ids=STOPS, ignore_eos=False)


def ends(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}


def first_end(tokens: list[int], params: SamplingParams) -> int:
    """Length of a text that stops where it should."""
    return next((t + 1 for t, token in enumerate(tokens) if token in ends(params)), len(tokens))


def assert_prefix(short: Generation, whole: Generation, length: int) -> None:
    """`short` is the first `length` tokens of `whole`, in every column but the batch rows."""
    assert len(short.origins) == length
    assert short.origins == whole.origins[:length]
    for name in ("token_ids", "slots", "draft_token_ids", "steps", "num_drafts"):
        assert getattr(short, name).tolist() == getattr(whole, name)[:length].tolist(), name
    assert len(short.batch_rows) == length


@pytest.mark.parametrize(("drafter", "acceptance"), [*RULES, (None, "chain"), (None, "match")])
def test_a_text_is_cut_at_its_first_stop_token(drafter: str | None, acceptance: str) -> None:
    """Against the same requests without stops, whose coins and drafts are the same up to the cut."""
    executor = build(get_backend("cpp"), drafter or "ngram", acceptance=acceptance, eos_token_ids=(EOS,))
    greedy = dataclasses.replace(SAMPLED, temperature=0.0)
    requests = requests_under_each({"sampled": SAMPLED, "greedy": greedy}, random_prompts(20))
    endless = [dataclasses.replace(r, params=dataclasses.replace(r.params, stop_token_ids=(), ignore_eos=True))
               for r in requests]  # fmt: skip
    whole = executor.generate(endless, speculative=drafter is not None)
    heard: list[int] = []
    cut = executor.generate(requests, speculative=drafter is not None, on_tokens=heard.append)
    lengths = [first_end(g.token_ids.tolist(), SAMPLED) for g in whole]
    for short, long, length in zip(cut, whole, lengths, strict=True):
        assert_prefix(short, long, length)
    assert sum(heard) == sum(lengths)
    assert len(set(lengths[:20])) > 3
    assert len(set(lengths[20:])) > 3
    assert max(lengths) == 24
    assert executor._kv is not None
    assert executor._kv.num_free_pages == executor._kv.spare_page
    if drafter == "model":
        assert isinstance(executor.drafter, ModelDrafter)
        assert executor.drafter._kv is not None, "every sequence of the draft model was released"


def test_stop_tokens_come_out_at_every_kind_of_place() -> None:
    """What the test above cuts: accepted drafts with drafts behind them, recovered, bonus and plain tokens."""
    executor = build(get_backend("cpp"), "early_exit", eos_token_ids=(EOS,))
    cut = executor.generate(requests_for(random_prompts(150), SAMPLED, max_tokens=24), speculative=True)
    ended = [g for g in cut if int(g.token_ids[-1]) in ends(SAMPLED)]
    assert {g.origins[-1] for g in ended} >= {Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS}
    assert any(g.origins[-1] is Origin.ACCEPTED and g.slots[-1] + 1 < g.num_drafts[-1] for g in ended)


class NeverCrops(CommitEmitted):
    def crop(self, step: StepInput, output_token_ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        return counts


def test_a_decoder_that_runs_past_a_stop_token_within_a_block_is_seen() -> None:
    """The twin: a stop token in an accepted prefix does not end the text."""

    def never_crops(stages: Stages) -> Stages:
        return dataclasses.replace(stages, commit=NeverCrops())

    executor = build(get_backend("cpp"), "early_exit", eos_token_ids=(EOS,))
    requests = requests_for(random_prompts(32), SAMPLED, max_tokens=24)
    faulty = executor.generate(requests, speculative=True, fault=never_crops)
    lengths = [first_end(g.token_ids.tolist(), SAMPLED) for g in faulty]
    assert sum(len(g.token_ids) > length for g, length in zip(faulty, lengths, strict=True)) >= 3


@pytest.mark.parametrize(("drafter", "acceptance"), RULES)
def test_ragged_texts_are_the_same_in_batches_of_1_3_and_all(drafter: str, acceptance: str) -> None:
    """Rows end at different steps and others take their places."""
    kinds = [SAMPLED, CONFIGS["topk50"], dataclasses.replace(SAMPLED, min_tokens=5, repetition_penalty=1.3), GREEDY]
    requests = [
        Request(prompt_token_ids=prompt, params=kinds[i % 4], stream_key=i, max_tokens=4 + 7 * i % 19, seed=i)
        for i, prompt in enumerate(random_prompts(10))
    ]
    results = [
        build(get_backend("cpp"), drafter, acceptance=acceptance, max_batch=size, eos_token_ids=(EOS,)).generate(
            requests, speculative=True
        )
        for size in (1, 3, 10)
    ]
    assert texts(results[0]) == texts(results[1]) == texts(results[2])
    assert [g.origins for g in results[0]] == [g.origins for g in results[1]] == [g.origins for g in results[2]]
    assert any(len(g.token_ids) < r.max_tokens for g, r in zip(results[0], requests, strict=True))


def test_rows_of_the_plain_backend_stop_too() -> None:
    backend = IncapableBackend(get_backend("cpp"))
    params = dataclasses.replace(SAMPLED, min_p=0.01)
    mixed = [*requests_for(random_prompts(12), params), *requests_for(random_prompts(12), SAMPLED, run=1)]
    for request, generation in zip(mixed, build(backend, eos_token_ids=(EOS,)).generate(mixed, speculative=True),
                                   strict=True):  # fmt: skip
        tokens = generation.token_ids.tolist()
        assert len(tokens) == first_end(tokens, request.params)
        assert generation.route.speculative == (request.params is SAMPLED)


def test_end_of_text_stops_only_those_who_do_not_ignore_it() -> None:
    prompt = random_prompts(1)[0]
    free = build(get_backend("cpp")).generate(requests_for([prompt], GREEDY), speculative=True)[0]
    eos = int(free.token_ids[7])
    length = free.token_ids.tolist().index(eos) + 1
    executor = build(get_backend("cpp"), eos_token_ids=(eos, 96))
    for params, expected in ((GREEDY, 24), (dataclasses.replace(GREEDY, ignore_eos=False), length)):
        generation = executor.generate(requests_for([prompt], params), speculative=True)[0]
        assert len(generation.token_ids) == expected


@pytest.mark.parametrize("speculative", [True, False])
def test_no_text_stops_before_min_tokens_and_some_stop_right_then(speculative: bool) -> None:
    """With a stop token at position 6 a text has 7."""
    params = dataclasses.replace(SAMPLED, stop_token_ids=tuple(range(1, 97, 2)), min_tokens=6)
    generations = build(get_backend("cpp"), "self", eos_token_ids=(EOS,)).generate(
        requests_for(random_prompts(40), params), speculative=speculative
    )
    lengths = [len(g.token_ids) for g in generations]
    assert min(lengths) == 7
    assert not any(token in ends(params) for g in generations for token in g.token_ids[:6].tolist())


def test_the_table_ends_a_text_at_its_first_stop_token() -> None:
    params = SamplingParams(stop_token_ids=(7, 9))
    requests = [Request(prompt_token_ids=(7, 2), params=p, stream_key=0, max_tokens=6) for p in (params, GREEDY)] * 2
    table = RequestTable(requests, [SPEC] * 4, vocab_size=13, device=torch.device("cpu"))
    outputs = np.array([[3, 9, 7, 4], [3, 9, 7, 4], [7, -1, -1, -1], [1, 2, 3, 9]])
    rows, emitted = np.array([0, 1, 2, 3]), np.array([3, 3, 0, 3])
    counts = table.up_to_stop(rows, outputs, emitted + 1)
    assert counts.tolist() == [2, 4, 1, 4]
    drafts, num_draft = outputs[:, :3], np.array([3, 3, 0, 3], np.int32)
    assert table.append(rows, 0, outputs, emitted, drafts, num_draft, counts=counts) == 2 + 4 + 1 + 4
    assert table.ended.tolist() == [True, False, True, False]
    assert table.remaining.tolist() == [0, 2, 0, 2]
    assert [table.generation(row).token_ids.tolist() for row in rows] == [[3, 9], [3, 9, 7, 4], [7], [1, 2, 3, 9]]
    assert table.generation(0).origins == (Origin.ACCEPTED, Origin.ACCEPTED)
    assert table.token_ids[0].tolist() == [7, 2, 3, 9, 0, 0, 0, 0]


def test_token_sets_hold_what_they_were_given_and_nothing_else() -> None:
    sets = TokenSets.of("stop_token_ids", [(), (4, 0, 4), (), (12,)], 13)
    every = sets.contain(np.arange(4)[:, None], np.arange(-1, 13)[None])
    assert [np.flatnonzero(row).tolist() for row in every] == [[], [1, 5], [], [13]]
    rows, entries = sets.entries(np.array([3, 0, 1, 1]))
    assert list(zip(rows.tolist(), sets.token_ids[entries].tolist(), strict=True)) == [
        (0, 12), (2, 0), (2, 4), (3, 0), (3, 4),
    ]  # fmt: skip
    assert not TokenSets.of("stop_token_ids", [(), ()], 13).contain(np.array([0, 1]), np.array([0, -1])).any()
