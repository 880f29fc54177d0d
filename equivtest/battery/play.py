"""Playing a case: consecutive calls of a sampler on one random stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.battery.adapters import Adapter, Answer, Call, Coins
from equivtest.battery.laws import Case, Ints, Laws
from equivtest.errors import EquivtestError, SamplerFailed
from equivtest.rng import Purpose, stream_key, uniforms

Bools = npt.NDArray[np.bool_]


class Played(NamedTuple):
    """What a sampler made of a case: rounds x batch."""

    case: Case
    laws: Laws
    drafts: Ints  # [T, B, K]
    tokens: Ints  # [T, B, K+1]
    emitted: Ints | None  # [T, B], as the sampler says
    telemetry: Ints | None  # [T, B]
    orders: Ints  # [T, B], the law of each row of the batch
    changed: tuple[str, ...]
    """Names of what the sampler was handed and changed."""


class Handed(NamedTuple):
    """The laws of a case on the sampler's device."""

    draft_probs: Tensor | None
    target_probs: Tensor
    num_draft: Tensor

    def rows(self, order: Tensor) -> Handed:
        """A copy with the laws of `order` [B]."""
        return Handed(*(None if column is None else column[order] for column in self))  # type: ignore[arg-type]


def hand(case: Case, laws: Laws, device: torch.device) -> Handed:
    """A copy of the laws on the device."""
    q = None if case.one_hot else torch.tensor(laws.draft, device=device)
    return Handed(q, torch.tensor(laws.target, device=device), torch.tensor(laws.num_draft, device=device))


def row_seeds(seed: int, case: Case) -> Ints:
    """A stream key for every row of a case: consecutive numbers, as seeds often are."""
    return stream_key("sampler", seed, case.name) // 2 + np.arange(case.batch)


def play(
    adapter: Adapter,
    case: Case,
    laws: Laws,
    drafts: Ints,
    *,
    seeds: Ints,
    device: torch.device,
    orders: Ints | None = None,
    coin: float | None = None,
) -> Played:
    """One call a round of drafts [T, B, K], all on the stream of `seeds` [B]; results come from the device at the end.

    drafts and what is returned have a row a law, whichever row of the batch plays it: orders [T, B] says which law each
    row of the batch has in each round; its own by default. coin: what every uniform is, where uniforms are handed over.

    Raises SamplerFailed naming the case where the sampler raises or returns what is no [B, K+1] of integers.
    """
    handed = hand(case, laws, device)
    if orders is None:
        orders = np.broadcast_to(np.arange(case.batch), drafts.shape[:2])
    by_row = np.take_along_axis(drafts, orders[..., None], 1)
    on_device, orders_there = torch.tensor(by_row, device=device), torch.tensor(orders, device=device)
    answers: list[Answer] = []
    changed: dict[str, None] = {}
    with _stream(adapter, seeds, case, device, coin) as next_coins:
        for step, (ids, order) in enumerate(zip(on_device, orders_there, strict=True)):
            coins = next_coins(step, answers[-1].output_token_ids if answers else None)
            rows = handed.rows(order)
            call = Call(ids, rows.num_draft, tuple(laws.num_draft[orders[step]].tolist()), *rows[:2], coins)
            answers.append(_checked(_answer(adapter, call, case), call, case))
            if step == 0:
                changed |= dict.fromkeys(_changed(rows, handed.rows(order)))
    if not on_device.equal(torch.tensor(by_row, device=device)):
        changed["draft_token_ids"] = None
    places = np.argsort(orders, axis=1)
    tokens, emitted, telemetry = (_on_host(column, places) for column in zip(*answers, strict=True))
    assert tokens is not None
    return Played(case, laws, drafts, tokens, emitted, telemetry, orders, tuple(changed))


def _changed(handed: Handed, expected: Handed) -> list[str]:
    pairs = zip(Handed._fields, handed, expected, strict=True)
    return [
        name for name, found, before in pairs if found is not None and before is not None and not found.equal(before)
    ]


