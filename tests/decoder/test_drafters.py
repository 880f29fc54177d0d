"""What each drafter proposes, and that it looks at nothing it must not see."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from equivtest.decoder.drafters.base import Drafter
from equivtest.decoder.drafters.draft_model import ModelDrafter, draw
from equivtest.decoder.drafters.early_exit import EarlyExitDrafter, default_layers
from equivtest.decoder.drafters.ngram import NgramDrafter
from equivtest.decoder.drafters.registry import DrafterContext, known_drafters, make_drafter
from equivtest.decoder.stages import Drafts, Stages, StepInput
from equivtest.errors import InvalidSetting, UnknownName, UnsupportedModel
from equivtest.kernels.contract import RowParams, SpecAccept
from equivtest.kernels.registry import get_backend
from equivtest.records import Request
from equivtest.rng import Purpose, uniforms
from tests.decoder.scenarios import (
    CONFIGS,
    DRAFTERS,
    GREEDY,
    StubDrafter,
    build,
    fresh_logits,
    random_prompts,
    requests_for,
)
from tests.decoder.tiny_models import tiny_model

Proposal = tuple[int, ...]
Seen = dict[tuple[int, tuple[int, ...]], tuple[Proposal, bytes]]
"""What was proposed for (table row, committed text): the draft and its law."""

SCRIPT_LENGTH = 16


class Scripted:
    """Accept and propose stages that force every request along a script and note what was drafted on the way.

    With `eager`, drafts that agree with the script are accepted; otherwise one token a step is put out, so that every
    draft is rejected. Telemetry is noise in the second case.
    """

    def __init__(self, script: np.ndarray, *, eager: bool) -> None:
        self.script, self.eager = script, eager
        self.seen: Seen = {}

    def wrap(self, stages: Stages) -> Stages:
        def propose(step: StepInput) -> Drafts:
            drafts = stages.propose(step)
            for row, request in enumerate(step.requests):
                text = tuple(step.table.token_ids[request, : step.lengths[row]].tolist())
                count = int(drafts.num_draft[row])
                law = b"" if drafts.probs is None else drafts.probs[row, :count].numpy().tobytes()
                self.seen[int(request), text] = (tuple(drafts.token_ids[row, :count].tolist()), law)
            return drafts

        def accept(step: StepInput, drafts: Drafts, _: torch.Tensor) -> SpecAccept:
            width = drafts.token_ids.shape[1] + 1
            outputs = np.full((step.batch, width), -1)
            emitted = np.zeros(step.batch, np.int32)
            for row, request in enumerate(step.requests):
                position = int(step.table.generated[request])
                due = self.script[request, position : position + int(drafts.num_draft[row]) + 1]
                if self.eager:
                    agrees = drafts.token_ids[row, : len(due) - 1] == due[:-1]
                    emitted[row] = int(np.cumprod(agrees).sum())
                outputs[row, : emitted[row] + 1] = due[: emitted[row] + 1]
            noise = np.zeros_like(emitted) if self.eager else (step.index * 7 + np.arange(step.batch)) % width
            return SpecAccept(*(torch.from_numpy(a) for a in (outputs, emitted, noise.astype(np.int32))))

        return dataclasses.replace(stages, propose=propose, accept=accept)


def drafts_along_two_ways(drafter: str, replace_drafter: Drafter | None = None) -> tuple[Seen, Seen]:
    """Proposals when everything is rejected and when whatever fits is accepted, along the same text."""
    requests = requests_for(random_prompts(10), CONFIGS["topp95"], max_tokens=SCRIPT_LENGTH)
    # The script is a text the target likes, so that the eager way accepts something.
    script = np.array([g.token_ids for g in build(get_backend("cpp")).generate(requests, speculative=False)])
    ways = []
    for eager in (False, True):
        scripted = Scripted(script, eager=eager)
        executor = build(get_backend("cpp"), drafter, replace_drafter=replace_drafter)
        executor.generate(requests, speculative=True, fault=scripted.wrap)
        ways.append(scripted.seen)
    return ways[0], ways[1]


def disagreements(drafter: str, replace_drafter: Drafter | None = None) -> int:
    """Places that both ways pass and where they draft differently."""
    rejecting, eager = drafts_along_two_ways(drafter, replace_drafter)
    assert len(eager) < len(rejecting), "the eager way accepted nothing"
    assert eager.keys() <= rejecting.keys()
    laws = [(np.frombuffer(way[place][1], np.float32) for way in (rejecting, eager)) for place in eager]
    return sum(rejecting[place][0] != eager[place][0] for place in eager) + sum(
        not np.allclose(one, other, atol=1e-5) for one, other in laws
    )


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_depend_on_committed_tokens_and_draft_coins_only(drafter: str) -> None:
    """Two histories of acceptance lead to the same committed text; what is drafted there must be the same."""
    assert disagreements(drafter) == 0


def test_a_drafter_that_remembers_its_rejected_drafts_is_found() -> None:
    """The twin: this drafter offers the last token of its previous draft once more."""
    inner = EarlyExitDrafter(tiny_model(backend=get_backend("cpp")))
    last: dict[int, int] = {}

    def choose(step: StepInput) -> Drafts:
        if step.index == 0:
            last.clear()
        drafts = inner.propose(step)
        for row, request in enumerate(step.requests.tolist()):
            if drafts.num_draft[row]:
                end = int(drafts.num_draft[row]) - 1
                newest = int(drafts.token_ids[row, end])
                drafts.token_ids[row, end] = last.get(request, newest)
                last[request] = newest
        return drafts

    assert disagreements("ngram", StubDrafter(choose)) > 0


def lookup(text: list[int], max_ngram: int, limit: int) -> list[int]:
    """Prompt lookup as one would write it for a single text."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end : end + limit]
    return []


