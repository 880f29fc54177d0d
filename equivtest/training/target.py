"""The frozen target as a teacher: what it thinks of whole texts, and the ends it shares with the drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.weights import Checkpoint

NUM_LABELS = 32
"""Tokens of the target's law that are kept as labels, renormalised: its law at temperature 1 and top_k 32."""
MOST_ROWS = 32_768
"""Most tokens in one forward; most rows of logits are an eighth of it. Bounds the memory, not the result."""
_PAGE_SIZE = 16


class Labels(NamedTuple):
    """The target's law of the token after each token of some texts."""

    token_ids: Tensor
    """int32 [num_texts, text_length, NUM_LABELS], or the vocabulary if that is smaller."""
    probs: Tensor
    """[num_texts, text_length, NUM_LABELS]; rows sum to 1."""


class Target:
    """The model whose text it is, on one device in one dtype."""

    def __init__(self, model: Model, head: Tensor, layer_ids: tuple[int, ...]) -> None:
        """head: [vocab_size, hidden_size]. layer_ids: layers whose outputs are features, from 0, rising."""
        self.model, self.config, self.device = model, model.config, model.device
        self._recorder = _Recorder(self.config, layer_ids)
        # A product in bfloat16 is the slow one on a CPU without it; there the drafter learns in float32.
        self.compute_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.head = head.to(self.device, self.compute_dtype)
        """[vocab_size, hidden_size], in the dtype in which the drafter computes."""
        self._kv: PagedKVCache | None = None

    @classmethod
    def of(cls, model: Model, checkpoint: Checkpoint, layer_ids: tuple[int, ...]) -> Target:
        """A decoder's model, which was loaded from the checkpoint. The weights are shared, the graphs are not: theirs
        hold the memory of the decoder's cache."""
        tied = model.config.tied_embeddings
        head = checkpoint.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return cls(model.first_layers(model.config.num_layers), head, layer_ids)

    @property
    def num_layers(self) -> int:
        """Layers whose outputs are features."""
        return len(self._recorder.layer_ids)

    @property
    def feature_size(self) -> int:
        return len(self._recorder.layer_ids) * self.config.hidden_size

    def embed(self, token_ids: Tensor) -> Tensor:
        """float32 [..., hidden_size] for int64 [...]: where the drafter's residual stream begins."""
        embedded = self.model.embed(token_ids.flatten()).float()
        return embedded.view(*token_ids.shape, -1)

    def embedding(self) -> Tensor:
        """float32 [vocab_size, hidden_size]."""
        return self.embed(torch.arange(self.config.vocab_size, device=self.device))

    def features_and_labels(self, token_ids: Tensor) -> tuple[Tensor, Labels]:
        """Outputs of the layers for texts int64 [num_texts, text_length]: [num_texts, text_length, feature_size] in the
        model's dtype; and the law of every next token."""
        parts = []
        for part in self._parts(token_ids):
            features, hidden = self._read(part)
            tops = [_top(self.model.logits(rows)) for rows in torch.split(hidden, MOST_ROWS // 8)]
            ids, probs = (torch.cat(column).view(*part.shape, -1) for column in zip(*tops, strict=True))
            parts.append((features, ids, probs.to(features.dtype)))
        features, ids, probs = (torch.cat(column) for column in zip(*parts, strict=True))
        return features, Labels(ids, probs)

    def features_and_logits(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """For one text, int64 [text_length]: [text_length, feature_size], and logits of each next token
        [text_length, vocab_size]."""
        features, hidden = self._read(token_ids[None])
        return features[0], self.model.logits(hidden)

    def release(self) -> None:
        """Give up the cache; it is made again when it is needed."""
        self._kv = None

    def _parts(self, token_ids: Tensor) -> Iterator[Tensor]:
        return iter(torch.split(token_ids, max(1, MOST_ROWS // token_ids.shape[1])))

    def _read(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Features of the texts, and hidden states for the head [num_texts * text_length, hidden_size]."""
        num_texts, length = token_ids.shape
        kv = self._cache(num_texts, length)
        sequences = np.array([kv.new_sequence() for _ in range(num_texts)])
        batch = kv.extend(sequences, np.full(num_texts, length))
        hidden = self.model.forward(token_ids.flatten(), batch, kv, follower=self._recorder)
        kv.free(sequences)
        return self._recorder.take().view(num_texts, length, -1), hidden

    def _cache(self, num_texts: int, length: int) -> PagedKVCache:
        num_pages = num_texts * -(-length // _PAGE_SIZE)
        kv = self._kv
        if kv is None or kv.num_free_pages < num_pages or kv.num_free_sequences < num_texts or kv.max_length < length:
            self._kv = kv = PagedKVCache(
                self.config,
                num_pages=num_pages,
                max_sequences=num_texts,
                page_size=_PAGE_SIZE,
                dtype=self.model.dtype,
                device=self.device,
                companion=self._recorder.config,
            )
        return kv


class _Recorder:
    """Keeps the features that a follower is given, and writes no pages."""

    lookahead = 0

    def __init__(self, target: ModelConfig, layer_ids: tuple[int, ...]) -> None:
        self.layer_ids = layer_ids
        self.config = dataclasses.replace(target, num_layers=1)
        self._features: Tensor | None = None

    def follow(self, features: Tensor, slots: Tensor, positions: Tensor, pages: Tensor) -> None:
        self._features = features

    def take(self) -> Tensor:
        """The features of the last forward."""
        features, self._features = self._features, None
        assert features is not None
        return features


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (int32) and probabilities of the largest logits of each row."""
    top = logits.float().topk(min(NUM_LABELS, logits.shape[-1]), dim=-1)
    return top.indices.int(), top.values.softmax(dim=-1)
