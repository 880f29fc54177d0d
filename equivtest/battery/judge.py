"""From tokens to decisions and draws, against the laws that were handed over."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from equivtest.battery.contract import Breach, Rows, impossible, inputs, read_rows
from equivtest.battery.laws import Case, Floats, Ints, Laws
from equivtest.battery.play import Played
from equivtest.stats.law_table import LawTable, Spread

Bools = npt.NDArray[np.bool_]


class Judged(NamedTuple):
    """A case, decision by decision: T rounds, B rows, K drafts."""

    case: Case
    laws: Laws
    drafts: Ints  # [T, B, K]
    orders: Ints  # [T, B], the law of each row of the batch; all other columns have a row a law
    ok: Bools  # [T, B], rows that can be read
    slot: Ints  # [T, B], where the row ends
    last: Ints  # [T, B], the token it ends with
    accept_prob: Floats  # [T, B, K], min(1, p/q)
    reached: Bools  # [T, B, K], drafts that were judged
    accepted: Bools  # [T, B, K]
    spread: Spread  # [T, B] each, where the last token lies in its law
    last_vocab: Floats  # [T, B], transform of the last token under its law, in vocabulary order
    last_rank: Floats  # [T, B], in rank order
    output_vocab: Floats  # [T, B, K], transform of the token put out at a reached slot, under p
    output_rank: Floats  # [T, B, K]
    breaches: tuple[Breach, ...]

    @property
    def recovered(self) -> Bools:
        recovered: Bools = self.ok & (self.slot < self.laws.num_draft)
        return recovered

    @property
    def bonus(self) -> Bools:
        bonus: Bools = self.ok & (self.slot == self.laws.num_draft) & (self.laws.num_draft > 0)
        return bonus

    @property
    def plain(self) -> Bools:
        plain: Bools = self.ok & (self.laws.num_draft == 0)
        return plain

    def neighbour(self, rows: int) -> Ints:
        """[T, B] of each law, the one that the row of the batch so many further played in the same round."""
        places = (np.argsort(self.orders, axis=1) + rows) % self.case.batch
        return np.take_along_axis(self.orders, places, 1)


def judge(played: Played, rng: np.random.Generator) -> Judged:
    """rng spreads every token's own mass in its transforms."""
    case, laws, drafts = played.case, played.laws, played.drafts
    rows, breaches = read_rows(played)
    places = np.arange(case.num_draft)
    reached = rows.ok[..., None] & (places <= rows.slot[..., None]) & (places < laws.num_draft[:, None])
    accepted = reached & (places < rows.slot[..., None])
    accept_prob = acceptance_probs(case, laws.target[:, :-1], laws.draft, drafts)
    last = np.take_along_axis(played.tokens, rows.slot[..., None], 2)[..., 0].clip(0, case.vocab_size - 1)
    targets = LawTable.of(laws.target.reshape(-1, case.vocab_size))
    spread = _last_spread(case, laws, drafts, rows, last, targets)
    last_vocab, last_rank = spread.transforms(rng.random((2, *last.shape)))
    output = np.where(reached, played.tokens[:, :, :-1], 0)
    law = np.arange(case.batch)[:, None] * (case.num_draft + 1) + places
    shown = np.broadcast_to(law, output.shape)
    vocab, rank = targets.spread(shown, output).transforms(rng.random((2, *output.shape)))
    return Judged(
        case, laws, drafts, played.orders, rows.ok, rows.slot, last, accept_prob, reached, accepted, spread,
        last_vocab, last_rank, vocab, rank,
        (*breaches, *impossible(played, rows, accept_prob, reached, accepted), *inputs(played)),
    )  # fmt: skip


def at_drafts(probs: npt.NDArray[np.floating], drafts: Ints) -> Floats:
    """Entries of probs [B, K, vocab_size] at drafts [T, B, K], float64 [T, B, K]."""
    return np.take_along_axis(probs[None], drafts[..., None], 3)[..., 0].astype(np.float64)


def acceptance_probs(
    case: Case, target: npt.NDArray[np.floating], draft: npt.NDArray[np.floating], drafts: Ints
) -> Floats:
    """min(1, p/q) at drafts [T, B, K]; q is 1 for one-hot drafts; 0 where p is."""
    p = at_drafts(target, drafts)
    q = np.ones_like(p) if case.one_hot else at_drafts(draft, drafts)
    return np.where(p >= q, 1.0, p / np.where(q > 0, q, 1.0)) * (p > 0)


def residuals(laws: Laws) -> Floats:
    """max(p - q, 0), [B, K, vocab_size], p itself where nothing is left."""
    target = laws.target[:, :-1].astype(np.float64)
    left = np.maximum(target - laws.draft, 0.0)
    return np.where(left.sum(axis=2, keepdims=True) > 0, left, target)


def _last_spread(case: Case, laws: Laws, drafts: Ints, rows: Rows, last: Ints, targets: LawTable) -> Spread:
    """Where the last tokens lie in their laws, [T, B] each; all of [0, 1] in rows that cannot be read."""
    columns = np.zeros((4, *last.shape))
    columns[1::2] = 1.0
    row = np.broadcast_to(np.arange(case.batch), last.shape)
    recovered = rows.ok & (rows.slot < laws.num_draft)
    whole = rows.ok & ~recovered
    law = row * (case.num_draft + 1) + rows.slot
    columns[:, whole] = targets.spread(law[whole], last[whole])
    if case.one_hot:
        draft = np.take_along_axis(drafts, np.minimum(rows.slot, case.num_draft - 1)[..., None], 2)[..., 0]
        # A sure draft leaves nothing to recover, and a row that recovers all the same has been counted.
        possible = recovered & (targets.probs[law, draft] < 1)
        columns[:, possible] = targets.spread(law[possible], last[possible], draft[possible])
    elif recovered.any():
        left = LawTable.of(residuals(laws).reshape(-1, case.vocab_size))
        columns[:, recovered] = left.spread((row * case.num_draft + rows.slot)[recovered], last[recovered])
    return Spread(*columns)