def test_ngram_proposes_what_followed_the_latest_longest_match() -> None:
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, size=rng.integers(1, 30)).tolist()) for _ in range(200)]
    requests = requests_for(prompts, GREEDY, max_tokens=4)
    scripted = Scripted(np.zeros((len(prompts), 4), np.int64), eager=False)
    build(get_backend("cpp"), "ngram", max_batch=256).generate(requests, speculative=True, fault=scripted.wrap)
    found = 0
    for (_, text), (proposal, _) in scripted.seen.items():
        length = len(text)
        row_prompts = {len(p) for p in prompts if text[: len(p)] == p}
        limits = {min(4, 4 - (length - n) - 1) for n in row_prompts}
        assert list(proposal) in [lookup(list(text), 3, limit) for limit in limits]
        found += len(proposal)
    assert found > 200


def first_proposals(drafter: str, prompts: list[tuple[int, ...]], params: object = GREEDY) -> list[Proposal]:
    requests = requests_for(prompts, params, max_tokens=5)  # type: ignore[arg-type]
    scripted = Scripted(np.zeros((len(prompts), 5), np.int64), eager=False)
    build(get_backend("cpp"), drafter).generate(requests, speculative=True, fault=scripted.wrap)
    return [scripted.seen[row, prompt][0] for row, prompt in enumerate(prompts)]


def test_self_proposes_the_targets_own_greedy_continuation() -> None:
    prompts = random_prompts(8)
    expected = build(get_backend("cpp")).generate(requests_for(prompts, GREEDY, max_tokens=4), speculative=False)
    assert first_proposals("self", prompts) == [tuple(g.token_ids.tolist()) for g in expected]


def test_early_exit_proposes_the_greedy_continuation_of_the_first_layers() -> None:
    prompts = random_prompts(8)
    shallow = build(get_backend("cpp"), model=tiny_model(backend=get_backend("cpp"), layers=2))
    expected = shallow.generate(requests_for(prompts, GREEDY, max_tokens=4), speculative=False)
    proposals = first_proposals("early_exit", prompts)
    assert proposals == [tuple(g.token_ids.tolist()) for g in expected]
    assert proposals != first_proposals("self", prompts)


def test_model_draws_from_the_requests_law_with_draft_coins_and_hands_that_law_on() -> None:
    backend = get_backend("cpp")
    small = tiny_model(backend=backend, layers=2)
    prompts, params = random_prompts(8), CONFIGS["topk20p90"]
    requests = requests_for(prompts, params, max_tokens=5)
    scripted = Scripted(np.zeros((8, 5), np.int64), eager=False)
    build(backend, "model").generate(requests, speculative=True, fault=scripted.wrap)
    for row, request in enumerate(requests):
        proposal, law = scripted.seen[row, request.prompt_token_ids]
        q = np.frombuffer(law, np.float32).reshape(4, -1)
        for slot in range(4):
            logits = fresh_logits(small, [*request.prompt_token_ids, *proposal[:slot]])[-1:]
            expected = get_backend("reference").verify_probs(
                logits, RowParams.of([params]), out=torch.empty(logits.shape)
            )
            np.testing.assert_allclose(q[slot], expected[0].numpy(), atol=1e-5)
            coin = uniforms(np.array([request.stream_key]), np.array([slot]), Purpose.DRAFT)
            assert draw(expected, coin).tolist() == [proposal[slot]]


