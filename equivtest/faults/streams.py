"""Faults of the random streams. The coins are drawn in the accept stage, so that is what each of them wraps."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.stages import AcceptStage, Drafts, Int64Array, Stages, StepInput
from equivtest.faults.base import Family, Fault, Setting
from equivtest.faults.wrappers import (
    SAMPLED_DRAFTER,
    JudgedDrafts,
    Offered,
    coins,
    drafted,
    on_device,
    recounted,
    recovered_rows,
    redraw,
    require_chain,
    require_sampled_drafter,
    residual,
    verdict,
)
from equivtest.kernels.contract import SpecAccept, Streams
from equivtest.rng import Purpose, stream_key

OTHER_RANK = 0x5DEECE66D
"""Added to a stream key, it gives the stream of another rank."""


class ReusedCoin:
    """After a recovered token, judges the next round's first draft with the coin that drew that token.

    The draft d is kept when u q(d) < p(d), as it should be, but u is the RECOVER coin of the position before in place
    of the ACCEPT coin of its own. Over u, drafts are kept as often as they should be and a rejection is drawn from the
    right residual; only, what follows a recovered token depends on where in the vocabulary that token lies. It is what
    a generator whose state is left to advance too little between two calls does.
    """

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = JudgedDrafts(inner, self._judge)
        self._recovered: npt.NDArray[np.bool_] = np.zeros(0, bool)
        """[num_requests], whether the newest token of each request of the call was recovered."""

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        if step.index == 0:
            self._recovered = np.zeros(len(step.table), bool)
        accepted = self.inner(step, drafts, target_probs)
        self._recovered[step.requests] = accepted.emitted.cpu().numpy() < drafts.num_draft
        return accepted

    def _judge(self, step: StepInput, offered: Offered, target_probs: Tensor) -> Tensor:
        after = torch.from_numpy(self._recovered[step.requests]).to(target_probs.device)
        wrong = after[offered.rows] & (offered.slots == 0)
        return _judged(step, offered, target_probs, wrong, offered.slots - 1, Purpose.RECOVER)


class OneCoinARound(JudgedDrafts):
    """Judges every draft of a round with the coin of its first."""

    def __init__(self, inner: AcceptStage) -> None:
        super().__init__(inner, self._judge)

    @staticmethod
    def _judge(step: StepInput, offered: Offered, target_probs: Tensor) -> Tensor:
        first = torch.zeros_like(offered.slots)
        return _judged(step, offered, target_probs, offered.slots > 0, first, Purpose.ACCEPT)


def _judged(
    step: StepInput, offered: Offered, target_probs: Tensor, wrong: Tensor, slots: Tensor, purpose: Purpose
) -> Tensor:
    """The target's probability of each draft, or, where `wrong` (bool [n]), a verdict by the coin of other `slots`."""
    u = torch.zeros_like(offered.p, dtype=torch.float64)
    u[wrong] = coins(step, offered.rows[wrong], slots[wrong], purpose)
    # Where nothing but the draft has mass there is nothing to recover, whatever rounding makes of p < 1.
    sure = (target_probs[offered.rows, offered.slots] > 0).sum(dim=1) <= 1
    kept = (u * offered.q.double() < offered.p.double()) | (sure & (offered.p > 0))
    return torch.where(wrong, verdict(kept).to(offered.p.dtype), offered.p)


class SharedNoise:
    """Draws the recovered token with the coin that drew the rejected draft."""

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        accepted = self.inner(step, drafts, target_probs)
        rows, slots = recovered_rows(drafts, accepted)
        if len(rows):
            weights = residual(drafts, target_probs, rows, slots)
            redraw(accepted, rows, slots, weights, coins(step, rows, slots, Purpose.DRAFT))
        return accepted


class RankStreams:
    """Keeps as many drafts as another rank's coins say, and puts out this rank's token after them."""

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        other = step.streams._replace(keys=step.streams.keys + OTHER_RANK)
        # Copied, for it is a view of the scratch that the second call writes.
        counts = self.inner(dataclasses.replace(step, streams=other), drafts, target_probs).emitted.clone()
        return recounted(self.inner(step, drafts, target_probs), drafts, counts)


