"""Texts with what the target thinks of them, from which training draws its blocks.

Features and laws of all texts are computed once and kept on the device, if they fit there: for 384 tokens of the
built-in model and five layers, 2.3 MB a text in bfloat16, or half of that in floats of eight bits. Otherwise those of a
step's texts are computed in that step.
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
        self._features: KeptFeatures | None = None
        self._labels: Labels | None = None
        room = _most_bytes(target.device)
        for compact in (False, True):
            size = self._bytes(compact=compact)
            if size <= room:
                if compact:
                    watcher.message(f"features: kept in eight bits, {size / 1e9:.1f} GB")
                self._keep(watcher, compact=compact)
                target.release()
                return
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
            features, labels, which = self._features.take(rows), self._labels, rows
        return self._blocks(token_ids, anchors, features, labels, which)

    def _blocks(self, token_ids: Tensor, anchors: Tensor, features: Tensor, labels: Labels, which: Tensor) -> Blocks:
        """which: int64 [B], the texts' rows in `labels`."""
        places = anchors[..., None] + torch.arange(self._num_drafts, device=anchors.device)
        # What a position's law is about, and its feature knows, is the token after it.
        laws = Labels(*(column[which[:, None, None], places] for column in labels))
        next_ids = token_ids.gather(1, places.flatten(1) + 1).view(places.shape)
        return Blocks(features, anchors, token_ids.gather(1, anchors), next_ids, laws)

    def _bytes(self, *, compact: bool) -> int:
        width = min(NUM_LABELS, self._target.config.vocab_size)
        itemsize = self._target.model.dtype.itemsize
        size = self._target.feature_size
        features = size + 4 * self._target.num_layers if compact else size * itemsize
        return self._texts.token_ids.numel() * (features + width * (4 + itemsize))

    def _keep(self, watcher: Watcher, *, compact: bool) -> None:
        num_texts, length = self._texts.token_ids.shape
        target, dtype = self._target, self._target.model.dtype
        width = min(NUM_LABELS, target.config.vocab_size)
        self._features = KeptFeatures(num_texts, length, target, compact=compact)
        self._labels = Labels(
            torch.empty(num_texts, length, width, dtype=torch.int32, device=target.device),
            torch.empty(num_texts, length, width, dtype=dtype, device=target.device),
        )
        watcher.stage("features", num_texts)
        for start in range(0, num_texts, step := max(1, MOST_ROWS // length)):
            part = slice(start, start + step)
            features, labels = target.features_and_labels(self._texts.token_ids[part])
            self._features.put(part, features)
            for kept, column in zip(self._labels, labels, strict=True):
                kept[part] = column
            watcher.advance(min(start + step, num_texts), f"{min(start + step, num_texts) * length:,} tokens")


class KeptFeatures:
    """Features of all texts, as they are or in floats of eight bits: three of mantissa, with a scale for each token and
    layer, whose largest entry is the largest such float. An entry is off by at most a sixteenth of itself, unless it is
    thirty thousand times smaller than the largest.
    """

    def __init__(self, num_texts: int, length: int, target: Target, *, compact: bool) -> None:
        self._num_layers, self._dtype, device = target.num_layers, target.model.dtype, target.device
        stored = torch.uint8 if compact else self._dtype  # bytes, for few operations know floats of eight bits
        self._values = torch.empty(num_texts, length, target.feature_size, dtype=stored, device=device)
        shape = (num_texts, length, self._num_layers, 1)
        self._scales = torch.empty(shape, dtype=torch.float32, device=device) if compact else None

    def put(self, part: slice, features: Tensor) -> None:
        """features: [n, length, feature_size], of the texts of `part`."""
        if self._scales is None:
            self._values[part] = features
            return
        layers = features.reshape(*features.shape[:2], self._num_layers, -1).float()
        scales = layers.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
        self._scales[part] = scales
        self._values[part] = (layers / scales).to(torch.float8_e4m3fn).flatten(2).view(torch.uint8)

    def take(self, rows: Tensor) -> Tensor:
        """[n, length, feature_size] in the model's dtype, of these texts."""
        values = self._values[rows]
        if self._scales is None:
            return values
        layers = values.view(torch.float8_e4m3fn).float().view(*values.shape[:2], self._num_layers, -1)
        features: Tensor = (layers * self._scales[rows]).flatten(2)
        return features.to(self._dtype)


_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _most_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return _HOST_BYTES
    return _SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]
