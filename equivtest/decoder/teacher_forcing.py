"""A model is fed samples as they were put out, every distinct prefix once."""

from __future__ import annotations

import torch
from torch import Tensor

from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.follower import Follower
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.shared_prefixes import SharedPrefixes, prompt_batch
from equivtest.errors import InvalidSetting


class TeacherForcing:
    """One model with a cache in which a batch of samples fits."""

    def __init__(
        self, model: Model, max_rows: int, *, follower: Follower | None = None, scratch_pages: int = 0
    ) -> None:
        """follower: what reads along. scratch_pages: pages behind those of the batch for it to write to."""
        self.model, self._max_rows = model, max_rows
        self._follower, self._scratch_pages = follower, scratch_pages
        self._kv: PagedKVCache | None = None

    @property
    def kv(self) -> PagedKVCache:
        """What `hidden` wrote, until it is called again."""
        assert self._kv is not None
        return self._kv

    def hidden(self, samples: FinishedSamples, prefixes: SharedPrefixes) -> Tensor:
        """Hidden states [num_nodes, hidden_size] that predict each token; the prompt and every prefix are fed once."""
        prompt, num_positions = samples.prompt_token_ids, samples.token_ids.shape[1]
        length = len(prompt) + num_positions - 1
        limit = self.model.config.max_position
        if length > limit:
            raise InvalidSetting("prompt and samples", length, f"must be at most {limit} tokens, the model's context")
        kv = self._cache(len(prompt) - 1 + prefixes.num_nodes + self._scratch_pages)
        for start in range(0, len(prompt) - 1, self._max_rows):
            stop = min(start + self._max_rows, len(prompt) - 1)
            piece = torch.tensor(prompt[start:stop], device=self.model.device)
            self.model.forward(piece, prompt_batch(start, stop), kv, follower=self._follower)
        fed = torch.from_numpy(prefixes.fed(samples.token_ids, prompt[-1])).to(self.model.device)
        return self.model.forward(fed, prefixes.batch(len(prompt) - 1), kv, follower=self._follower)

    def _cache(self, num_pages: int) -> PagedKVCache:
        """Pages of one token, the last cache reused when it is large enough. Which page holds what is said by the
        batches (`shared_prefixes`); the cache keeps no books here."""
        if self._kv is None or self._kv.num_free_pages < num_pages:
            self._kv = PagedKVCache(
                self.model.config,
                num_pages=num_pages,
                max_sequences=1,
                page_size=1,
                dtype=self.model.dtype,
                device=self.model.device,
                companion=None if self._follower is None else self._follower.config,
            )
        return self._kv
