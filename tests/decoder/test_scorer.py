"""The scorer's columns against a plain float64 computation, position by position."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from equivtest.decoder.draft_laws import ModelLaws, draft_laws
from equivtest.decoder.drafters.dflash import DFlashDrafter
from equivtest.decoder.executor import Executor
from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.model import Model
from equivtest.decoder.scorer import Law, Reading, Scorer, _as_probs
from equivtest.decoder.stages import Drafts, Stages, StepInput
from equivtest.errors import InvalidSetting, UnsupportedSampling
from equivtest.faults import get_fault
from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend
from equivtest.records import LawColumns, SamplingParams
from equivtest.rng import Purpose, uniforms
from tests.decoder.dflash_drafters import dflash_drafter
from tests.decoder.finished import PROCESSED, PROMPT, finished
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import (
    CONFIGS,
    GREEDY,
    build,
    fresh_logits,
    requests_for,
    slowly_processed,
)
from tests.decoder.tiny_models import tiny_model

UNFILTERED = SamplingParams(temperature=1.0)
EOS = 50
STOPS = SamplingParams(temperature=0.9, stop_token_ids=tuple(range(5, 97, 8)), ignore_eos=False, min_tokens=2)
EVERYTHING = dataclasses.replace(PROCESSED, stop_token_ids=STOPS.stop_token_ids, ignore_eos=False, min_tokens=2)


@pytest.fixture(params=["reference", "cpp"])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return get_backend(request.param)


def decoded(
    backend: KernelBackend, params: SamplingParams, *, count: int = 6, length: int = 10, drafter: str = "early_exit"
) -> FinishedSamples:
    executor = build(backend, drafter, max_draft=3, eos_token_ids=(EOS,))
    requests = requests_for([PROMPT] * count, params, max_tokens=length)
    return finished(requests, executor.generate(requests, speculative=True))


def float64_law(logits: list[float], params: SamplingParams) -> np.ndarray:
    """The law of one row, written out with numpy in float64."""
    z = np.array(logits)
    if params.greedy:
        return (np.arange(len(z)) == z.argmax()).astype(float)
    z = z / params.temperature
    if params.top_k:
        z = np.where(z >= np.sort(z)[::-1][min(params.top_k, len(z)) - 1], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    if params.top_p < 1:
        descending = np.sort(p)[::-1]
        p = np.where(p >= descending[(descending.cumsum() >= params.top_p).argmax()], p, 0.0)
    p = np.where(p >= params.min_p * p.max(), p, 0.0)
    return p / p.sum()


def brute_force(
    model: Model, samples: FinishedSamples, draft_model: Model | None = None, q_laws: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Every column by a loop over tokens; each prefix is computed anew.

    q_laws: [num_samples, num_positions, vocab_size]; None with no draft model: drafts are sure.
    """
    params, prompt = samples.params, samples.prompt_token_ids
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    columns: dict[str, list[float]] = {}
    for index, (tokens, drafts, key) in enumerate(
        zip(samples.token_ids, samples.draft_token_ids, samples.stream_keys, strict=True)
    ):
        text = [*prompt, *tokens[:-1].tolist()]
        start = len(prompt) - 1
        laws = [
            float64_law(slowly_processed(row, params, prompt, tokens[:t].tolist(), eos_token_ids=(EOS,)), params)
            for t, row in enumerate(fresh_logits(model, text)[start:].tolist())
        ]
        drawn_from = laws if q_laws is None else list(q_laws[index])
        if draft_model is not None:
            drawn_from = [float64_law(row, params) for row in fresh_logits(draft_model, text)[start:].tolist()]
        ends = [t for t, token in enumerate(tokens) if token in stops]
        for t in range(ends[0] + 1 if ends else len(tokens), len(tokens)):
            laws[t] = (np.arange(len(laws[t])) == tokens[ends[0]]).astype(float)
        for t, (p, q, y, d) in enumerate(zip(laws, drawn_from, tokens, drafts, strict=True)):
            if draft_model is None and q_laws is None:
                q = (np.arange(len(p)) == d).astype(float)
            q = q * (d >= 0)
            coins = [uniforms(np.array([key]), np.array([t]), Purpose.SCORE, draw=i)[0] for i in range(2)]
            s = -np.log(np.where(p > 0, p, 1.0))
            row = {
                "p_token": p[y],
                "has_draft": d >= 0,
                "p_draft": p[d] if d >= 0 else 0.0,
                "q_token": q[y],
                "q_mean": p @ q,
                "q_variance": p @ (q - p @ q) ** 2,
                "pit_rank": p[p > p[y]].sum() + coins[0] * p[p == p[y]].sum(),
                "pit_vocab": p[:y].sum() + coins[1] * p[y],
                "entropy": p @ s,
                "var_surprisal": p @ (s - p @ s) ** 2,
                "support_violation": p[y] == 0,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    return {name: np.array(values).reshape(samples.token_ids.shape) for name, values in columns.items()}


def assert_close(law: LawColumns, expected: dict[str, np.ndarray], *, within: float = 2e-4) -> None:
    assert {field.name for field in dataclasses.fields(law)} == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(law, name), values, atol=within, err_msg=name)


