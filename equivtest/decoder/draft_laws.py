"""The laws that drafts were drawn from, computed again from finished samples by teacher forcing.

A small model's law of a draft depends on the text before it. A block's depends on where its round began too: on the
text before its anchor, the tokens committed since, and the slot. Every draft that was judged stands behind drafts that
were kept, so all of it can be read from the samples.
"""

from __future__ import annotations

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
from equivtest.records import SamplingParams


class PlacedLaws(Protocol):
    """The laws of a batch's drafts. Drafts of one place have one law."""

    @property
    def place(self) -> Int64Array:
        """[num_samples * num_positions], the place of each token's draft; -1 where none was offered."""
        ...

    def law(self, places: Int64Array, params: SamplingParams, out: Tensor) -> Tensor:
        """q of these places ([n]) under the request's temperature and filters, without penalties, bias and min_tokens.
        It is written to `out` [n, vocab_size] and returned."""
        ...


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
        place = np.where(samples.draft_token_ids >= 0, prefixes.node, -1).ravel()
        return _ModelPlaces(place, hidden, self._model, self._backend)


class _ModelPlaces(NamedTuple):
    place: Int64Array
    hidden: Tensor
    model: Model
    backend: KernelBackend

    def law(self, places: Int64Array, params: SamplingParams, out: Tensor) -> Tensor:
        logits = self.model.logits(self.hidden[torch.from_numpy(places).to(self.hidden.device)])
        return self.backend.verify_probs(logits, _rows(params, logits), out=out)


class BlockLaws:
    """Drafts of a block that were drawn behind one another. A place is a prefix and a slot."""

    def __init__(self, network: BlockNetwork) -> None:
        self.follower = self._network = network

    def scratch_pages(self, max_rows: int) -> int:
        return self._num_blocks(max_rows) * self._network.block_size

    def of(self, samples: FinishedSamples, prefixes: SharedPrefixes, kv: PagedKVCache, max_rows: int) -> PlacedLaws:
        drafted = (samples.draft_token_ids >= 0) & (prefixes.node >= 0)
        sample, position = np.nonzero(drafted)
        slot = self._slots(samples, sample, position)
        width = int(slot.max(initial=0)) + 1
        node = prefixes.node[sample, position]
        _, first, back = np.unique(node * width + slot, return_index=True, return_inverse=True)
        place = np.full(samples.token_ids.shape, -1)
        place[drafted] = back
        sample, position, slot, node = (column[first] for column in (sample, position, slot, node))
        start_of = position - slot
        anchors, opens, block = np.unique(prefixes.node[sample, start_of], return_index=True, return_inverse=True)
        prompt, size, network = samples.prompt_token_ids, self._network.block_size, self._network
        fed = prefixes.fed(samples.token_ids, prompt[-1])
        step = self._num_blocks(max_rows)
        parts = []
        for start in range(0, len(anchors), step):
            own = opens[start : start + step]
            batch = prefixes.blocks(len(prompt) - 1, sample[own], start_of[own], size)
            parts.append((start, network.place_states(fed[anchors[start : start + step]], batch, kv, width)))
        states = torch.empty(len(slot), network.block.hidden_size, dtype=kv.pages.dtype, device=network.device)
        for start, part in parts:
            inside = np.flatnonzero((block >= start) & (block < start + len(part)))
            which = torch.from_numpy((block[inside] - start) * width + slot[inside]).to(network.device)
            states[torch.from_numpy(inside).to(network.device)] = part.flatten(0, 1)[which]
        return _BlockPlaces(place.ravel(), states, fed[node], slot == 0, network)

    def _num_blocks(self, max_rows: int) -> int:
        return max(1, max_rows // self._network.block_size)

    def _slots(self, samples: FinishedSamples, sample: Int64Array, position: Int64Array) -> Int64Array:
        if samples.slots is None:
            raise InvalidSetting("slots", None, "must say at which slot of its round each token came out")
        slot: Int64Array = samples.slots[sample, position]
        wrong = np.flatnonzero((slot < 0) | (slot > position) | (slot >= self._network.num_drafts))
        if len(wrong):
            at = f"sample {sample[wrong[0]]}, position {position[wrong[0]]}"
            limit = f"of a draft must be in 0..{self._network.num_drafts - 1} and its round within the text"
            raise InvalidSetting("slots", int(slot[wrong[0]]), f"{limit}, at {at} of the batch")
        return slot


class _BlockPlaces(NamedTuple):
    place: Int64Array
    states: Tensor  # [num_places, hidden_size]
    previous: Int64Array  # [num_places], the token before each
    opens: np.ndarray  # bool [num_places], whether it is the first of its block
    network: BlockNetwork

    def law(self, places: Int64Array, params: SamplingParams, out: Tensor) -> Tensor:
        device = self.states.device
        previous, opens = (torch.from_numpy(array[places]).to(device) for array in (self.previous, self.opens))
        states = self.states[torch.from_numpy(places).to(device)]
        return self.network.place_laws(states, previous, opens, _rows(params, states), out)


def _rows(params: SamplingParams, like: Tensor) -> RowParams:
    one = RowParams.of([params], like.device)
    return one.take(torch.zeros(len(like), dtype=torch.int64, device=like.device))
