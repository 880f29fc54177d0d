"""What a budget plays, and why so much of it.

The sizes follow from one computation. A test is judged at 1e-6 over about 200 tests, so a p-value must fall below
5e-9, which the bound of Freedman reaches at 6.3 standard deviations; to get there with 90 % power the mean must be 7.6
of them away. A decision that is accepted with probability a has variance a (1 - a), so a bias b of all decisions needs
n = (7.6 / b)^2 a (1 - a) of them: 1.6 million where a = .5 and b = .003, but 220,000 where a is near .965, as in the
cases `close`, where moreover nearly every draft of a row is reached. These play 65,000 rows of 7 drafts, dense and
one-hot each, which is 1.5 times as many. `SamplerReport.smallest_bias` computes it from the decisions that were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from equivtest.battery.laws import Case, Kind
from equivtest.errors import InvalidSetting, UnknownName

BudgetName = Literal["smoke", "gate", "audit"]
DEFAULT_VOCABS = (2, 128, 4096)
LARGEST_VOCAB = 1 << 20
_SMALL = 16
"""Vocabulary of the cases that need many rows: what a large one costs buys nothing there."""
_ADVERSARIAL: tuple[tuple[Kind, bool], ...] = (
    *(("peaked", one_hot) for one_hot in (False, True)),
    *(("filtered", one_hot) for one_hot in (False, True)),
    ("flat", False),
    ("disjoint", False),
    ("disjoint", True),
    ("ties", False),
    ("tiny", False),
    ("equal", False),
    ("certain", False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How often the cases are played."""

    close: int
    """Rounds of 1,024 rows of the cases that a small bias is found on."""
    random: int
    """Rounds of 1,024 rows."""
    adversarial: int
    """Rounds of 1,024 rows."""
    single: int
    """Rounds of one row."""
    entries: int
    """Probabilities that a case of a given vocabulary hands over, about."""


BUDGETS: Mapping[BudgetName, Budget] = {
    "smoke": Budget(close=6, random=8, adversarial=2, single=128, entries=1 << 21),
    "gate": Budget(close=64, random=48, adversarial=8, single=512, entries=1 << 23),
    "audit": Budget(close=640, random=480, adversarial=64, single=4096, entries=1 << 26),
}


def cases(budget: str, vocab_sizes: Sequence[int]) -> Iterator[Case]:
    """The cases of a budget. Raises UnknownName, InvalidSetting."""
    if budget not in BUDGETS:
        raise UnknownName("budget", budget, BUDGETS)
    for vocab_size in vocab_sizes:
        if not 2 <= vocab_size <= LARGEST_VOCAB:
            raise InvalidSetting("vocab", vocab_size, f"must be between 2 and {LARGEST_VOCAB}")
    size: Budget = BUDGETS[budget]  # type: ignore[index]
    for one_hot in (False, True):
        yield Case(kind="close", vocab_size=_SMALL, num_draft=7, batch=1024, rounds=size.close, one_hot=one_hot)
        yield Case(kind="random", vocab_size=_SMALL, num_draft=3, batch=1024, rounds=size.random, one_hot=one_hot)
        yield Case(
            kind="random", vocab_size=_SMALL, num_draft=4, batch=1000, rounds=size.adversarial, one_hot=one_hot,
            ragged=True,
        )  # fmt: skip
    for kind, one_hot in _ADVERSARIAL:
        yield Case(kind=kind, vocab_size=_SMALL, num_draft=3, batch=1024, rounds=size.adversarial, one_hot=one_hot)
    for num_draft in (1, 3):
        yield Case(kind="half", vocab_size=_SMALL, num_draft=num_draft, batch=1, rounds=size.single)
    for vocab_size in vocab_sizes:
        for kind, one_hot in (("random", False), ("filtered", True)):
            yield _of_vocab(kind, vocab_size, size.entries, one_hot=one_hot)


def _of_vocab(kind: Kind, vocab_size: int, entries: int, *, one_hot: bool) -> Case:
    """Two drafts a row; few different rows of a large vocabulary, played often."""
    batch = min(64, max(4, (1 << 17) // vocab_size))
    rows = min(1 << 13, max(256, entries // (3 * vocab_size)))
    return Case(
        kind=kind, vocab_size=vocab_size, num_draft=2, batch=batch, rounds=max(4, rows // batch), one_hot=one_hot
    )
