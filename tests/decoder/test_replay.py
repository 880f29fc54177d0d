"""A request with a seed gives the same text whenever and with whomever it runs."""

from __future__ import annotations

import dataclasses

import pytest

from equivtest.kernels.registry import get_backend
from equivtest.records import Request
from equivtest.rng import stream_key
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import CONFIGS, DRAFTERS, build, random_prompts, requests_for, texts

PROMPT = (7, 8, 9, 7, 8, 9, 7, 8)
SEEDED = Request(
    prompt_token_ids=PROMPT, params=CONFIGS["topp95"], stream_key=stream_key("one run"), max_tokens=24, seed=42
)


@pytest.mark.parametrize("acceptance", ["chain", "match"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch_of_64(drafter: str, acceptance: str) -> None:
    executor = build(get_backend("cpp"), drafter, acceptance=acceptance)
    alone = executor.generate([SEEDED], speculative=True)[0]
    others = requests_for(random_prompts(63), CONFIGS["topk50"])
    elsewhere = dataclasses.replace(SEEDED, stream_key=stream_key("another run"))
    batch = executor.generate([*others[:40], elsewhere, *others[40:]], speculative=True)
    assert texts([alone]) == texts([batch[40]])
    assert alone.origins == batch[40].origins
    assert alone.route.speculative
    assert batch[40].batch_rows[0] == 40


def test_another_seed_gives_another_text() -> None:
    executor = build(get_backend("cpp"))
    other = dataclasses.replace(SEEDED, seed=43)
    first, second = texts(executor.generate([SEEDED, other], speculative=True))
    assert first != second


def test_an_unseeded_request_follows_its_stream_key() -> None:
    executor = build(get_backend("cpp"))
    unseeded = dataclasses.replace(SEEDED, seed=None)
    other = dataclasses.replace(unseeded, stream_key=stream_key("another run"))
    first, again, second = texts(executor.generate([unseeded, unseeded, other], speculative=True))
    assert first == again != second


def test_a_seeded_request_is_replayed_on_a_backend_that_cannot_seed() -> None:
    backend = IncapableBackend(get_backend("cpp"), seeded_keys=frozenset({stream_key("request", 42)}))
    executor = build(backend)
    alone = executor.generate([SEEDED], speculative=True)[0]
    batch = executor.generate([*requests_for(random_prompts(63), CONFIGS["topk50"]), SEEDED], speculative=True)
    assert texts([alone]) == texts([batch[-1]])
    assert not batch[-1].route.speculative
