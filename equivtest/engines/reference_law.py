"""The target's law for engines that do not share the built-in decoder: the same weights in our scorer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from equivtest.decoder.draft_laws import ModelLaws
from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.model import Model
from equivtest.decoder.scorer import Law, Scorer
from equivtest.decoder.weights import Checkpoint
from equivtest.engines.decoder import SCORER_ROWS
from equivtest.kernels.registry import get_backend, resolve_auto
from equivtest.records import LawColumns, SamplingParams


def reference_scorer(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str,
    draft_model: Callable[[Model], Model] | None = None,
) -> Scorer:
    """A scorer with the kernels that `auto` stands for on the device.

    draft_model: makes the model that sampled drafts were drawn from, given the target. Raises KernelUnavailable, or
    UnsupportedModel for weights that the built-in decoder cannot run.
    """
    backend = get_backend(resolve_auto(device)[0])
    model = Model(checkpoint.config, checkpoint.weights, backend, dtype=dtype, device=device)
    return Scorer(
        model,
        backend,
        drafts=None if draft_model is None else ModelLaws(draft_model(model), backend),
        eos_token_ids=checkpoint.tokenizer.eos_token_ids,
        **SCORER_ROWS[device],
    )


class LawAsAsked:
    """A scorer for parameters as a server was given them."""

    def __init__(self, scorer: Scorer, asked: Callable[[SamplingParams], SamplingParams]) -> None:
        self._scorer, self._asked = scorer, asked

    def score(self, samples: FinishedSamples, *, on_tokens: Callable[[int], None] | None = None) -> LawColumns:
        return self._scorer.score(self._as_asked(samples), on_tokens=on_tokens)

    def score_as(self, samples: FinishedSamples, laws: Sequence[Law]) -> list[LawColumns]:
        own = [law._replace(params=self._asked(law.params)) for law in laws]
        return self._scorer.score_as(self._as_asked(samples), own)

    def _as_asked(self, samples: FinishedSamples) -> FinishedSamples:
        return dataclasses.replace(samples, params=self._asked(samples.params))


def stop_ids(stop_token_ids: Sequence[int], eos_token_ids: Sequence[int], *, ignore_eos: bool) -> tuple[int, ...]:
    """The token ids that end a text."""
    return tuple(dict.fromkeys((*stop_token_ids, *(() if ignore_eos else eos_token_ids))))
