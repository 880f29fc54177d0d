"""The stages of a step, and what flows between them.

    propose -> forward -> process -> verify -> accept -> report -> commit

Each stage is one small callable that the executor is given. A fault wraps one of them and nothing else changes: the
step itself holds no switch for it. A wrapper may hand its inner stage an altered record (`dataclasses.replace`), and
may alter what the inner stage returns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.follower import Follower
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.request_table import RequestTable
from equivtest.kernels.contract import RowParams, SpecAccept, SpecScratch, Streams

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What every stage knows about the step. B rows, one per running request."""

    index: int
    """Number of the step within its `generate` call."""
    table: RequestTable
    """Every request of the call with its committed tokens; stages but `commit` only read it."""
    requests: Int64Array
    """[B], the table row of each batch row."""
    num_main: int
    """Rows [:num_main] are sampled by the main backend, the others, which it cannot represent, by the plain one."""
    sequences: Int64Array
    """[B], KV sequences; each holds every committed token but the last, which this step feeds."""
    lengths: Int64Array
    """[B], committed tokens, the prompt included."""
    limits: Int64Array
    """[B], the most drafts a row may be offered: 0 on the plain route, and never past the request's last token."""
    params: RowParams
    """[B], on the device of the model."""
    streams: Streams
    """[B], on the device of the model."""
    kv: PagedKVCache
    scratch: SpecScratch
    follower: Follower | None = None
    """What reads the model's hidden states of this step."""

    @property
    def batch(self) -> int:
        return len(self.requests)

    @property
    def last_token_ids(self) -> Int64Array:
        """[B], the newest committed token of each row."""
        return self.table.token_ids[self.requests, self.lengths - 1]

    def rows(self, start: int, stop: int) -> StepInput:
        """The step restricted to batch rows start:stop, all of which count as the main backend's."""
        part = slice(start, stop)
        return dataclasses.replace(
            self,
            requests=self.requests[part],
            num_main=stop - start,
            sequences=self.sequences[part],
            lengths=self.lengths[part],
            limits=self.limits[part],
            params=RowParams(*(column[part] for column in self.params)),
            streams=Streams(*(column[part] for column in self.streams)),
        )


class Drafts:
    """What a drafter offers. Rows may differ in how many; K is the widest row.

    num_draft: int32 [B] on the host, 0..K; 0 is a plain row. probs: [B, K, vocab_size], the law q each draft was drawn
    from; None: a point mass at each draft.
    """

    def __init__(self, token_ids: Int64Array | Tensor, num_draft: Int32Array, probs: Tensor | None) -> None:
        """token_ids: [B, K], where the drafter made them, on the host or on a device; entries at or past num_draft are
        ignored."""
        self._token_ids, self.num_draft, self.probs = token_ids, num_draft, probs
        self._on_host: Int64Array | None = token_ids if isinstance(token_ids, np.ndarray) else None

    @property
    def width(self) -> int:
        """K."""
        return int(self._token_ids.shape[1])

    @property
    def token_ids(self) -> Int64Array:
        """int64 [B, K] on the host. Waits for the device where they were made, unless the host has read them."""
        if self._on_host is None:
            assert isinstance(self._token_ids, Tensor)
            self._on_host = self._token_ids.cpu().numpy()
        return self._on_host

    @property
    def unread(self) -> Tensor | None:
        """[B, K] on their device, where the host has not read them yet."""
        return self._token_ids if self._on_host is None and isinstance(self._token_ids, Tensor) else None

    def have_read(self, token_ids: Int64Array) -> None:
        """Somebody has read them along with something else."""
        self._on_host = token_ids

    def on(self, device: torch.device) -> Tensor:
        """int64 [B, K] on `device`."""
        held = self._token_ids
        return (torch.from_numpy(held) if isinstance(held, np.ndarray) else held).to(device, non_blocking=True)

    def cut(self, width: int) -> Drafts:
        """The first `width` drafts of each row."""
        token_ids = self._token_ids[:, :width]
        probs = None if self.probs is None or width == 0 else self.probs[:, :width].contiguous()
        if isinstance(token_ids, np.ndarray):
            return Drafts(np.ascontiguousarray(token_ids), self.num_draft, probs)
        return Drafts(token_ids.contiguous(), self.num_draft, probs)

    def rows(self, stop: int) -> Drafts:
        """Those of the first `stop` batch rows."""
        return Drafts(self._token_ids[:stop], self.num_draft[:stop], None if self.probs is None else self.probs[:stop])

    def with_probs(self, probs: Tensor | None) -> Drafts:
        """The same drafts, said to be drawn from another law."""
        return Drafts(self._token_ids, self.num_draft, probs)

    @classmethod
    def none(cls, batch: int) -> Drafts:
        """No draft for any row."""
        return cls(np.empty((batch, 0), np.int64), np.zeros(batch, np.int32), None)


