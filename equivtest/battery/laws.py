"""The laws that a sampler is tried on, random and adversarial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Float32s = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Kind = Literal["random", "close", "peaked", "flat", "disjoint", "ties", "tiny", "filtered", "equal", "certain", "half"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One set of laws and how often it is played."""

    kind: Kind
    vocab_size: int
    num_draft: int
    """Drafts of a row: K."""
    batch: int
    rounds: int
    """Consecutive calls on one random stream."""
    one_hot: bool = False
    """Drafts are sure: no draft probabilities are handed over."""
    ragged: bool = False
    """Rows have 0..K drafts."""

    @property
    def name(self) -> str:
        words = [self.kind, *["one-hot drafts"] * self.one_hot, *["ragged"] * self.ragged]
        return ", ".join([*words, f"vocab {self.vocab_size}", f"batch {self.batch}", f"K {self.num_draft}"])

    @property
    def drafts_are_from_q(self) -> bool:
        """And so what is put out follows p; of one-hot drafts it does wherever they come from."""
        return self.one_hot or self.kind != "tiny"

    @property
    def num_rows(self) -> int:
        return self.batch * self.rounds


class Laws(NamedTuple):
    """Of every row of a batch; the same in every round."""

    target: Float32s  # [B, K+1, vocab_size]
    draft: Float32s  # [B, K, vocab_size], q; of one-hot drafts only what they are drawn from
    drafts_from: Float32s  # [B, K, vocab_size], what drafts are drawn from: q, but for laws that q would not visit
    num_draft: npt.NDArray[np.int32]  # [B]


def make_laws(case: Case, rng: np.random.Generator) -> Laws:
    """The laws of a case, normalised in float32."""
    shape = (case.batch, case.num_draft + 1, case.vocab_size)
    target, draft = (_normalised(law) for law in _KINDS[case.kind](rng, shape, case.one_hot))
    draft = draft[:, : case.num_draft]
    drafts_from = np.full_like(draft, 1 / case.vocab_size) if case.kind == "tiny" else draft
    num_draft = np.full(case.batch, case.num_draft, np.int32)
    if case.ragged:
        num_draft = (np.arange(case.batch) % (case.num_draft + 1)).astype(np.int32)
    return Laws(target, draft, drafts_from, num_draft)


def draw_drafts(laws: Laws, rounds: int, rng: np.random.Generator) -> Ints:
    """Fresh drafts for every round: [rounds, B, K]."""
    batch, num_draft, vocab_size = laws.drafts_from.shape
    cumulative = laws.drafts_from.reshape(-1, vocab_size).astype(np.float64).cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    row = np.arange(batch * num_draft)
    coins = rng.random((rounds, batch * num_draft)) + row
    # One search serves all rows: row r has the interval [r, r + 1).
    found = np.searchsorted((cumulative + row[:, None]).ravel(), coins.ravel(), side="right").reshape(coins.shape)
    drafts: Ints = np.clip(found - row * vocab_size, 0, vocab_size - 1).reshape(rounds, batch, num_draft)
    return drafts


def random_orders(case: Case, rng: np.random.Generator) -> Ints:
    """Which law each row of the batch has in each round, [T, B]: its own in the first, at random in the others.

    So what a row draws in one round and the next is from laws that have nothing to do with each other.
    """
    orders = np.broadcast_to(np.arange(case.batch), (case.rounds, case.batch)).copy()
    orders[1:] = rng.permuted(orders[1:], axis=1)
    return orders


Shape = tuple[int, int, int]
Pair = tuple[Floats, Floats]


