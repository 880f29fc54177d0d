"""Greedy, sampled, min_p and seeded requests share a batch and none of them notices."""

from __future__ import annotations

import dataclasses

import pytest

from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend
from equivtest.records import Request
from equivtest.rng import stream_key
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import CONFIGS, DRAFTERS, GREEDY, build, random_prompts, texts


def mixed_requests() -> list[Request]:
    kinds = [GREEDY, *CONFIGS.values()]
    return [
        Request(
            prompt_token_ids=prompt,
            params=kinds[index % len(kinds)],
            stream_key=stream_key("mixed", index),
            max_tokens=8 + index % 5,
            seed=index if index % 3 == 0 else None,
        )
        for index, prompt in enumerate(random_prompts(15))
    ]


def seeded_keys() -> frozenset[int]:
    return frozenset(stream_key("request", r.seed) for r in mixed_requests() if r.seed is not None)


def backend_of(kind: str) -> KernelBackend:
    cpp = get_backend("cpp")
    return cpp if kind == "capable" else IncapableBackend(cpp, seeded_keys=seeded_keys())


@pytest.mark.parametrize("kind", ["capable", "incapable"])
@pytest.mark.parametrize(
    ("drafter", "acceptance"), [*((drafter, "chain") for drafter in DRAFTERS), ("early_exit", "match")]
)
def test_each_request_of_a_mixed_batch_gets_exactly_its_lone_output(drafter: str, acceptance: str, kind: str) -> None:
    executor = build(backend_of(kind), drafter, acceptance=acceptance)
    requests = mixed_requests()
    together = executor.generate(requests, speculative=True)
    for request, generation in zip(requests, together, strict=True):
        alone = executor.generate([request], speculative=True)[0]
        assert texts([alone]) == texts([generation])
        assert (alone.origins, alone.route) == (generation.origins, generation.route)


def test_a_request_whose_stream_depends_on_its_row_would_be_caught() -> None:
    """The twin: with streams taken from the batch row, lone output and batch output differ."""
    executor = build(get_backend("cpp"))
    requests = mixed_requests()
    by_row = [dataclasses.replace(r, stream_key=row, seed=None) for row, r in enumerate(requests)]
    together = texts(executor.generate(by_row, speculative=True))
    alone = [texts(executor.generate([dataclasses.replace(r, stream_key=0)], speculative=True))[0] for r in by_row]
    assert together != alone


def test_plain_rows_do_not_knock_their_batch_mates_off_speculation() -> None:
    executor = build(backend_of("incapable"), "self")
    generations = executor.generate(mixed_requests(), speculative=True)
    assert {g.route.speculative for g in generations} == {True, False}
    for generation in generations:
        assert (generation.num_drafts.max() > 0) == generation.route.speculative