class _OtherStreams(ABC):
    """Hands the accept stage other streams than the rows' own."""

    def __init__(self, inner: AcceptStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        rows = drafted(drafts)
        keys, positions = _streams_of(step, np.arange(step.batch))
        keys, positions = self.changed(step, rows, keys, positions)
        streams = Streams(*(on_device(column, target_probs) for column in (keys, positions)))
        return self.inner(dataclasses.replace(step, streams=streams), drafts, target_probs)

    @abstractmethod
    def changed(
        self, step: StepInput, rows: Int64Array, keys: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Keys and positions [B], which may be changed in place; `rows` are those with drafts."""


class NoiseNotUpdated(_OtherStreams):
    """Odd batch rows draw with the coins of their round before: a row that stays there never gets new ones."""

    def __init__(self, inner: AcceptStage) -> None:
        super().__init__(inner)
        self._used: Int64Array = np.zeros(0, np.int64)
        """[num_requests], the position whose coins each request's last round began with; -1 before the first."""

    def changed(
        self, step: StepInput, rows: Int64Array, keys: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        if step.index == 0:
            self._used = np.full(len(step.table), -1)
        requests = step.requests[rows]
        stale = (rows % 2 == 1) & (self._used[requests] >= 0)
        positions[rows] = np.where(stale, self._used[requests], positions[rows])
        self._used[requests] = positions[rows]
        return keys, positions


class SeedIgnored(_OtherStreams):
    """Every round of every row takes the next key of one generator for the whole call.

    The generator starts from all the keys of the call together, so that calls differ and a call can be made again.
    """

    def changed(
        self, step: StepInput, rows: Int64Array, keys: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        call = int(step.table.stream_keys.sum())  # wraps around
        keys[rows] = [stream_key("call", call, step.index, row) for row in rows.tolist()]
        return keys, positions


class BroadcastSeed(_OtherStreams):
    """Every row with drafts draws with the key of the first of them."""

    def changed(
        self, step: StepInput, rows: Int64Array, keys: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        keys[rows] = keys[rows[:1]]
        return keys, positions


class BatchAdvancesStream(_OtherStreams):
    """A speculative row without a draft, in a step where others have one, draws one coin further from then on."""

    def __init__(self, inner: AcceptStage) -> None:
        super().__init__(inner)
        self._extra: Int64Array = np.zeros(0, np.int64)
        """[num_requests], coins that each request's stream has lost."""

    def changed(
        self, step: StepInput, rows: Int64Array, keys: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        if step.index == 0:
            self._extra = np.zeros(len(step.table), np.int64)
        if len(rows):
            plain = np.setdiff1d(np.arange(step.batch), rows)
            self._extra[step.requests[plain]] += step.table.speculative[step.requests[plain]]
        return keys, positions + self._extra[step.requests]


def _streams_of(step: StepInput, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Keys and positions of batch `rows` on the host: copies."""
    keys, positions = (column.cpu().numpy()[rows] for column in step.streams)
    return keys, positions


def _fault(
    wrapper: Callable[[AcceptStage], AcceptStage],
    *requirements: Callable[[Stages, str], object],
    name: str,
    ids: tuple[int, ...],
    reports: tuple[str, ...],
    description: str,
    expected: frozenset[Family],
    setting: Setting | None = None,
    changes_law: bool = True,
    subtle: bool = False,
) -> Fault:
    def wrap(stages: Stages) -> Stages:
        for require in requirements:
            require(stages, name)
        return dataclasses.replace(stages, accept=wrapper(stages.accept))

    return Fault(
        name=name,
        stage="streams",
        kind="streams",
        ids=ids,
        reports=reports,
        description=description,
        wrap=wrap,
        setting=setting or Setting(),
        expected=expected,
        changes_law=changes_law,
        subtle=subtle,
    )


def reused_coin() -> Fault:
    """Calling it raises InvalidSetting for the match rule, in which no token is recovered by a coin of its own."""
    return _fault(
        ReusedCoin,
        require_chain,
        name="reused_coin",
        ids=(56,),
        reports=("flashinfer before 0.7.4",),
        description="the coin that draws a recovered token also judges the first draft of the next round",
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW}),
    )


def shared_noise() -> Fault:
    """Calling it raises InvalidSetting for the match rule, and for a drafter that draws no coins."""
    return _fault(
        SharedNoise,
        require_chain,
        require_sampled_drafter,
        name="shared_noise",
        ids=(27,),
        reports=("vllm#47386", "vllm#54282"),
        description="the coin that drew a draft also draws the token that replaces it",
        setting=Setting(drafter=SAMPLED_DRAFTER),
        expected=frozenset({Family.LAW}),
        subtle=True,
    )


def one_coin_a_round() -> Fault:
    """Calling it raises InvalidSetting for the match rule, which has no acceptance coins."""
    return _fault(
        OneCoinARound,
        require_chain,
        name="one_coin_a_round",
        ids=(28,),
        reports=("flashinfer#424",),
        description="one coin judges every draft of a round",
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW}),
    )


def noise_not_updated() -> Fault:
    """It needs a batch of at least two."""
    return _fault(
        NoiseNotUpdated,
        name="noise_not_updated",
        ids=(29,),
        reports=("vllm#9441", "vllm#10863"),
        description="every other row of the batch draws with the coins of its round before",
        expected=frozenset({Family.JOINT, Family.REPLAY}),
    )


def seed_ignored() -> Fault:
    """Every token keeps its law: only the same request gives another text in another batch."""
    return _fault(
        SeedIgnored,
        name="seed_ignored",
        ids=(30,),
        reports=("vllm#6038", "vllm#6034"),
        description="the seed of a request is ignored: all rows draw from one generator of the whole call",
        expected=frozenset({Family.REPLAY}),
        changes_law=False,
    )


def rank_streams() -> Fault:
    return _fault(
        RankStreams,
        name="rank_streams",
        ids=(31,),
        reports=("vllm#17498",),
        description="drafts are counted with the coins of one rank and followed by the token of another",
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT}),
    )


def batch_advances_stream() -> Fault:
    """Every token keeps its law: only the same request gives another text in another batch."""
    return _fault(
        BatchAdvancesStream,
        name="batch_advances_stream",
        ids=(32,),
        reports=("vllm-ascend#13608",),
        description="a row without a draft loses a coin of its stream whenever another row of the batch has one",
        setting=Setting(drafter="ngram"),
        expected=frozenset({Family.REPLAY}),
        changes_law=False,
    )


def broadcast_seed() -> Fault:
    """A token by itself keeps its law; the samples of a batch repeat one another. It needs a batch of two."""
    return _fault(
        BroadcastSeed,
        name="broadcast_seed",
        ids=(33,),
        reports=("vllm#50440",),
        description="one stream serves every row of the batch, so that samples repeat one another",
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.DUPLICATES, Family.REPLAY}),
    )


FAULTS: tuple[Callable[[], Fault], ...] = (
    reused_coin,
    shared_noise,
    one_coin_a_round,
    noise_not_updated,
    seed_ignored,
    rank_streams,
    batch_advances_stream,
    broadcast_seed,
)