def _random(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    return _logits(rng, shape, spread=1.5, noise=1.0)


def _close(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    """Nearly every draft is accepted with a probability between .93 and .99, where a bias shows best."""
    target = _softmax(rng.normal(0, 1, shape))
    if one_hot:
        sure = rng.uniform(0.93, 0.99, shape[:2])[..., None]
        mode = rng.integers(shape[2], size=shape[:2])[..., None] == np.arange(shape[2])
        others = np.where(mode, 0.0, target)
        target = np.where(mode, sure, (1 - sure) * others / others.sum(axis=2, keepdims=True))
        return target, mode.astype(np.float64)
    draft = target / rng.uniform(0.93, 0.99, shape)
    # What the others have too much is missing at one token that has room for it.
    largest = target.argmax(axis=2)[..., None]
    missing = draft.sum(axis=2, keepdims=True) - 1 - np.take_along_axis(draft - target, largest, 2)
    np.put_along_axis(draft, largest, np.maximum(np.take_along_axis(target, largest, 2) - missing, 0.0), 2)
    return target, draft


def _peaked(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    return _logits(rng, shape, spread=6.0, noise=3.0)


def _flat(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    return np.ones(shape), _softmax(rng.normal(0, 0.4, shape))


def _disjoint(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    even = np.arange(shape[2]) % 2 == 0
    weights = rng.uniform(0.2, 1, shape)
    return np.where(even, weights, 0.0), np.where(even, 0.0, weights)


def _ties(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    """A few values only, so that many tokens have p = q and many share their probability."""
    return tuple(rng.permuted(_steps(shape), axis=2) for _ in range(2))  # type: ignore[return-value]


def _steps(shape: Shape) -> Floats:
    """Weights 1, 1, 2, 2, 1, 1, ..., whose sum is the same in every row."""
    return np.broadcast_to(1.0 + np.arange(shape[2]) // 2 % 2, shape).copy()


def _tiny(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    """Probabilities down to 1e-26 with ordinary ratios; drafts are drawn evenly, so that they are looked at."""
    logits = -rng.uniform(0, 60, shape)
    return _softmax(logits), _softmax(logits + rng.normal(0, 1, shape))


def _filtered(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    """Exact zeros at other tokens in p than in q; the token with id 0 is never in p."""
    target, draft = _logits(rng, shape, spread=1.5, noise=1.0)
    ids = np.arange(shape[2])
    kept = (rng.random(shape) < 0.6) & (ids > 0)
    kept[..., -1] |= ~kept.any(axis=2)
    proposed = rng.random(shape) < 0.8
    proposed |= ~proposed.any(axis=2, keepdims=True)
    return np.where(kept, target, 0.0), np.where(proposed, draft, 0.0)


def _equal(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    law = _softmax(rng.normal(0, 2, shape))
    return law, law


def _certain(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    """The target is a point mass, which every second draft hits."""
    target = np.zeros(shape)
    sure = rng.integers(shape[2], size=shape[:2])[..., None]
    np.put_along_axis(target, sure, 1.0, 2)
    draft = _softmax(rng.normal(0, 1, shape))
    return target, 0.5 * draft + 0.5 * target


def _half(rng: np.random.Generator, shape: Shape, one_hot: bool) -> Pair:
    """The one draft that there is has probability 1/2: where two coins are one, this shows it in the fewest rounds."""
    mode = np.arange(shape[2]) == shape[2] // 2
    others = np.where(mode, 0.0, rng.uniform(0.5, 1, shape))
    target = np.where(mode, 0.5, 0.5 * others / others.sum(axis=2, keepdims=True))
    if one_hot:
        return target, np.broadcast_to(mode * 1.0, shape).copy()
    return target, np.where(mode, 1.0, 1e-9 * others)


_KINDS: Mapping[Kind, Callable[[np.random.Generator, Shape, bool], Pair]] = {
    "random": _random,
    "close": _close,
    "peaked": _peaked,
    "flat": _flat,
    "disjoint": _disjoint,
    "ties": _ties,
    "tiny": _tiny,
    "filtered": _filtered,
    "equal": _equal,
    "certain": _certain,
    "half": _half,
}


def _logits(rng: np.random.Generator, shape: Shape, *, spread: float, noise: float) -> Pair:
    logits = rng.normal(0, spread, shape)
    return _softmax(logits), _softmax(logits + rng.normal(0, noise, shape))


def _softmax(logits: Floats) -> Floats:
    e: Floats = np.exp(logits - logits.max(axis=2, keepdims=True))
    e /= e.sum(axis=2, keepdims=True)
    return e


def _normalised(law: Floats) -> Float32s:
    normalised: Float32s = (law / law.sum(axis=2, keepdims=True)).astype(np.float32)
    return normalised
