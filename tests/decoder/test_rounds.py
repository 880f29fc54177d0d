"""Rounds that the device lays out for itself: the texts, drafts and acceptances of rounds that the host lays out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from equivtest.decoder import rounds as rounds_module
from equivtest.decoder.executor import Executor
from equivtest.decoder.rounds import Round
from equivtest.errors import InvalidKernelInput
from equivtest.kernels.contract import SpecAccept
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, Request, SamplingParams
from tests.decoder.dflash_drafters import dflash_drafter
from tests.decoder.fused_backend import FusedOnCpu
from tests.decoder.incapable_backend import IncapableBackend
from tests.decoder.scenarios import CONFIGS, GREEDY, build, random_prompts
from tests.decoder.tiny_models import tiny_model

CPP = get_backend("cpp")
KINDS = (CONFIGS["topp95"], GREEDY, CONFIGS["topk50"], CONFIGS["minp05"])


def requests(*kinds: SamplingParams) -> list[Request]:
    """More than fit at once, of different lengths and kinds: some end while others wait to come in."""
    kinds = kinds or KINDS
    return [
        Request(prompt_token_ids=prompt, params=kinds[i % len(kinds)], stream_key=i, max_tokens=1 + 5 * (i % 6))
        for i, prompt in enumerate(random_prompts(20))
    ]


def executor(backend: Any, *, max_position: int = 128, **settings: Any) -> Executor:
    block = {key: settings.pop(key) for key in ("anchor_first", "block_size", "markov_head") if key in settings}
    target = tiny_model(backend=backend, max_position=max_position)
    settings = {"max_batch": 7, "max_draft": 3} | settings
    return build(backend, model=target, replace_drafter=dflash_drafter(target, **block), **settings)


def on_device(**settings: Any) -> Executor:
    return executor(FusedOnCpu(CPP), **settings)


def plain(backend: Any, **settings: Any) -> Executor:
    """Without a drafter of blocks."""
    drafter = settings.pop("drafter", None)
    if drafter is None:
        return Executor(tiny_model(backend=backend), backend, None, max_batch=7, **settings)
    return build(backend, drafter, max_batch=7, **settings)


def noted(generations: list[Generation]) -> list[tuple[Any, ...]]:
    """Everything about a text but when and beside whom its tokens were made."""
    return [
        (g.token_ids.tolist(), g.origins, g.slots.tolist(), g.draft_token_ids.tolist(), g.num_drafts.tolist())
        for g in generations
    ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds that the device was given."""
    seen: list[int] = []
    launch = Round.launch

    def counted(self: Round) -> Any:
        seen.append(len(self._table))
        return launch(self)

    monkeypatch.setattr(Round, "launch", counted)
    return seen


@pytest.mark.parametrize(
    ("acceptance", "settings"),
    [
        ("chain", {}),
        ("chain", {"max_batch": 1}),
        ("chain", {"max_draft": 8}),
        ("chain", {"max_draft": 8, "anchor_first": True}),
        ("chain", {"max_draft": 4, "markov_head": True}),
        ("chain", {"block_size": 20, "max_draft": 1}),
        ("match", {}),
        ("match", {"max_draft": 8, "anchor_first": True, "markov_head": True}),
    ],
    ids=str,
)
def test_texts_drafts_and_acceptances_are_the_hosts(
    acceptance: str, settings: dict[str, Any], launched: list[int]
) -> None:
    told: list[int] = []
    own = on_device(acceptance=acceptance, **settings).generate(requests(), speculative=True, on_tokens=told.append)
    assert len(launched) > 20
    assert sum(told) == sum(len(g.token_ids) for g in own)
    assert noted(own) == noted(executor(CPP, acceptance=acceptance, **settings).generate(requests(), speculative=True))
    assert {"accepted", "recovered"} <= {origin for g in own for origin in g.origins}


