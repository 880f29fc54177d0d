"""The laws that drafts were drawn from, computed again from finished samples by teacher forcing.

A small model's law of a draft depends on the text before it. A block's depends on where its round began too: on the
text before its anchor, the tokens committed since, and the slot. Every draft that was judged stands behind drafts that
were kept, so all of it can be read from the samples; how long the block was and where it was cut does not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.drafters.base import Drafter
from equivtest.decoder.drafters.dflash import BlockNetwork, DFlashDrafter
from equivtest.decoder.drafters.draft_model import ModelDrafter
from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.follower import Follower
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.shared_prefixes import SharedPrefixes
from equivtest.decoder.stages import Int64Array
from equivtest.decoder.teacher_forcing import TeacherForcing
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import KernelBackend, RowParams


class PlacedLaws(NamedTuple):
    """The laws of a batch's drafts. Drafts of one place have one law."""

    place: Int64Array
    """[num_samples, num_positions], the place of each token's draft; -1 where none was offered."""
    law: Callable[[Tensor, RowParams, Tensor], Tensor]
    """(places, params, out): q of these places (int64 [n], on the device) under the temperature and the filters of n
    rows, written to `out` [n, vocab_size] and returned. Penalties, bias and min_tokens are the target's alone."""


class DraftLaws(Protocol):
    """Knows the law of a drafter that draws."""

    @property
    def follower(self) -> Follower | None:
        """What must read along when the target is fed the samples."""
        ...

    def scratch_pages(self, max_rows: int) -> int:
        """Pages that `of` writes to behind those of the samples."""
        ...

    def of(self, samples: FinishedSamples, prefixes: SharedPrefixes, kv: PagedKVCache, max_rows: int) -> PlacedLaws:
        """kv: the target's, which was fed the samples. max_rows: most rows of a forward.

        Raises InvalidSetting for samples that do not say what the law depends on.
        """
        ...


def draft_laws(drafter: Drafter | None, backend: KernelBackend) -> DraftLaws | None:
    """None for a drafter whose drafts are sure, and for none. backend: computes the law of a small model."""
    if isinstance(drafter, ModelDrafter):
        return ModelLaws(drafter.model, backend)
    if isinstance(drafter, DFlashDrafter) and drafter.network.draws:
        return BlockLaws(drafter.network)
    return None


class ModelLaws:
    """Drafts of a small model. A place is a prefix."""

    follower = None

    def __init__(self, model: Model, backend: KernelBackend) -> None:
        self._model, self._backend = model, backend
        self._forced: TeacherForcing | None = None

    def scratch_pages(self, max_rows: int) -> int:
        return 0

    def of(self, samples: FinishedSamples, prefixes: SharedPrefixes, kv: PagedKVCache, max_rows: int) -> PlacedLaws:
        if self._forced is None:
            self._forced = TeacherForcing(self._model, max_rows)
        hidden = self._forced.hidden(samples, prefixes)

        def law(places: Tensor, params: RowParams, out: Tensor) -> Tensor:
            return self._backend.verify_probs(self._model.logits(hidden[places]), params, out=out)

        return PlacedLaws(np.where(samples.draft_token_ids >= 0, prefixes.node, -1), law)


class BlockLaws:
    """Drafts of a block that were drawn behind one another. A place is a prefix and a slot."""

    def __init__(self, network: BlockNetwork) -> None:
        self.follower = self._network = network

    def scratch_pages(self, max_rows: int) -> int:
        return self._num_blocks(max_rows) * self._network.block_size

    def of(self, samples: FinishedSamples, prefixes: SharedPrefixes, kv: PagedKVCache, max_rows: int) -> PlacedLaws:
        network = self._network
        drafted = (samples.draft_token_ids >= 0) & (prefixes.node >= 0)
        sample, position = np.nonzero(drafted)
        slot = self._slots(samples, sample, position)
        width = int(slot.max(initial=0)) + 1
        # A place for all drafts of one prefix and slot, and a block for all places whose rounds began behind one text.
        keys, first, back = np.unique(prefixes.node[drafted] * width + slot, return_index=True, return_inverse=True)
        place = np.full(drafted.shape, -1)
        place[drafted] = back
        node, slot = np.divmod(keys, width)
        sample, start = sample[first], position[first] - slot
        anchors, of_block, block = np.unique(prefixes.node[sample, start], return_index=True, return_inverse=True)
        sample, start = sample[of_block], start[of_block]
        fed = prefixes.fed(samples.token_ids, samples.prompt_token_ids[-1])
        shape, step = (len(anchors), width, network.block.hidden_size), self._num_blocks(max_rows)
        states = torch.empty(shape, dtype=kv.pages.dtype, device=network.device)
        for part in (slice(begin, begin + step) for begin in range(0, len(anchors), step)):
            batch = prefixes.blocks(len(samples.prompt_token_ids) - 1, sample[part], start[part], network.block_size)
            states[part] = network.place_states(fed[anchors[part]], batch, kv, width)
        states = states.flatten(0, 1)
        rows, opens, previous = (
            torch.from_numpy(column).to(network.device) for column in (block * width + slot, slot == 0, fed[node])
        )

        def law(places: Tensor, params: RowParams, out: Tensor) -> Tensor:
            return network.place_laws(states[rows[places]], previous[places], opens[places], params, out)

        return PlacedLaws(place, law)

    def _num_blocks(self, max_rows: int) -> int:
        return max(1, max_rows // self._network.block_size)

    def _slots(self, samples: FinishedSamples, sample: Int64Array, position: Int64Array) -> Int64Array:
        """[n] of these tokens, all of which were offered a draft."""
        slot: Int64Array = samples.slots[sample, position]
        wrong = np.flatnonzero((slot < 0) | (slot > position) | (slot >= self._network.num_drafts))
        if len(wrong):
            at = f"sample {sample[wrong[0]]}, position {position[wrong[0]]}"
            limit = f"of a draft must be in 0..{self._network.num_drafts - 1} and its round within the text"
            raise InvalidSetting("slots", int(slot[wrong[0]]), f"{limit}, at {at} of the batch")
        return slot
