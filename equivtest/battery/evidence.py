"""Every test of the battery, on what was judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from equivtest.battery.judge import Bools, Judged
from equivtest.battery.laws import Floats, Ints
from equivtest.records import Evidence
from equivtest.stats.sampler import acceptance, draws, shared

ALL = "all laws"
_UNIFORM_VARIANCE = 1 / 12


def evidence(judged: Sequence[Judged]) -> list[Evidence]:
    """Tests of acceptance, of draws and of coins; p-values are raw. What has nothing to look at is left out."""
    found = (*_acceptance(judged), *_draws(judged), *_outputs(judged), *_coins(judged))
    return [item for item in found if item is not None]


def _acceptance(judged: Sequence[Judged]) -> Iterator[Evidence | None]:
    def test(chosen: Sequence[Judged], name: str, stratum: str, slot: int | None = None) -> Evidence | None:
        part = slice(None) if slot is None else slice(slot, slot + 1)
        reached = [j.reached[..., part] for j in chosen]
        return acceptance(
            _joined(j.accepted[..., part][r] for j, r in zip(chosen, reached, strict=True)),
            _joined(j.accept_prob[..., part][r] for j, r in zip(chosen, reached, strict=True)),
            name=name,
            stratum=stratum,
        )

    yield test(judged, "acceptance", ALL)
    for one_hot, words in ((False, "dense drafts"), (True, "one-hot drafts")):
        yield test([j for j in judged if j.case.one_hot == one_hot], "acceptance", words)
    for slot in range(max(j.case.num_draft for j in judged)):
        yield test(judged, f"acceptance_slot_{slot}", ALL, slot)
    for each in judged:
        yield test([each], "acceptance", each.case.name)


_ROWS: Mapping[str, Callable[[Judged], Bools]] = {
    "recovered": lambda j: j.recovered,
    "bonus": lambda j: j.bonus,
    "plain": lambda j: j.plain,
}


def _draws(judged: Sequence[Judged]) -> Iterator[Evidence | None]:
    strata = [
        ("dense drafts", [j for j in judged if not j.case.one_hot]),
        ("one-hot drafts", [j for j in judged if j.case.one_hot]),
        *((j.case.name, [j]) for j in judged),
    ]
    for kind, rows in _ROWS.items():
        for stratum, chosen in strata:
            by_order = {
                "vocab": [j.last_vocab[rows(j)] for j in chosen],
                "rank": [j.last_rank[rows(j)] for j in chosen],
            }
            for order, values in by_order.items():
                yield draws(_joined(values), name=f"{kind}_{order}", stratum=stratum)


def _outputs(judged: Sequence[Judged]) -> Iterator[Evidence | None]:
    """The law of what is put out, which is p at every slot: of drafts from q, and of any sure drafts."""
    exact = [j for j in judged if j.case.drafts_are_from_q]
    for slot in range(max(j.case.num_draft for j in judged)):
        chosen = [j for j in exact if j.case.num_draft > slot]
        by_order = {
            "vocab": [j.output_vocab[..., slot][j.reached[..., slot]] for j in chosen],
            "rank": [j.output_rank[..., slot][j.reached[..., slot]] for j in chosen],
        }
        for order, values in by_order.items():
            yield draws(_joined(values), name=f"output_{order}_slot_{slot}", stratum=ALL)


class Feature(NamedTuple):
    """A number a row, of mean 0 given all that was drawn before: arrays [T, B]."""

    values: Floats
    variance: Floats
    there: Bools

    def by_row(self, orders: Ints) -> Feature:
        """From a row a law to the rows of the batch: orders [T, B]."""
        return Feature(
            np.take_along_axis(self.values, orders, 1),
            np.take_along_axis(self.variance, orders, 1),
            np.take_along_axis(self.there, orders, 1),
        )

    def at(self, where: tuple[slice, slice]) -> Feature:
        return Feature(self.values[where], self.variance[where], self.there[where])


def _accept(slot: int) -> Callable[[Judged], Feature]:
    def feature(j: Judged) -> Feature:
        if j.case.num_draft <= slot:
            nothing = np.zeros(j.ok.shape)
            return Feature(nothing, nothing, np.zeros(j.ok.shape, np.bool_))
        a = j.accept_prob[..., slot]
        return Feature(j.accepted[..., slot] - a, a * (1 - a), j.reached[..., slot])

    return feature


def _last(kind: str, order: str = "vocab") -> Callable[[Judged], Feature]:
    def feature(j: Judged) -> Feature:
        values = j.last_vocab if order == "vocab" else j.last_rank
        there = j.ok if kind == "any" else _ROWS[kind](j)
        return Feature(values - 0.5, np.full(values.shape, _UNIFORM_VARIANCE), there)

    return feature


class Pair(NamedTuple):
    """Two draws that must know nothing of each other."""

    name: str
    first: Callable[[Judged], Feature]
    second: Callable[[Judged], Feature]
    rounds: int
    """How many rounds after the first the second comes."""
    rows: int
    """In how many rows further."""


_DRAWS: Mapping[str, Callable[[Judged], Feature]] = {
    "accept0": _accept(0),
    "accept1": _accept(1),
    "recovered": _last("recovered"),
    "bonus": _last("bonus"),
    "last": _last("any"),
    "rank": _last("any", "rank"),
}
_NEXT_ROUND = (
    ("accept0", "accept0"), ("accept1", "accept0"), ("accept0", "accept1"), ("recovered", "accept0"),
    ("bonus", "accept0"), ("accept0", "last"), ("last", "last"), ("rank", "rank"),
)  # fmt: skip
_NEXT_ROW = (("accept0", "accept0"), ("last", "last"), ("rank", "rank"), ("last", "accept0"), ("accept0", "last"))
PAIRS = (
    *(
        Pair(f"coin_round_{first}_{second}_row{shift:+d}", _DRAWS[first], _DRAWS[second], 1, shift)
        for first, second in _NEXT_ROUND
        for shift in (-1, 0, 1)
    ),
    *(
        Pair(f"coin_row_{first}_{second}_row{shift:+d}", _DRAWS[first], _DRAWS[second], 0, shift)
        for first, second in _NEXT_ROW
        for shift in (1, 2)
    ),
)


def _coins(judged: Sequence[Judged]) -> Iterator[Evidence | None]:
    batches = {
        "batches": [j for j in judged if j.case.batch > 1],
        "single rows": [j for j in judged if j.case.batch == 1],
    }
    for stratum, chosen in batches.items():
        for pair in PAIRS:
            if pair.rows == 0 or stratum == "batches":
                yield _shared(pair.name, stratum, [_shifted(pair, j) for j in chosen])
    yield _shared("coin_slots", ALL, [slots for j in judged for slots in _slots(j)])
    for kind in ("recovered", "bonus"):
        yield _shared(f"coin_accept_{kind}", ALL, [_last_decision(kind, j) for j in judged])


Terms = tuple[Floats, Floats, Floats]
"""first, second and the variance of second, each [n]."""


def _shared(name: str, stratum: str, terms: Sequence[Terms]) -> Evidence | None:
    if not terms:
        return None
    first, second, variance = (_joined(term[i] for term in terms) for i in range(3))
    return shared(first, second, variance, name=name, stratum=stratum)


def _shifted(pair: Pair, j: Judged) -> Terms:
    rounds, rows, (num_rounds, batch) = pair.rounds, pair.rows, j.ok.shape
    before = (slice(0, num_rounds - rounds), slice(max(0, -rows), batch - max(0, rows)))
    after = (slice(rounds, num_rounds), slice(max(0, rows), batch - max(0, -rows)))
    return _both(pair.first(j).by_row(j.orders).at(before), pair.second(j).by_row(j.orders).at(after))


def _both(first: Feature, second: Feature) -> Terms:
    """Where both are there, less the mean of the first.

    A sampler that draws from a wrong law has other means than 0. A row plays another law in every round, so what is
    left of them without their overall mean has no product, and a wrong law does not look like a shared coin. That the
    mean is not known beforehand matters to one part in the root of n.
    """
    there = first.there & second.there
    values = first.values[there]
    return values - (values.mean() if len(values) else 0.0), second.values[there], second.variance[there]


def _slots(j: Judged) -> Iterator[Terms]:
    """One coin for the slots of a row: given that the first i were accepted, the coin is below their smallest a."""
    smallest = np.minimum.accumulate(j.accept_prob, axis=2)
    for slot in range(1, j.case.num_draft):
        there, a = j.reached[..., slot], j.accept_prob[..., slot]
        with_one_coin = np.minimum(1.0, a / np.maximum(smallest[..., slot - 1], 1e-300))
        yield (with_one_coin - a)[there], (j.accepted[..., slot] - a)[there], (a * (1 - a))[there]


def _last_decision(kind: str, j: Judged) -> Terms:
    """The coin of the last decision for the last draw: a rejection's is above a, an acceptance's below.

    The draw's mean would be (1 + a) / 2 and a / 2: first is its distance from 1/2, twice.
    """
    there = _ROWS[kind](j)
    slot = np.clip(j.slot - (kind == "bonus"), 0, j.case.num_draft - 1)
    a = np.take_along_axis(j.accept_prob, slot[..., None], 2)[..., 0]
    return (a - (kind == "bonus"))[there], (j.last_vocab - 0.5)[there], np.full(int(there.sum()), _UNIFORM_VARIANCE)


def streams_apart(one: Judged, other: Judged) -> list[Evidence]:
    """Two plays of a case with other seeds and other orders must know nothing of each other, row by row."""
    found = []
    for name in ("accept0", "last", "rank"):
        terms = _both(_DRAWS[name](one).by_row(one.orders), _DRAWS[name](other).by_row(other.orders))
        found.append(_shared(f"coin_streams_{name}", one.case.name, [terms]))
    return [item for item in found if item is not None]


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _joined(parts: Iterable[npt.NDArray[_Scalar]]) -> npt.NDArray[_Scalar]:
    arrays = list(parts)
    return np.concatenate(arrays) if arrays else np.zeros(0)  # type: ignore[return-value]
