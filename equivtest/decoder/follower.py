"""What reads a model's hidden states along with it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from equivtest.decoder.config import ModelConfig


class Follower(Protocol):
    """A network with keys and values of its own for every token that the model is fed, made from hidden states of the
    model. They lie in the companion pages of the model's cache, at the same places: what becomes of a token there,
    shared, copied or cut off, becomes of both."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers of the model, from 0, whose outputs it reads."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Its layers, which fix the shape of its pages."""
        ...

    @property
    def lookahead(self) -> int:
        """Tokens past the end of a text that it writes for a while."""
        ...

    def follow(self, features: Tensor, slots: Tensor, positions: Tensor, pages: Tensor) -> None:
        """Write the rows' keys and values. Device work alone, so that a graph can hold it.

        features: [num_rows, len(layer_ids) * hidden_size], residual streams after the layers, in the order of
        `layer_ids`. slots, positions: int64 [num_rows], see RaggedBatch. pages: see PagedKVCache.companion_pages.
        """
        ...
