"""FlashInfer's acceptance kernel with the generator left to advance by itself, as engines call it.

In a round of K drafts a row of `chain_speculative_sampling` draws up to K + 2 coins: one a draft, also past the first
rejection, and one for the token that it puts out; coin 0 judges the first draft, coin K + 1 draws a recovered token.
Called without seed and offset, versions before 0.7.4 advance the generator by B (K + 1) coins, rounded up to a multiple
of 4. With B = 1 and K + 1 a multiple of 4 that is one coin short: the one that drew the recovered token is coin 0 of
the next round. A token low in the vocabulary then comes before a kept draft, a high one before a rejected draft, with a
rank correlation of -sqrt(3) / 2 where drafts are kept half the time. From 0.7.4 on the generator advances by
B (K + 2) coins, and the wiring is exact. Larger batches of the older versions are exact too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from equivtest.decoder.acceptance import ChainAcceptance, RoutedAcceptance
from equivtest.decoder.stages import AcceptStage, Drafts, Stages, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults.base import Family, Fault
from equivtest.faults.wrappers import drafted, on_device
from equivtest.kernels.contract import PADDING, SpecAccept
from equivtest.rng import stream_key

NAME = "generator_offset"


class SelfAdvancingGenerator:
    """Judges the rows with drafts by FlashInfer's kernel with neither seed nor offset; the others are `inner`'s.

    The generator starts from all the keys of the call together, so that calls differ and a call can be made again.
    """

    def __init__(self, inner: AcceptStage, chain: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
        """chain: FlashInfer's chain_speculative_sampling."""
        self.inner, self.chain = inner, chain
        self._generator = torch.Generator()

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        if step.index == 0:
            seed = stream_key("generator", int(step.table.stream_keys.sum())) % 2**63  # the sum wraps around
            self._generator = torch.Generator(target_probs.device).manual_seed(seed)
        accepted = self.inner(step, drafts, target_probs)
        # The kernel wants as many drafts in every row.
        for count in np.unique(drafts.num_draft[drafted(drafts)]).tolist():
            rows = on_device(np.flatnonzero(drafts.num_draft == count), target_probs)
            token_ids = drafts.on(target_probs.device)[rows, :count]
            if drafts.probs is None:
                q = functional.one_hot(token_ids, target_probs.shape[-1]).float()
            else:
                q = drafts.probs[rows, :count].contiguous()
            p = target_probs[rows, : count + 1].contiguous()
            tokens, telemetry, emitted = self.chain(q, token_ids.int(), p, generator=self._generator)
            accepted.output_token_ids[rows] = PADDING
            accepted.output_token_ids[rows, : count + 1] = tokens.long()
            accepted.acceptance_telemetry[rows] = telemetry
            accepted.emitted[rows] = emitted
        return accepted


def generator_offset() -> Fault:
    """Calling it raises InvalidSetting for other kernels than flashinfer and for the match rule.

    It is a fault where FlashInfer is older than 0.7.4, one request is decoded at a time and three drafts, or seven, are
    offered; elsewhere nothing is wrong with it.
    """
    return Fault(
        name=NAME,
        stage="streams",
        kind="streams",
        reports=("flashinfer before 0.7.4",),
        ids=(56,),
        description="FlashInfer's generator is left to advance by itself, and a coin draws twice in batches of one",
        wrap=_wrap,
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW}),
    )


def _wrap(stages: Stages) -> Stages:
    rule = stages.accept.rule if isinstance(stages.accept, RoutedAcceptance) else stages.accept
    if not isinstance(rule, ChainAcceptance) or rule.backend.name != "flashinfer":
        raise InvalidSetting("fault", NAME, "goes with the flashinfer kernels and the chain acceptance rule")
    chain = import_module("flashinfer.sampling").chain_speculative_sampling
    return dataclasses.replace(stages, accept=SelfAdvancingGenerator(stages.accept, chain))


FAULTS: tuple[Callable[[], Fault], ...] = (generator_offset,)