def _answer(adapter: Adapter, call: Call, case: Case) -> Answer:
    try:
        return adapter(call)
    except EquivtestError:
        raise
    except (Exception, SystemExit) as error:
        raise SamplerFailed(case.name, f"raised {type(error).__name__}: {error}") from error


def _checked(answer: Answer, call: Call, case: Case) -> Answer:
    device, shape = call.target_probs.device, tuple(call.target_probs.shape[:2])
    expected = {"output ids": shape, "accepted counts": shape[:1], "telemetry": shape[:1]}
    for (name, size), found in zip(expected.items(), answer, strict=True):
        if (found is not None or name == "output ids") and not _holds_integers(found, size, device):
            must = f"which must be a tensor of integers {list(size)} on {device}"
            raise SamplerFailed(case.name, f"returned {_told(found)} for {name}, {must}")
    # Cloned: a sampler may put every answer into one buffer.
    copies = (None if column is None else column.long().clone() for column in answer[1:])
    return Answer(answer.output_token_ids.long().clone(), *copies)


def _holds_integers(found: object, shape: tuple[int, ...], device: torch.device) -> bool:
    if not isinstance(found, Tensor) or found.dtype.is_floating_point or found.dtype.is_complex:
        return False
    return found.dtype != torch.bool and tuple(found.shape) == shape and found.device == device


def _told(found: object) -> str:
    if isinstance(found, Tensor):
        return f"{found.dtype} {list(found.shape)} on {found.device}"
    return f"a {type(found).__name__}" + (f" of {len(found)}" if isinstance(found, tuple) else "")


def _on_host(rounds: tuple[Tensor | None, ...], places: Ints) -> Ints | None:
    """[T, B, ...] in the order of the laws; places [T, B] are the rows that played them."""
    there = [column for column in rounds if column is not None]
    if len(there) < len(rounds):
        return None
    return torch.stack(there).cpu().numpy()[np.arange(len(there))[:, None], places]


@contextmanager
def _stream(
    adapter: Adapter, seeds: Ints, case: Case, device: torch.device, coin: float | None
) -> Iterator[_NextCoins]:
    stream = _NextCoins(adapter, seeds, case, device, coin)
    if adapter.coins != "global":
        yield stream
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_generator_seed(seeds))
        yield stream


class _NextCoins:
    def __init__(self, adapter: Adapter, seeds: Ints, case: Case, device: torch.device, coin: float | None) -> None:
        self.coin = coin
        self.kind, self.seeds, self.width, self.device = adapter.coins, seeds, case.num_draft + 1, device
        self.on_device = torch.tensor(seeds, device=device)
        self.positions = torch.zeros_like(self.on_device)
        self.generators = [self._generator(int(seed)) for seed in seeds] if self.kind == "generators" else None
        self.generator = self._generator(_generator_seed(seeds)) if self.kind == "generator" else None

    def __call__(self, step: int, last_tokens: Tensor | None) -> Coins:
        if last_tokens is not None:
            self.positions = self.positions + (last_tokens >= 0).sum(dim=1)
        u = self._uniforms(step) if self.kind == "uniforms" else None
        return Coins(self.on_device, self.positions, step, u, self.generators, self.generator)

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed % 2**63)

    def _uniforms(self, step: int) -> Tensor:
        """With 24 random bits, which float32 holds exactly and below 1."""
        columns = step * self.width + np.arange(self.width)
        if self.coin is not None:
            return torch.full((len(self.seeds), self.width), self.coin, device=self.device)
        u = uniforms(self.seeds[:, None], columns[None, :], Purpose.ACCEPT)
        return torch.tensor(np.floor(u * 2**24) / 2**24, dtype=torch.float32, device=self.device)


def _generator_seed(seeds: Ints) -> int:
    return int(seeds[0]) % 2**63