SCORED = {
    **CONFIGS, "greedy": GREEDY, "unfiltered": UNFILTERED, "processed": PROCESSED, "stops": STOPS,
    "everything": EVERYTHING, "greedy everything": dataclasses.replace(EVERYTHING, temperature=0.0),
}  # fmt: skip


@pytest.mark.parametrize("params", SCORED.values(), ids=list(SCORED))
def test_columns_are_those_of_a_float64_computation(backend: KernelBackend, params: SamplingParams) -> None:
    samples = decoded(backend, params)
    model = tiny_model(backend=backend)
    law = Scorer(model, backend, eos_token_ids=(EOS,)).score(samples)
    assert law.has_draft.any()
    assert not law.support_violation.any()
    assert_close(law, brute_force(model, samples))


@pytest.mark.parametrize("params", [CONFIGS["topk20p90"], EVERYTHING], ids=["topk20p90", "everything"])
def test_columns_of_a_sampled_drafter_use_its_own_law(params: SamplingParams) -> None:
    """The drafter's law has the filters of the request, and neither penalties nor bias."""
    backend = get_backend("cpp")
    samples = decoded(backend, params, drafter="model")
    model, draft_model = tiny_model(backend=backend), tiny_model(backend=backend, layers=2)
    law = Scorer(model, backend, drafts=ModelLaws(draft_model, backend), eos_token_ids=(EOS,)).score(samples)
    assert_close(law, brute_force(model, samples, draft_model))
    fractions = law.q_token[law.has_draft]
    assert ((fractions > 0) & (fractions < 1)).mean() > 0.5


def declared_by_blocks(
    params: SamplingParams, *, anchor_first: bool = False
) -> tuple[Executor, FinishedSamples, np.ndarray]:
    """Samples of a drafter that draws blocks, and the laws that it handed on while decoding: float32
    [num_samples, num_positions, vocab_size], the law of the round that put the token out.

    Acceptance is inflated, which changes no q: a random drafter would hardly get past its first slot.
    """
    backend = get_backend("cpp")
    target = tiny_model(backend=backend)
    drafter = dflash_drafter(target, markov_head=True, anchor_first=anchor_first)
    executor = build(backend, model=target, replace_drafter=drafter, max_draft=4, max_batch=5, eos_token_ids=(EOS,))
    prompts = [PROMPT] * 12
    requests = requests_for(prompts, params, max_tokens=14)
    declared = np.zeros((len(requests), 14 + 4, target.config.vocab_size), np.float32)

    generous = get_fault("inflated_acceptance", epsilon=0.7)

    def listening(stages: Stages) -> Stages:
        def propose(step: StepInput) -> Drafts:
            drafts = stages.propose(step)
            if drafts.probs is None:
                assert not drafts.num_draft.any()
                return drafts
            start = step.lengths - len(PROMPT)
            for row, slot in zip(*np.nonzero(np.arange(4) < drafts.num_draft[:, None]), strict=True):
                # A draft behind a rejected one is written over by the next round.
                declared[step.requests[row], start[row] + slot] = drafts.probs[row, slot].numpy()
            return drafts

        return generous(dataclasses.replace(stages, propose=propose))

    generations = executor.generate(requests, speculative=True, fault=listening)
    return executor, finished(requests, generations), declared[:, :14]


