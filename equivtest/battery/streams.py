"""Seeds, batch order and edge coins: what can be checked token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from equivtest.battery.adapters import Adapter
from equivtest.battery.contract import Breach
from equivtest.battery.evidence import streams_apart
from equivtest.battery.judge import judge
from equivtest.battery.laws import Case, Ints, Kind, Laws, draw_drafts, make_laws, random_orders
from equivtest.battery.play import Played, play, row_seeds
from equivtest.records import Evidence

_ROUNDS = 8
_BATCH = 64
_EDGE_KINDS: tuple[Kind, ...] = ("filtered", "disjoint", "equal", "ties", "certain")


class StreamChecks(NamedTuple):
    """What came of them."""

    breaches: list[Breach]
    evidence: list[Evidence]
    notes: list[str]
    """What the sampler does not claim, and was not checked."""


class _Batch(NamedTuple):
    case: Case
    laws: Laws
    drafts: Ints

    def rows(self, chosen: Ints) -> _Batch:
        case = Case(
            kind=self.case.kind, vocab_size=self.case.vocab_size, num_draft=self.case.num_draft, batch=len(chosen),
            rounds=self.case.rounds, one_hot=self.case.one_hot, ragged=self.case.ragged,
        )  # fmt: skip
        laws = Laws(*(column[chosen] for column in self.laws))  # type: ignore[arg-type]
        return _Batch(case, laws, self.drafts[:, chosen])


def check_streams(adapter: Adapter, *, seed: int, device: torch.device) -> StreamChecks:
    """Play one small case again: with the same seeds, with others, in another order and in part."""
    rng = np.random.default_rng([seed, 1])
    case = Case(kind="random", vocab_size=64, num_draft=3, batch=_BATCH, rounds=_ROUNDS, ragged=adapter.ragged)
    laws = make_laws(case, rng)
    batch = _Batch(case, laws, draw_drafts(laws, case.rounds, rng))
    seeds = row_seeds(seed, case)
    others = row_seeds(seed + 1, case)

    def tokens(part: _Batch, stream: Ints, orders: Ints | None = None) -> Played:
        return play(adapter, part.case, part.laws, part.drafts, seeds=stream, device=device, orders=orders)

    breaches: list[Breach] = []
    notes: list[str] = []
    first, other = tokens(batch, seeds), tokens(batch, others)
    if adapter.replays:
        breaches += _differ(
            first, tokens(batch, seeds), "replay", "put out other tokens when the same seed comes again"
        )
    else:
        notes.append("replay of a seed: not claimed, not checked")
    if (first.tokens == other.tokens).all():
        breaches.append(
            _breach("seed_ignored", "put out the same tokens whatever the seed is", first, first.tokens.size)
        )
    if adapter.per_request:
        breaches += _batch_order(batch, seeds, others, first, tokens, rng)
    else:
        notes.append("a request's seed holds in any batch: not claimed, not checked")
    shuffled = tokens(batch, others, random_orders(case, rng))
    apart = streams_apart(*(judge(played, rng) for played in (first, shuffled)))
    return StreamChecks(breaches, apart, notes)


def _batch_order(
    batch: _Batch,
    seeds: Ints,
    others: Ints,
    first: Played,
    tokens: Callable[[_Batch, Ints], Played],
    rng: np.random.Generator,
) -> Iterator[Breach]:
    order = rng.permutation(_BATCH)
    yield from _differ(
        _take(first, order), tokens(batch.rows(order), seeds[order]), "batch_order",
        "put out other tokens in another order of the batch: a row's coins depend on its place",
    )  # fmt: skip
    for chosen, words in ((np.array([_BATCH // 2]), "alone"), (np.arange(_BATCH // 2, _BATCH), "in a smaller batch")):
        yield from _differ(
            _take(first, chosen), tokens(batch.rows(chosen), seeds[chosen]), f"batch_{len(chosen)}",
            f"put out other tokens {words}: a row's coins depend on its batch-mates",
        )  # fmt: skip
    mixed = np.where(np.arange(_BATCH) == 0, seeds, others)
    changed = tokens(batch, mixed)
    if (changed.tokens[:, 1:] == first.tokens[:, 1:]).all():
        yield _breach("seeds_past_row_0", "ignore the seeds of all rows but the first", first, first.tokens.size)


def check_edges(adapter: Adapter, device: torch.device, rng: np.random.Generator) -> list[Breach]:
    """The smallest and the largest coin there is, on laws with zeros and ties, where uniforms are handed over."""
    if adapter.coins != "uniforms":
        return []
    breaches: list[Breach] = []
    for kind in _EDGE_KINDS:
        case = Case(kind=kind, vocab_size=16, num_draft=3, batch=_BATCH, rounds=2)
        laws = make_laws(case, rng)
        drafts = draw_drafts(laws, case.rounds, rng)
        for coin in (0.0, 1 - 2**-24):
            played = play(adapter, case, laws, drafts, seeds=row_seeds(0, case), device=device, coin=coin)
            breaches += (
                dataclasses.replace(b, what=f"{b.what}, at coins {coin:.8g}") for b in judge(played, rng).breaches
            )
    return breaches


def _take(played: Played, chosen: Ints) -> Played:
    return played._replace(tokens=played.tokens[:, chosen])


def _differ(expected: Played, found: Played, name: str, what: str) -> Iterator[Breach]:
    wrong = (expected.tokens != found.tokens).any(axis=2)
    if wrong.any():
        yield _breach(name, what, found, int(wrong.sum()), wrong.size)


def _breach(name: str, what: str, played: Played, count: int, of: int | None = None) -> Breach:
    return Breach(name, "seeds", what, count, count if of is None else of, played.case.name)
