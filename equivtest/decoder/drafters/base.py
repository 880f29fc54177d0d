"""What a drafter is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from equivtest.decoder.follower import Follower
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Drafts, Int64Array, StepInput
from equivtest.kernels.contract import AttentionPlan, AttentionShape, BlockDrafts, RowParams, Streams


class BlockDrafter(Follower, Protocol):
    """What fills a block behind a text with device work alone."""

    @property
    def block_size(self) -> int:
        """Rows of a block, the newest token's included."""
        ...

    @property
    def num_drafts(self) -> int:
        """Drafts that a block has."""
        ...

    def attention_shape(self, kv: PagedKVCache) -> AttentionShape: ...

    def block_token_ids(self, newest: Tensor) -> Tensor:
        """What a block is fed behind each of the newest tokens (int64 [B]): int64 [B, block_size]."""
        ...

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn from a law rather than the likeliest."""
        ...

    def draft_rows(
        self,
        token_ids: Tensor,  # int64 [B * block_size]
        slots: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        kv: PagedKVCache,
        width: int,
        law: RowParams,  # [B]
        streams: Streams,  # [B], of the first draft
    ) -> BlockDrafts:
        """The first `width` drafts of each block; every row of it is a sequence of its own."""
        ...


class Drafter(Protocol):
    """Offers tokens for the target to check.

    A draft may depend on committed tokens and on DRAFT coins, on nothing else: not on telemetry, not on drafts that
    were rejected. The coins behind those are met again in the next round, and a drafter that remembered them would
    couple its proposals to the coins that judge them.
    """

    @property
    def name(self) -> str: ...

    @property
    def follower(self) -> Follower | None:
        """What reads the target's hidden states for it, from the prompt on; None: nothing does."""
        ...

    @property
    def on_device(self) -> BlockDrafter | None:
        """What drafts without the host, where it can be had: the same drafts as `propose`, all of its width."""
        ...

    def describe(self) -> Mapping[str, object]:
        """The parameters that fix what is drafted, for the record of a run."""
        ...

    def start(self, table: RequestTable, *, max_batch: int, max_draft: int) -> None:
        """A `generate` call begins; forget the one before."""
        ...

    def admit(self, requests: Int64Array) -> None:
        """Table rows of speculative requests that take part from the next step on."""
        ...

    def propose(self, step: StepInput) -> Drafts:
        """Drafts within `step.limits`; rows with limit 0 get none. Must leave `step.kv` as it was."""
        ...

    def release(self, requests: Int64Array) -> None:
        """Table rows of speculative requests that are finished."""
        ...

    def stop(self) -> None:
        """The call is over, finished or failed."""
        ...


class StatelessDrafter:
    """Base of drafters that keep nothing between steps."""

    follower: Follower | None = None
    on_device: BlockDrafter | None = None

    def start(self, table: RequestTable, *, max_batch: int, max_draft: int) -> None:
        pass

    def admit(self, requests: Int64Array) -> None:
        pass

    def release(self, requests: Int64Array) -> None:
        pass

    def stop(self) -> None:
        pass
