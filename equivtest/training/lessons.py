"""Texts with what the target thinks of them, from which training draws its blocks.

Features and laws of all texts are computed once and kept on the device, if they fit there: for 384 tokens of the
built-in model and five layers, 2.3 MB a text in bfloat16. Otherwise those of a step's texts are computed in that step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from equivtest.errors import InvalidSetting
from equivtest.training.target import MOST_ROWS, NUM_LABELS, Labels, Target
from equivtest.training.text import Texts
from equivtest.training.watch import Watcher

_SHARE_OF_FREE_MEMORY = 0.75
_HOST_BYTES = 4 << 30
"""Most that is kept where the device is the host, which others use too."""


class Blocks(NamedTuple):
    """One step's blocks: N in each of B texts, of K drafts each."""

    features: Tensor  # [B, text_length, feature_size]
    anchors: Tensor  # int64 [B, N], positions of the anchors
    anchor_ids: Tensor  # int64 [B, N], the tokens there
    next_ids: Tensor  # int64 [B, N, K], the tokens after the anchor: what a draft must be to be accepted
    laws: Labels  # [B, N, K, NUM_LABELS], the laws from which those were drawn


class Lessons:
    """Draws blocks at random, without a look at the device."""

    def __init__(self, texts: Texts, target: Target, num_drafts: int, watcher: Watcher) -> None:
        """num_drafts: K. Raises InvalidSetting for texts in which a block finds no place."""
        texts = texts.to(target.device)
        self._texts, self._target, self._num_drafts = texts, target, num_drafts
        self._length = texts.token_ids.shape[1]
        # Blocks end inside their text, so that every draft has a token to be held against.
        self._room = self._length - num_drafts - texts.answer_starts + 1
        if int(self._room.min()) < 1:
            raise InvalidSetting("text_length", self._length, f"leaves no room for {num_drafts} drafts in an answer")
        self._features: Tensor | None = None
        self._labels: Labels | None = None
        size = self._bytes()
        if size <= _most_bytes(target.device):
            self._keep(watcher)
            target.release()
        else:
            watcher.message(f"features: {size / 1e9:.1f} GB do not fit and are computed in each step")

    def draw(self, num_texts: int, num_anchors: int, generator: torch.Generator) -> Blocks:
        """Texts drawn uniformly with replacement, and anchors uniformly in each answer, its last prompt token too."""
        device = self._target.device
        rows = torch.randint(len(self._texts), (num_texts,), generator=generator, device=device)
        places = torch.rand(num_texts, num_anchors, generator=generator, device=device, dtype=torch.float64)
        anchors = (self._texts.answer_starts[rows, None] - 1) + (places * self._room[rows, None]).long()
        token_ids = self._texts.token_ids[rows]
        if self._features is None or self._labels is None:
            features, labels = self._target.features_and_labels(token_ids)
            # Copies: what inference made cannot be trained on.
            features, labels = features.clone(), Labels(*(column.clone() for column in labels))
            which = torch.arange(num_texts, device=device)
        else:
            features, labels, which = self._features[rows], self._labels, rows
        return self._blocks(token_ids, anchors, features, labels, which)

    def _blocks(self, token_ids: Tensor, anchors: Tensor, features: Tensor, labels: Labels, which: Tensor) -> Blocks:
        """which: int64 [B], the texts' rows in `labels`."""
        places = anchors[..., None] + torch.arange(self._num_drafts, device=anchors.device)
        # What a position's law is about, and its feature knows, is the token after it.
        laws = Labels(*(column[which[:, None, None], places] for column in labels))
        next_ids = token_ids.gather(1, places.flatten(1) + 1).view(places.shape)
        return Blocks(features, anchors, token_ids.gather(1, anchors), next_ids, laws)

    def _bytes(self) -> int:
        width = min(NUM_LABELS, self._target.config.vocab_size)
        itemsize = self._target.model.dtype.itemsize
        return self._texts.token_ids.numel() * (self._target.feature_size * itemsize + width * (4 + itemsize))

    def _keep(self, watcher: Watcher) -> None:
        num_texts, length = self._texts.token_ids.shape
        target, dtype = self._target, self._target.model.dtype
        width = min(NUM_LABELS, target.config.vocab_size)
        self._features = torch.empty(num_texts, length, target.feature_size, dtype=dtype, device=target.device)
        self._labels = Labels(
            torch.empty(num_texts, length, width, dtype=torch.int32, device=target.device),
            torch.empty(num_texts, length, width, dtype=dtype, device=target.device),
        )
        watcher.stage("features", num_texts)
        for start in range(0, num_texts, step := max(1, MOST_ROWS // length)):
            part = slice(start, start + step)
            features, labels = target.features_and_labels(self._texts.token_ids[part])
            self._features[part] = features
            for kept, column in zip(self._labels, labels, strict=True):
                kept[part] = column
            watcher.advance(min(start + step, num_texts), f"{min(start + step, num_texts) * length:,} tokens")


def _most_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return _HOST_BYTES
    return _SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]