@pytest.mark.parametrize("acceptance", ["chain", "match"])
@pytest.mark.parametrize("drafter", [None, "early_exit", "dflash"])
def test_plain_texts_are_the_hosts_too(drafter: str | None, acceptance: str, launched: list[int]) -> None:
    """Whatever would draft in a speculative call; steps and places in the batch are the host's as well."""
    made, told = [], []
    for backend in (FusedOnCpu(CPP), CPP):
        own = executor if drafter == "dflash" else plain
        settings = {} if drafter == "dflash" else {"drafter": drafter}
        generations = own(backend, acceptance=acceptance, **settings).generate(
            requests(), speculative=False, on_tokens=told.append
        )
        made.append([noted(generations), [(g.steps.tolist(), g.batch_rows.tolist()) for g in generations]])
    assert len(launched) > 20
    assert made[0] == made[1]
    assert sum(told) == 2 * sum(request.max_tokens for request in requests())


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 6])
def test_texts_do_not_depend_on_how_late_the_host_reads(
    ahead: int, speculative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = noted(on_device().generate(requests(), speculative=speculative))
    monkeypatch.setattr(rounds_module, "ROUNDS_AHEAD", ahead)
    assert noted(on_device().generate(requests(), speculative=speculative)) == expected


def crossed(self: Round) -> None:
    """The next round is fed the neighbour's token."""
    self._newest.copy_(self._newest.roll(1))


def short(self: Round) -> None:
    """The next round's lengths are one behind."""
    self._lengths.sub_((self._remaining > 0).long())


def same_coins(self: Round) -> None:
    """The next round draws with this one's coins."""
    self._generated.fill_(0)


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("fault", [crossed, short, same_coins])
def test_a_round_of_another_state_is_seen(fault: Any, speculative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    expected = noted(executor(CPP).generate(requests(), speculative=speculative))
    step = Round._step

    def faulty(self: Round, *plans: Any) -> Any:
        made = step(self, *plans)
        fault(self)
        return made

    monkeypatch.setattr(Round, "_step", faulty)
    assert noted(on_device().generate(requests(), speculative=speculative)) != expected


@pytest.mark.parametrize("speculative", [True, False])
def test_a_text_may_fill_the_models_context_to_the_last_token(speculative: bool, launched: list[int]) -> None:
    settings: dict[str, Any] = {"max_position": 40, "block_size": 16, "max_draft": 15}
    asked = [
        dataclasses.replace(request, max_tokens=40 - len(request.prompt_token_ids))
        for request in requests()
        if len(request.prompt_token_ids) < 40
    ]
    own = on_device(**settings).generate(asked, speculative=speculative)
    assert launched
    assert noted(own) == noted(executor(CPP, **settings).generate(asked, speculative=speculative))


def test_one_executor_serves_batches_of_every_size_again_and_again(launched: list[int]) -> None:
    """Rounds of one shape are kept; what a call before left in their memory does not matter."""
    own, host = on_device(), executor(CPP)
    for index, part in enumerate((slice(0, 20), slice(3, 5), slice(0, 20), slice(10, 11), slice(0, 20))):
        asked, speculative = requests()[part], index != 2
        assert noted(own.generate(asked, speculative=speculative)) == noted(
            host.generate(asked, speculative=speculative)
        )
    assert len(set(launched)) > 2


@pytest.mark.parametrize(
    "change",
    [
        {"params": SamplingParams(temperature=0.8, repetition_penalty=1.2)},
        {"params": SamplingParams(temperature=0.8, stop_token_ids=(5,))},
        {"logprobs": "raw"},
    ],
    ids=["a penalty reads the text", "a stop token ends it", "log-probabilities are asked for"],
)
@pytest.mark.parametrize("speculative", [True, False])
def test_what_needs_the_host_is_left_to_it(change: dict[str, Any], speculative: bool, launched: list[int]) -> None:
    asked = [dataclasses.replace(request, **change) for request in requests()]
    own = on_device().generate(asked, speculative=speculative)
    assert not launched
    assert noted(own) == noted(executor(CPP).generate(asked, speculative=speculative))


def test_a_batch_with_a_row_that_the_backend_cannot_represent_is_left_to_the_host(launched: list[int]) -> None:
    backend = IncapableBackend(CPP)  # min_p goes plain
    own = executor(FusedOnCpu(backend), plain_backend=CPP).generate(
        requests(CONFIGS["minp05"], GREEDY), speculative=True
    )
    assert len(launched) < 20
    assert noted(own) == noted(
        executor(backend, plain_backend=CPP).generate(requests(CONFIGS["minp05"], GREEDY), speculative=True)
    )


def test_a_drafter_that_needs_the_host_has_no_rounds_of_the_device(launched: list[int]) -> None:
    texts = [
        noted(plain(backend, drafter="early_exit").generate(requests(), speculative=True))
        for backend in (FusedOnCpu(CPP), CPP)
    ]
    assert not launched
    assert texts[0] == texts[1]


@pytest.mark.parametrize("speculative", [True, False])
def test_stages_of_somebody_elses_see_every_step_by_itself(speculative: bool, launched: list[int]) -> None:
    """A wrapped stage may look at any token of the table, as a fault or given at construction."""
    own = on_device()
    own.generate(requests(), speculative=speculative, fault=dataclasses.replace)
    stages = dataclasses.replace(own.stages)
    Executor(own.model, own.backend, own.drafter, max_batch=7, max_draft=3, stages=stages).generate(
        requests(), speculative=speculative
    )
    assert not launched
    own.generate(requests(), speculative=speculative)
    assert launched, "the twin"


def test_what_a_kernel_refuses_is_raised_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = FusedOnCpu.accept_logits

    def refusing(self: FusedOnCpu, *arguments: Any, **options: Any) -> SpecAccept:
        return accept(self, *arguments, **options)._replace(refusal=torch.tensor([1.0, 2.0, float("nan")]).double())

    monkeypatch.setattr(FusedOnCpu, "accept_logits", refusing)
    for speculative in (True, False):
        with pytest.raises(InvalidKernelInput, match="NaN"):
            on_device().generate(requests(), speculative=speculative)