def test_model_drafts_greedily_for_a_greedy_request() -> None:
    prompts = random_prompts(8)
    assert first_proposals("model", prompts) == first_proposals("early_exit", prompts)  # the same two layers


def test_sampled_exit_samples_from_the_layers_that_early_exit_runs_greedily() -> None:
    prompts = random_prompts(8)
    assert first_proposals("sampled_exit", prompts) == first_proposals("early_exit", prompts)
    params = CONFIGS["topk20p90"]
    sampled = first_proposals("sampled_exit", prompts, params)
    assert sampled == first_proposals("model", prompts, params)  # a model of the same two layers
    assert sampled != first_proposals("sampled_exit", prompts)


def test_a_draw_follows_its_law() -> None:
    """Chi-squared of 100,000 draws; false-alarm rate 1e-4. The twin is the same draws against a law 2 % off."""
    law = torch.tensor([0.0, 0.4, 0.1, 0.0, 0.3, 0.2, 0.0])
    coins = uniforms(np.arange(100_000), np.zeros(100_000, np.int64), Purpose.DRAFT)
    counts = np.bincount(draw(law.expand(100_000, 7), coins), minlength=7)
    support = law.numpy() > 0
    assert counts[~support].sum() == 0
    assert stats.chisquare(counts[support], np.array([0.4, 0.1, 0.3, 0.2]) * 1e5).pvalue > 1e-4
    assert stats.chisquare(counts[support], np.array([0.38, 0.12, 0.3, 0.2]) * 1e5).pvalue < 1e-12


def test_a_coin_at_the_very_top_draws_the_last_token_that_has_mass() -> None:
    law = torch.tensor([[0.1, 0.2, 0.7, 0.0]])
    assert draw(law, np.array([1 - 2.0**-53])).tolist() == [2]
    assert draw(law, np.array([0.0])).tolist() == [0]


def test_a_draft_model_with_another_vocabulary_is_refused() -> None:
    backend = get_backend("reference")
    with pytest.raises(UnsupportedModel, match=r"small one.*vocabulary has 31 tokens, the target's 97"):
        ModelDrafter(tiny_model(vocab_size=31), backend, target=tiny_model(), label="small one")


def test_drafters_are_known_by_name() -> None:
    context = DrafterContext(target=tiny_model(), backend=get_backend("reference"))
    assert set(known_drafters()) == {name.split()[0] for name in DRAFTERS}
    with pytest.raises(UnknownName, match="early_exit"):
        make_drafter("oracle", context)
    with pytest.raises(InvalidSetting, match="draft_model"):
        make_drafter("model", context)
    for name in ("ngram", "early_exit", "sampled_exit", "self"):
        drafter = make_drafter(name, context)
        assert drafter.name == name
        assert drafter.describe()


@pytest.mark.parametrize("num_layers", [0, 5])
def test_early_exit_needs_a_depth_that_the_model_has(num_layers: int) -> None:
    with pytest.raises(InvalidSetting, match="early_exit_layers"):
        EarlyExitDrafter(tiny_model(), num_layers=num_layers)


def test_early_exit_leaves_out_one_layer_in_fifteen_by_default() -> None:
    assert [default_layers(n) for n in (1, 2, 3, 30)] == [1, 1, 2, 28]
    assert EarlyExitDrafter(tiny_model(layers=3)).num_layers == 2


@pytest.mark.parametrize("max_ngram", [0, -1])
def test_ngram_needs_a_positive_length(max_ngram: int) -> None:
    with pytest.raises(InvalidSetting, match="max_ngram"):
        NgramDrafter(max_ngram=max_ngram)


def test_a_drafter_leaves_the_targets_cache_as_it_was() -> None:
    executor = build(get_backend("cpp"), "early_exit")
    lengths: list[tuple[list[int], list[int]]] = []

    def watch(stages: Stages) -> Stages:
        def propose(step: StepInput) -> Drafts:
            before = step.kv.lengths(step.sequences).tolist()
            drafts = stages.propose(step)
            lengths.append((before, step.kv.lengths(step.sequences).tolist()))
            return drafts

        return dataclasses.replace(stages, propose=propose)

    request = Request(prompt_token_ids=(1, 2, 3), params=GREEDY, stream_key=0, max_tokens=12)
    executor.generate([request, request], speculative=True, fault=watch)
    assert all(before == after for before, after in lengths)