class Scored(NamedTuple):
    """Logits of the ragged forward: 1 + num_draft rows per batch row, in batch order."""

    logits: Tensor
    """[num_rows, vocab_size], the model's dtype or float32."""
    batch_rows: Int64Array
    """[num_rows], non-decreasing: the batch row of each logits row."""
    slots: Int64Array
    """[num_rows], the place in the draft block: 0..num_draft."""


class ProposeStage(Protocol):
    def __call__(self, step: StepInput) -> Drafts:
        """Offer drafts within step.limits. May depend on committed tokens and DRAFT coins only."""
        ...


class ForwardStage(Protocol):
    def __call__(self, step: StepInput, drafts: Drafts) -> Scored:
        """Feed each row's last committed token and its drafts; extends each KV sequence by 1 + num_draft."""
        ...


class ProcessStage(Protocol):
    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Scored:
        """What the requests ask of the logits: penalties, bias, no stop token yet. A row's history is what was
        committed and the drafts before its slot. Gives new logits where it changes any; `scored` keeps the raw ones."""
        ...


class VerifyStage(Protocol):
    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        """The law of each row: target_probs [B, K+1, vocab_size], a view of the scratch. Stale past num_draft."""
        ...


class AcceptStage(Protocol):
    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        """Decide which drafts stand and draw one token more."""
        ...


class ReportStage(Protocol):
    def __call__(
        self, step: StepInput, drafts: Drafts, scored: Scored, target_probs: Tensor, accepted: SpecAccept
    ) -> Float32Array | None:
        """Log-probabilities [B, K+1] of the step's output tokens, as each request asks; anything past them or where a
        row does not ask. None where no row does. `scored` holds the raw logits."""
        ...


class CommitStage(Protocol):
    def __call__(self, step: StepInput, drafts: Drafts, accepted: SpecAccept, logprobs: Float32Array | None) -> int:
        """Write the step's tokens to the table, up to the first that stops a text, and cut each KV sequence back to
        them. Returns their number."""
        ...


class FusedStage(Protocol):
    """Verify and accept in one, without the laws in memory: the same tokens from the same coins."""

    def stands_for(self, stages: Stages, step: StepInput) -> bool:
        """Whether these stages, in this step, are the ones that it does in one."""
        ...

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> SpecAccept: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """One decoder step. `dataclasses.replace` swaps a stage."""

    propose: ProposeStage
    forward: ForwardStage
    process: ProcessStage
    verify: VerifyStage
    accept: AcceptStage
    report: ReportStage
    commit: CommitStage
    fused: FusedStage | None = None
    """Takes the place of verify and accept where neither is wrapped and nobody asks for what verify writes."""

    def run(self, step: StepInput) -> int:
        """One step of the batch. Returns the number of tokens that it committed."""
        drafts = self.propose(step)
        scored = self.forward(step, drafts)
        processed = self.process(step, drafts, scored)
        if self.fused is not None and self.fused.stands_for(self, step):
            return self.commit(step, drafts, self.fused(step, drafts, processed), None)
        target_probs = self.verify(step, drafts, processed)
        accepted = self.accept(step, drafts, target_probs)
        return self.commit(step, drafts, accepted, self.report(step, drafts, scored, target_probs, accepted))