def scored_q(executor: Executor, samples: FinishedSamples, **rows: int) -> LawColumns:
    backend = get_backend("cpp")
    drafts = draft_laws(executor.drafter, backend)
    assert drafts is not None
    return Scorer(executor.model, backend, drafts=drafts, eos_token_ids=(EOS,), **rows).score(samples)  # type: ignore[arg-type]


def parted(law: LawColumns, samples: FinishedSamples, declared: np.ndarray) -> np.ndarray:
    """How far q of each judged draft is from the declared one, at the token that came out."""
    q = np.take_along_axis(declared, samples.token_ids[..., None], axis=2)[..., 0]
    return np.abs(law.q_token - q)[samples.draft_token_ids >= 0]


@pytest.mark.parametrize(
    ("params", "anchor_first"),
    [*((params, False) for params in (*CONFIGS.values(), GREEDY, EVERYTHING)), (EVERYTHING, True)],
    ids=[*CONFIGS, "greedy", "everything", "anchor first"],
)
def test_the_law_of_drawn_blocks_is_the_one_they_were_handed_on_with(
    params: SamplingParams, anchor_first: bool
) -> None:
    """Rounds of all lengths, in forwards of several rounds and of one; mean and variance of q over p, too."""
    executor, samples, declared = declared_by_blocks(params, anchor_first=anchor_first)
    assert set(samples.slots[samples.draft_token_ids >= 0]) == set(range(4))
    for rows in ({}, {"max_forward_rows": 23, "max_law_rows": 3}):
        law = scored_q(executor, samples, **rows)
        assert parted(law, samples, declared).max() < 1e-4
    expected = brute_force(executor.model, samples, q_laws=declared)
    assert_close(law, expected)
    assert params.greedy or ((law.q_token > 0) & (law.q_token < 1))[law.has_draft].mean() > 0.3


@pytest.mark.parametrize("wrong", ["slot", "markov"])
def test_the_law_of_another_slot_or_without_the_markov_head_is_another(wrong: str) -> None:
    """The twin of the test above."""
    executor, samples, declared = declared_by_blocks(UNFILTERED)
    assert isinstance(executor.drafter, DFlashDrafter)
    if wrong == "slot":
        samples = dataclasses.replace(samples, slots=np.maximum(samples.slots - 1, 0))
        later = (np.maximum(samples.slots, 0) > 0)[samples.draft_token_ids >= 0]
    else:
        markov = executor.drafter.network._markov
        assert markov is not None
        executor.drafter.network._markov = markov._replace(successors=torch.zeros_like(markov.successors))
        later = np.ones((samples.draft_token_ids >= 0).sum(), bool)
    assert np.median(parted(scored_q(executor, samples), samples, declared)[later]) > 1e-3


def test_drawn_blocks_whose_slots_are_not_known_are_refused() -> None:
    executor, samples, _ = declared_by_blocks(UNFILTERED)
    unknown, past_the_start = np.full_like(samples.slots, -1), np.arange(14) + 1 + 0 * samples.slots
    for slots in (unknown, past_the_start, samples.slots + 4, samples.slots - 5):
        with pytest.raises(InvalidSetting, match="slots"):
            scored_q(executor, dataclasses.replace(samples, slots=slots))


@pytest.mark.parametrize("params", [CONFIGS["topp95"], EVERYTHING], ids=["topp95", "everything"])
def test_a_sample_is_scored_the_same_alone_and_in_any_batch(params: SamplingParams) -> None:
    backend = get_backend("cpp")
    model = tiny_model(backend=backend)
    samples = decoded(backend, params, count=9)
    together = Scorer(model, backend).score(samples)
    pieces = Scorer(model, backend, max_forward_rows=23, max_law_rows=7)
    heard: list[int] = []
    split = pieces.score(samples, on_tokens=heard.append)
    assert heard == [20, 20, 20, 20, 10]
    alone = pieces.score(samples.take(np.arange(4, 5)))
    for field in dataclasses.fields(together):
        whole = getattr(together, field.name)
        np.testing.assert_allclose(getattr(split, field.name), whole, atol=1e-5, err_msg=field.name)
        np.testing.assert_allclose(getattr(alone, field.name), whole[4:5], atol=1e-5, err_msg=field.name)


