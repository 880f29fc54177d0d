"""Decoders that are unusual and right: each has been called a bug somewhere, and the law of what is put out holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np
from torch import Tensor

from equivtest.decoder.acceptance import ChainAcceptance, MatchAcceptance, RoutedAcceptance
from equivtest.decoder.kv_cache import IntArray, PagedKVCache, RaggedBatch
from equivtest.decoder.model import Model
from equivtest.decoder.stages import Drafts, ProposeStage, Stages, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Fault, Nature, Setting
from equivtest.faults.wrappers import SAMPLED_DRAFTER, AlteredDrafter, require_sampled_drafter
from equivtest.rng import Purpose, uniforms


class UnrotatedModel:
    """A model that takes every token it is fed to stand at position 0: the keys it caches are wrong."""

    def __init__(self, model: Model) -> None:
        self.model, self.config, self.device = model, model.config, model.device

    def step_logits(
        self, token_ids: Tensor, batch: RaggedBatch, kv: PagedKVCache, *, only: IntArray | None = None
    ) -> Tensor:
        moved = dataclasses.replace(batch, positions=np.zeros_like(batch.positions))
        return self.model.step_logits(token_ids, moved, kv, only=only)


def match_acceptance() -> Fault:
    def wrap(stages: Stages) -> Stages:
        accept = stages.accept
        if not (isinstance(accept, RoutedAcceptance) and isinstance(accept.rule, ChainAcceptance)):
            raise InvalidSetting("fault", "match_acceptance", "goes with the chain acceptance rule")
        matched = RoutedAcceptance(MatchAcceptance(accept.rule.backend), accept.plain_backend)
        return dataclasses.replace(stages, accept=matched)

    return _variant(
        "match_acceptance", "accept", wrap, "drafts are kept as far as they equal the target's own draws, with no ratio"
    )


def one_hot_q() -> Fault:
    """The draft is a fact by the time it is judged: p is kept whatever law it came from."""

    def wrap(stages: Stages) -> Stages:
        require_sampled_drafter(stages, "one_hot_q")
        inner = stages.propose
        return dataclasses.replace(stages, propose=lambda step: inner(step).with_probs(None))

    return _variant("one_hot_q", "propose", wrap, "sampled drafts are judged as sure ones", drafter=SAMPLED_DRAFTER)


def drafter_wrong_kv() -> Fault:
    """q is the law that drafts are drawn from, wrong cache or not."""

    def wrap(stages: Stages) -> Stages:
        drafter = require_sampled_drafter(stages, "drafter_wrong_kv")
        model = cast("Model", UnrotatedModel(drafter.model))
        return dataclasses.replace(stages, propose=AlteredDrafter(drafter, model=model))

    return _variant(
        "drafter_wrong_kv",
        "propose",
        wrap,
        "the drafter's cache is wrong: fewer drafts are kept",
        drafter=SAMPLED_DRAFTER,
    )


def random_drafts() -> Fault:
    def propose(step: StepInput) -> Drafts:
        slots = np.arange(step.limits.max(initial=0))
        keys, positions = (column.cpu().numpy()[:, None] for column in step.streams)
        u = uniforms(keys, positions + slots, Purpose.DRAFT)
        token_ids = (u * step.scratch.vocab_size).astype(np.int64)
        return Drafts(token_ids, step.limits.astype(np.int32), None)

    return _variant(
        "random_drafts", "propose", _proposing(lambda _: propose), "drafts are any tokens of the vocabulary"
    )


def adaptive_length() -> Fault:
    """How many drafts are offered depends on the newest committed token, and on nothing that is still to be drawn."""

    def shorten(inner: ProposeStage) -> ProposeStage:
        def propose(step: StepInput) -> Drafts:
            drafts = inner(step)
            num_draft = np.minimum(drafts.num_draft, step.last_token_ids % (drafts.num_draft + 1)).astype(np.int32)
            width = int(num_draft.max(initial=0))
            probs = None if drafts.probs is None or width == 0 else drafts.probs[:, :width].contiguous()
            return Drafts(np.ascontiguousarray(drafts.token_ids[:, :width]), num_draft, probs)

        return propose

    return _variant(
        "adaptive_length", "propose", _proposing(shorten), "the number of drafts changes with the text, down to none"
    )


def no_drafts() -> Fault:
    return _variant(
        "no_drafts", "propose", _proposing(lambda _: lambda step: Drafts.none(step.batch)), "no draft is ever offered"
    )


def _proposing(change: Callable[[ProposeStage], ProposeStage]) -> Callable[[Stages], Stages]:
    return lambda stages: dataclasses.replace(stages, propose=change(stages.propose))


def _variant(
    name: str, stage: str, wrap: Callable[[Stages], Stages], description: str, *, drafter: str = "early_exit"
) -> Fault:
    return Fault(
        name=name,
        stage=stage,
        kind="valid variants",
        nature=Nature.VARIANT,
        description=description,
        setting=Setting(drafter=drafter),
        changes_law=False,
        wrap=wrap,
    )


FAULTS: tuple[Callable[[], Fault], ...] = (
    match_acceptance,
    one_hot_q,
    drafter_wrong_kv,
    random_drafts,
    adaptive_length,
    no_drafts,
)
