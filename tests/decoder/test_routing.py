"""Which requests are decoded speculatively, and that the others demonstrably are not."""

from __future__ import annotations

import dataclasses

import pytest

from equivtest.decoder.routing import SPECULATION_OFF, request_stream_key, route
from equivtest.errors import UnsupportedSampling
from equivtest.kernels.registry import get_backend
from equivtest.records import SPEC, Origin, Request, SamplingParams
from equivtest.rng import stream_key
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import CONFIGS, GREEDY, build, random_prompts, requests_for, texts

MIN_P = CONFIGS["minp05"]
SAMPLED = CONFIGS["topp95"]


def incapable(*seeds: int) -> IncapableBackend:
    return IncapableBackend(get_backend("cpp"), seeded_keys=frozenset(stream_key("request", s) for s in seeds))


@pytest.mark.parametrize(
    ("params", "seed", "reason"),
    [
        (SAMPLED, None, ""),
        (GREEDY, None, ""),
        (MIN_P, None, "incapable does not support min_p; sampled by reference"),
        (SAMPLED, 0, "incapable does not support a per-request seed; sampled by reference"),
        (MIN_P, 7, "incapable does not support min_p; sampled by reference"),
    ],
)
def test_a_request_the_backend_cannot_represent_goes_plain(
    params: SamplingParams, seed: int | None, reason: str
) -> None:
    capabilities = incapable().capabilities
    for speculative in (True, False):
        found = route(params, seed, capabilities, speculative=speculative, backend="incapable")
        assert found.speculative == (speculative and not reason)
        assert found.reason == (reason or ("" if speculative else SPECULATION_OFF))


def test_a_capable_backend_takes_every_request_speculatively() -> None:
    for backend in ("reference", "cpp"):
        capabilities = get_backend(backend).capabilities
        assert route(MIN_P, 3, capabilities, speculative=True) == SPEC
        assert route(MIN_P, 3, capabilities, speculative=False) == (False, SPECULATION_OFF)


@pytest.mark.parametrize("acceptance", ["chain", "match"])
@pytest.mark.parametrize("drafter", ["ngram", "early_exit", "self", "model"])
def test_min_p_and_seeded_requests_stay_off_the_speculative_path(drafter: str, acceptance: str) -> None:
    requests = requests_for(random_prompts(12), SAMPLED)
    requests[3] = dataclasses.replace(requests[3], params=MIN_P)
    requests[5] = dataclasses.replace(requests[5], seed=11)
    generations = build(incapable(11), drafter, acceptance=acceptance).generate(requests, speculative=True)
    for index, generation in enumerate(generations):
        if index in (3, 5):
            feature = "min_p" if index == 3 else "a per-request seed"
            assert set(generation.origins) == {Origin.PLAIN}
            assert (generation.num_drafts == 0).all()
            assert (generation.slots == -1).all()
            assert generation.route == (False, f"incapable does not support {feature}; sampled by reference")
        else:
            assert generation.route == SPEC
            assert {Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS} & set(generation.origins)


@pytest.mark.parametrize("drafter", ["early_exit", "self", "model"])
def test_min_p_and_seeded_requests_are_speculative_where_the_backend_can(drafter: str) -> None:
    requests = requests_for(random_prompts(12), MIN_P)
    requests[5] = dataclasses.replace(requests[5], seed=11)
    for generation in build(get_backend("cpp"), drafter).generate(requests, speculative=True):
        assert generation.route == SPEC
        assert Origin.ACCEPTED in generation.origins


def test_a_request_routed_plain_gets_the_law_of_plain_decoding() -> None:
    """Token for token: the same law and the same PLAIN coins, from another backend."""
    requests = requests_for(random_prompts(12), MIN_P)
    routed = build(incapable()).generate(requests, speculative=True)
    off = build(get_backend("cpp")).generate(requests, speculative=False)
    assert texts(routed) == texts(off)


def test_without_routing_the_backend_refuses() -> None:
    """The twin: the test backend does refuse, so the requests above did not reach it."""
    backend = incapable(11)
    stubborn = build(backend, plain_backend=backend)
    with pytest.raises(UnsupportedSampling, match="min_p"):
        stubborn.generate(requests_for(random_prompts(2), MIN_P), speculative=True)
    seeded = [dataclasses.replace(r, seed=11) for r in requests_for(random_prompts(2), SAMPLED)]
    with pytest.raises(UnsupportedSampling, match="per-request seed"):
        stubborn.generate(seeded, speculative=True)


def test_a_seed_replaces_the_stream_key() -> None:
    request = Request(prompt_token_ids=(1,), params=SAMPLED, stream_key=5, max_tokens=1)
    assert request_stream_key(request) == 5
    assert request_stream_key(dataclasses.replace(request, seed=0)) == stream_key("request", 0)
