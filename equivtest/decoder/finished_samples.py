"""What is scored: samples of one prompt that have been put out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from equivtest.decoder.stages import Int64Array
from equivtest.errors import InvalidSetting
from equivtest.records import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedSamples:
    """Samples of one prompt under one law, to be scored."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    token_ids: Int64Array
    """[num_samples, num_positions], what was put out; a stop token is repeated to the end."""
    draft_token_ids: Int64Array
    """[num_samples, num_positions], the draft offered at each token; -1 where none was."""
    slots: Int64Array
    """[num_samples, num_positions], the index in its round at which each token came out; -1 where that is not known or
    there was no draft. The law of a block's drafts depends on it."""
    stream_keys: Int64Array
    """[num_samples], the samples' own streams; their SCORE coins randomise the transforms."""

    def __post_init__(self) -> None:
        for name in ("token_ids", "draft_token_ids", "slots", "stream_keys"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.int64))
        if not self.prompt_token_ids:
            raise InvalidSetting("prompt_token_ids", (), "needs at least one token")
        if self.token_ids.ndim != 2 or 0 in self.token_ids.shape:
            raise InvalidSetting("token_ids", self.token_ids.shape, "must be [num_samples, num_positions], not empty")
        for name in ("draft_token_ids", "slots"):
            if getattr(self, name).shape != self.token_ids.shape:
                raise InvalidSetting(name, getattr(self, name).shape, f"must be {self.token_ids.shape}")
        if self.stream_keys.shape != self.token_ids.shape[:1]:
            raise InvalidSetting("stream_keys", self.stream_keys.shape, f"must be {self.token_ids.shape[:1]}")

    def take(self, index: Int64Array) -> FinishedSamples:
        """The samples of these indices, in their order."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[index],
            draft_token_ids=self.draft_token_ids[index],
            slots=self.slots[index],
            stream_keys=self.stream_keys[index],
        )