def test_after_a_stop_token_nothing_but_that_token_is_on_the_support() -> None:
    """Texts that go on past their end, with drafts there, as a decoder that does not stop would have it."""
    backend = get_backend("cpp")
    model = tiny_model(backend=backend)
    rng = np.random.default_rng(4)
    token_ids = rng.integers(97, size=(9, 12))
    token_ids[:3] = [1, 2, 3] + [5] * 9
    token_ids[1, 5], token_ids[2, 6] = 13, 7  # another stop token, and one that stops nothing
    token_ids[3, 0] = 5
    samples = FinishedSamples(
        prompt_token_ids=PROMPT, params=STOPS, token_ids=token_ids,
        draft_token_ids=np.where(rng.random((9, 12)) < 0.3, token_ids, -1), slots=np.full((9, 12), -1),
        stream_keys=np.arange(9),
    )  # fmt: skip
    law = Scorer(model, backend, eos_token_ids=(EOS,)).score(samples)
    assert_close(law, brute_force(model, samples))
    assert law.p_token[:2, 4:].tolist() == [[1.0] * 8, [1.0, 0.0] + [1.0] * 6]
    assert law.support_violation[:3, 4:].sum() == 2
    assert law.support_violation[3].all(), "a stop token before min_tokens, and what comes after the end"
    assert (law.entropy[:, 4:][:3] == 0).all()


