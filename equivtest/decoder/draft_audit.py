"""Are drafts drawn from the law that they are handed on with? Listens between the propose stage and the rest."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from equivtest.decoder.drafters.draft_model import draw
from equivtest.decoder.stages import Drafts, ProposeStage, Stages, StepInput
from equivtest.rng import Purpose, uniforms


class DraftAudit:
    """Wraps a propose stage and draws every draft once more: from its declared law q, with its own DRAFT coin.

    The counts add up over `generate` calls. Drafts without a law are sure, and not counted.
    """

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_changed = 0
        """Drafts that are not the draw of their law and coin."""

    def __call__(self, stages: Stages) -> Stages:
        return dataclasses.replace(stages, propose=self._listen(stages.propose))

    def _listen(self, propose: ProposeStage) -> ProposeStage:
        def listening(step: StepInput) -> Drafts:
            drafts = propose(step)
            if drafts.probs is not None:
                self._count(step, drafts, drafts.probs)
            return drafts

        return listening

    def _count(self, step: StepInput, drafts: Drafts, probs: torch.Tensor) -> None:
        rows, slots = np.nonzero(np.arange(drafts.token_ids.shape[1]) < drafts.num_draft[:, None])
        keys, positions = (column.cpu().numpy()[rows] for column in step.streams)
        coins = uniforms(keys, positions + slots, Purpose.DRAFT)
        declared = probs[torch.from_numpy(rows).to(probs.device), torch.from_numpy(slots).to(probs.device)]
        self.num_drafts += len(rows)
        self.num_changed += int((draw(declared, coins) != drafts.token_ids[rows, slots]).sum())
