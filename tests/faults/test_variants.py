"""Unusual decoders that are right: the law of whole texts is exact, and what is unusual about each is there."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch

from equivtest.decoder.drafters.draft_model import ModelDrafter, draw
from equivtest.decoder.stages import Drafts, Stages, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Fault, Nature
from equivtest.faults.lossy import FAULTS as LOSSY
from equivtest.faults.variants import FAULTS
from equivtest.records import Generation, Origin
from equivtest.rng import Purpose, uniforms
from tests.decoder.scenarios import CONFIGS, build, law_p_value, requests_for, texts
from tests.decoder.test_executor import LENGTH, PARAMS, PROMPT, exact_law, small_executor
from tests.faults import planted

NUM_SAMPLES = 4_000
ALPHA = 1e-4


def p_value(fault: Fault) -> float:
    requests = requests_for([PROMPT] * NUM_SAMPLES, PARAMS, max_tokens=LENGTH, run=("variant", fault.name))
    generations = small_executor(fault.setting.drafter, "chain").generate(requests, speculative=True, fault=fault)
    return law_p_value(exact_law(), texts(generations))


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_the_law_of_whole_texts_is_exact(fault: Fault) -> None:
    """Chi-squared of 4,000 texts of 3 tokens against the enumerated law; false-alarm rate 1e-4 a variant."""
    assert p_value(fault) > ALPHA


@pytest.mark.parametrize("fault", [f() for f in LOSSY], ids=lambda f: f.name)
def test_lossy_rules_fail_the_same_test(fault: Fault) -> None:
    """The twin."""
    assert p_value(fault) < 1e-6


class Proposal(NamedTuple):
    newest: np.ndarray
    """[B], the last committed token of each row."""
    drafts: Drafts


def run(fault: Fault | None, drafter: str) -> tuple[list[Generation], list[Proposal]]:
    """60 requests, and what was drafted in each step."""
    seen: list[Proposal] = []

    def watch(stages: Stages) -> Stages:
        faulty = stages if fault is None else fault(stages)

        def propose(step: StepInput) -> Drafts:
            drafts = faulty.propose(step)
            probs = None if drafts.probs is None else drafts.probs.clone()
            seen.append(Proposal(step.last_token_ids, drafts.with_probs(probs)))
            return drafts

        return dataclasses.replace(faulty, propose=propose)

    requests = planted.asked(CONFIGS["topp95"], 60)
    return planted.executor(drafter).generate(requests, speculative=True, fault=watch), seen


def accepted_share(generations: list[Generation]) -> float:
    origins = [origin for g in generations for origin in g.origins]
    return origins.count(Origin.ACCEPTED) / len(origins)


def test_match_gives_the_text_of_plain_decoding_under_the_same_keys() -> None:
    generations, _ = run(planted.named(FAULTS, "match_acceptance"), "early_exit")
    plain = planted.executor("early_exit").generate(planted.asked(CONFIGS["topp95"], 60), speculative=False)
    assert texts(generations) == texts(plain)
    assert accepted_share(generations) > 0.1


def test_a_match_decoder_cannot_be_made_one() -> None:
    with pytest.raises(InvalidSetting, match=r"match_acceptance.*chain"):
        planted.named(FAULTS, "match_acceptance")(
            build(planted.executor("early_exit").backend, acceptance="match").stages
        )


@pytest.mark.parametrize("name", ["one_hot_q", "drafter_wrong_kv"])
def test_some_need_a_drafter_that_samples(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name}.*sampled_exit"):
        planted.named(FAULTS, name)(planted.executor("early_exit").stages)


def test_sampled_drafts_lose_their_q() -> None:
    generations, seen = run(planted.named(FAULTS, "one_hot_q"), planted.SAMPLED)
    right, declared = run(None, planted.SAMPLED)
    assert {proposal.drafts.probs for proposal in seen} == {None}
    assert declared[0].drafts.probs is not None
    assert (seen[0].drafts.token_ids == declared[0].drafts.token_ids).all()
    assert 0.05 < accepted_share(generations) < accepted_share(right)


def test_a_drafter_with_a_wrong_cache_drafts_worse_and_says_so() -> None:
    """Each draft comes from the q that is declared with it."""
    generations, seen = run(planted.named(FAULTS, "drafter_wrong_kv"), planted.SAMPLED)
    right, others = run(None, planted.SAMPLED)
    assert 0.05 < accepted_share(generations) < accepted_share(right) - 0.02
    first, other = seen[0].drafts, others[0].drafts
    assert first.probs is not None
    assert other.probs is not None
    assert not torch.allclose(first.probs, other.probs, atol=1e-2)
    keys = np.array([request.stream_key for request in planted.asked(CONFIGS["topp95"], 60)])
    for slot in range(3):
        coins = uniforms(keys, np.full(60, slot), Purpose.DRAFT)
        np.testing.assert_array_equal(draw(first.probs[:, slot], coins), first.token_ids[:, slot])


def test_the_drafter_itself_keeps_its_model_and_kernels() -> None:
    drafter = planted.executor(planted.SAMPLED).drafter
    assert isinstance(drafter, ModelDrafter)
    model, kernels = drafter.model, drafter.backend
    run(planted.named(FAULTS, "drafter_wrong_kv"), planted.SAMPLED)
    assert drafter.model is model
    assert drafter.backend is kernels


def test_random_drafts_are_uniform_draft_coins() -> None:
    generations, seen = run(planted.named(FAULTS, "random_drafts"), "early_exit")
    keys = np.array([request.stream_key for request in planted.asked(CONFIGS["topp95"], 60)])
    expected = np.floor(uniforms(keys[:, None], np.arange(3), Purpose.DRAFT) * planted.VOCAB_SIZE)
    np.testing.assert_array_equal(seen[0].drafts.token_ids, expected)
    assert accepted_share(generations) < 0.1


def test_the_number_of_drafts_follows_the_newest_token() -> None:
    _, seen = run(planted.named(FAULTS, "adaptive_length"), "early_exit")
    assert {int(n) for proposal in seen for n in proposal.drafts.num_draft} == {0, 1, 2, 3}
    np.testing.assert_array_equal(seen[0].drafts.num_draft, seen[0].newest % 4)
    for _, drafts in seen:
        assert drafts.token_ids.shape[1] == drafts.num_draft.max()


def test_no_draft_means_plain_tokens_only() -> None:
    generations, _ = run(planted.named(FAULTS, "no_drafts"), "early_exit")
    assert {origin for g in generations for origin in g.origins} == {Origin.PLAIN}
    assert all(g.route.speculative for g in generations)


@pytest.mark.parametrize("drafter", ["ngram", "early_exit", planted.SAMPLED])
@pytest.mark.parametrize("name", ["adaptive_length", "random_drafts", "no_drafts"])
def test_it_goes_with_every_drafter_and_greedy_text_stays(name: str, drafter: str) -> None:
    executor = planted.executor(drafter)
    requests = planted.asked(dataclasses.replace(CONFIGS["topp95"], temperature=0.0))
    generations = executor.generate(requests, speculative=True, fault=planted.named(FAULTS, name))
    assert texts(generations) == texts(executor.generate(requests, speculative=False))


def test_none_is_called_a_fault() -> None:
    assert {f().nature for f in FAULTS} == {Nature.VARIANT}
    assert {f().changes_law for f in FAULTS} == {False}
    assert {f().expected for f in FAULTS} == {frozenset()}


@pytest.mark.parametrize("fault", [f() for f in FAULTS], ids=lambda f: f.name)
def test_it_shows_in_text_and_goes_without_a_trace(fault: Fault) -> None:
    planted.check_planted(fault)