def test_texts_that_ended_are_not_fed_to_their_last_position(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend("cpp")
    model = tiny_model(backend=backend)
    samples = FinishedSamples(
        prompt_token_ids=PROMPT, params=STOPS, token_ids=np.array([[1, 2, 5, 5, 5], [1, 2, 5, 5, 5], [1, 5, 5, 5, 5]]),
        draft_token_ids=np.full((3, 5), -1), slots=np.full((3, 5), -1), stream_keys=np.arange(3),
    )  # fmt: skip
    rows: list[int] = []
    forward = Model.forward

    def counted(self: Model, token_ids: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        rows.append(len(token_ids))
        return forward(self, token_ids, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "forward", counted)
    Scorer(model, backend).score(samples)
    assert rows == [len(PROMPT) - 1, 3]


@pytest.mark.parametrize("params", [EVERYTHING, dataclasses.replace(EVERYTHING, temperature=0.0)], ids=str)
def test_bfloat16_texts_are_on_the_support_of_their_processed_law(params: SamplingParams) -> None:
    """Two forwards of other shapes differ by the rounding of bfloat16, in processed logits too. The twin: a law with
    another bias has violations."""
    backend = get_backend("cpp")
    model = tiny_model(backend=backend, dtype=torch.bfloat16)
    executor = build(backend, max_draft=3, eos_token_ids=(EOS,), model=model, draft_model=model)
    requests = requests_for([PROMPT] * 40, params, max_tokens=16)
    samples = finished(requests, executor.generate(requests, speculative=True))
    scorer = Scorer(model, backend, eos_token_ids=(EOS,))
    assert not scorer.score(samples).support_violation.any()
    shifted = dataclasses.replace(params, logit_bias=tuple((i, -b) for i, b in params.logit_bias))
    assert scorer.score(dataclasses.replace(samples, params=shifted)).support_violation.mean() > 0.2


def test_the_prompt_is_computed_once_a_batch_and_each_distinct_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend("cpp")
    model = tiny_model(backend=backend)
    samples = decoded(backend, CONFIGS["topp95"], count=8)
    rows: list[int] = []
    forward = Model.forward

    def counted(self: Model, token_ids: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        rows.append(len(token_ids))
        return forward(self, token_ids, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "forward", counted)
    Scorer(model, backend).score(samples)
    length = samples.token_ids.shape[1]
    assert rows == [len(PROMPT) - 1, sum(len(np.unique(samples.token_ids[:, :t], axis=0)) for t in range(length))]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_prompts_of_any_length_share_their_pages(length: int) -> None:
    backend = get_backend("cpp")
    model = tiny_model(backend=backend)
    rng = np.random.default_rng(length)
    samples = FinishedSamples(
        prompt_token_ids=tuple(rng.integers(97, size=length).tolist()),
        params=UNFILTERED,
        token_ids=rng.integers(97, size=(3, 19)),
        draft_token_ids=np.full((3, 19), -1),
        slots=np.full((3, 19), -1),
        stream_keys=np.arange(3),
    )
    scorer = Scorer(model, backend, max_forward_rows=40)
    expected = brute_force(model, samples)
    for _ in range(2):  # the second time the cache is used again
        assert_close(scorer.score(samples), expected)


def test_tokens_that_the_filters_remove_are_violations() -> None:
    backend = get_backend("cpp")
    model = tiny_model(backend=backend)
    rng = np.random.default_rng(3)
    samples = dataclasses.replace(decoded(backend, CONFIGS["topk20p90"]), token_ids=rng.integers(97, size=(6, 10)))
    law = Scorer(model, backend).score(samples)
    expected = brute_force(model, samples)
    assert_close(law, expected)
    assert 0.5 < law.support_violation.mean() < 1


def test_what_cannot_be_scored_is_refused_before_any_work() -> None:
    backend = get_backend("cpp")
    model = tiny_model(backend=backend, max_position=64)
    samples = decoded(backend, CONFIGS["topp95"])
    scorer = Scorer(model, backend)
    for name, column in (("token_ids", samples.token_ids), ("draft_token_ids", samples.draft_token_ids)):
        with pytest.raises(InvalidSetting, match=name):
            scorer.score(dataclasses.replace(samples, **{name: np.where(column == column[0, 0], 97, column)}))
    with pytest.raises(InvalidSetting, match="context"):
        scorer.score(dataclasses.replace(samples, prompt_token_ids=tuple(range(60))))
    incapable = IncapableBackend(backend, seeded_keys=frozenset())
    with pytest.raises(UnsupportedSampling, match="min_p"):
        Scorer(model, incapable).score(dataclasses.replace(samples, params=CONFIGS["minp05"]))
    with pytest.raises(InvalidSetting, match="draft_token_ids"):
        dataclasses.replace(samples, draft_token_ids=samples.draft_token_ids[:, 1:])
    with pytest.raises(InvalidSetting, match="stream_keys"):
        dataclasses.replace(samples, stream_keys=samples.stream_keys[1:])
    with pytest.raises(InvalidSetting, match="prompt"):
        dataclasses.replace(samples, prompt_token_ids=())


def test_several_laws_take_one_forward_and_say_what_each_says_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = get_backend("cpp")
    samples = decoded(backend, EVERYTHING)
    model, calls = tiny_model(backend=backend), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    scorer = Scorer(model, backend, eos_token_ids=(EOS,))
    plain = scorer.score(samples)
    for_one = len(calls)
    hot = dataclasses.replace(EVERYTHING, temperature=1.5)
    own, hotter, before, logits = scorer.score_as(
        samples, [Law(EVERYTHING), Law(hot), Law(EVERYTHING, Reading(row=-1)), Law(EVERYTHING, Reading(softmax=False))]
    )
    assert len(calls) == 2 * for_one
    alone = scorer.score(dataclasses.replace(samples, params=hot))
    for field in dataclasses.fields(LawColumns):
        name = field.name
        np.testing.assert_array_equal(getattr(own, name), getattr(plain, name))
        np.testing.assert_array_equal(getattr(hotter, name), getattr(alone, name))
    assert hotter.entropy.mean() > own.entropy.mean()
    # The law of a row before is that of another prefix; the first position has none, and keeps its own.
    np.testing.assert_array_equal(before.entropy[:, 0], own.entropy[:, 0])
    running = own.entropy[:, 1:] > 0
    np.testing.assert_array_equal(before.entropy[:, 1:][running], own.entropy[:, :-1][running])
    assert np.isfinite(logits.entropy).all()


def test_logits_without_a_positive_one_are_taken_for_their_largest() -> None:
    probs = _as_probs(torch.tensor([[-3.0, -1.0, -2.0], [0.5, -1.0, 1.5]]))
    assert probs.tolist() == [[0.0, 1.0, 0.0], [0.5, 0.0, 1.5]]
