"""A speculative sampler in numpy whose law is known exactly, with faults to plant, thousands of samples at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivtest.stats.scored import ScoredTokens

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
ACCEPTED, RECOVERED, BONUS, PLAIN = range(4)
ACCEPT_COIN, RECOVER_COIN, DRAW_COIN, DRAFT_COIN = range(4)


@dataclass(frozen=True, kw_only=True)
class World:
    """Laws by the token before: arrays [vocab, vocab]."""

    law: Floats
    """The target's, with its filter: some tokens are exact zeros."""
    unfiltered: Floats
    draft: Floats
    """The drafter's; its most likely token is the greedy draft."""


def make_world(seed: int, vocab: int = 12, *, spread: float = 1.6, draft_noise: float = 0.5) -> World:
    """Peaked random laws with a fifth of the tokens filtered, and a drafter that agrees with them but for noise."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (vocab, vocab))
    unfiltered = _softmax(logits)
    cut = np.sort(unfiltered, axis=1)[:, vocab // 5]
    law = np.where(unfiltered > cut[:, None], unfiltered, 0.0)
    draft = _softmax(logits + rng.normal(0, draft_noise, logits.shape))
    return World(law=law / law.sum(axis=1, keepdims=True), unfiltered=unfiltered, draft=draft)


def even_world(seed: int, vocab: int = 12) -> World:
    """Every law is one law with its tokens renamed, and the draft is always its mode, of probability .5.

    So whether a draft is kept has one probability whatever came before: coins that are shared between rounds move
    the joint law only.
    """
    rng = np.random.default_rng(seed)
    base = np.r_[0.5, np.full(vocab - 3, 0.5 / (vocab - 3)), 0.0, 0.0]
    law = np.stack([base[rng.permutation(vocab)] for _ in range(vocab)])
    return World(law=law, unfiltered=law, draft=law)


def _softmax(logits: Floats) -> Floats:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What the sampler does wrong; nothing by default."""

    epsilon: float = 0.0
    """Drafts are kept with so much more probability."""
    bonus_from_wrong_row: bool = False
    """The bonus is drawn from the law of the row before."""
    reused_coin: bool = False
    """A recovery's coin serves again as the first acceptance coin of the next round."""
    shared_rows: bool = False
    """All rows of a step get the same coins."""
    colliding_seeds: bool = False
    """The second half of a group's samples has the coins of the first half."""
    unfiltered: bool = False
    """No filter is applied."""
    draft_temperature: float = 1.0
    """Extra temperature on rows with a draft."""
    temperature: float = 1.0
    """Extra temperature on every row."""
    only_slot: int | None = None
    """Epsilon is added in this slot alone."""
    keeps_draft: bool = False
    """A rejected draft stays in the law that its replacement is drawn from."""


CORRECT = Fault()


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Columns of ScoredTokens, each [num_replications, tokens of one]."""

    columns: dict[str, Array]
    naive: dict[str, Array]
    """q columns as if the draft were fixed: 1[y = d], p(d) and p(d) (1 - p(d))."""

    def replication(self, index: int, *, naive: bool = False) -> ScoredTokens:
        columns = {name: column[index] for name, column in self.columns.items()}
        return ScoredTokens(**columns | ({name: c[index] for name, c in self.naive.items()} if naive else {}))


def simulate(
    world: World,
    num_replications: int,
    *,
    fault: Fault = CORRECT,
    sampled_draft: bool = False,
    num_groups: int = 2,
    samples_per_group: int = 16,
    num_positions: int = 24,
    max_draft: int = 3,
    speculative: bool = True,
    seed: int,
) -> Simulation:
    """Decode `num_groups * samples_per_group` samples a replication, all of it in one batch.

    Rounds have `max_draft` drafts, or as many as still fit; after one token in four (known before the draw) a round
    has none.
    """
    rng = np.random.default_rng(seed)
    vocab = len(world.law)
    per_replication = num_groups * samples_per_group
    count = num_replications * per_replication
    member = np.arange(count)
    group = member % per_replication // samples_per_group
    coins = _Coins(fault, rng, member, per_replication, samples_per_group, num_positions, max_draft)
    token = group % vocab
    before = token
    slot, num_draft, step = np.full(count, -1), np.zeros(count, int), np.full(count, -1)
    recovered_coin = np.full(count, np.nan)
    wrong_slots = range(max_draft) if fault.only_slot is None else [fault.only_slot]
    columns: dict[str, list[Array]] = {}
    readings = every_reading(world)
    for position in range(num_positions):
        opens = slot < 0
        step += opens
        offered = np.where(speculative & (token % 4 != 0), min(max_draft, num_positions - position - 1), 0)
        num_draft, slot = np.where(opens, offered, num_draft), np.where(opens, 0, slot)
        has_draft, is_bonus = slot < num_draft, (slot == num_draft) & (num_draft > 0)

        law, q = world.law[token], world.draft[token]
        used = world.unfiltered[token] if fault.unfiltered else law
        exponent = np.where(has_draft, 1 / fault.draft_temperature, 1.0) / fault.temperature
        hot = used if (exponent == 1).all() else used ** exponent[:, None]
        used = hot / hot.sum(axis=1, keepdims=True)
        if fault.bonus_from_wrong_row:
            used = np.where(is_bonus[:, None], world.law[before], used)
        draft = invert(q, coins(DRAFT_COIN, position, step, slot)) if sampled_draft else q.argmax(axis=1)
        p_draft, q_draft = used[member, draft], q[member, draft] if sampled_draft else np.ones(count)
        accept_coin = coins(ACCEPT_COIN, position, step, slot)
        if fault.reused_coin:
            accept_coin = np.where((slot == 0) & ~np.isnan(recovered_coin), recovered_coin, accept_coin)
        accepted = has_draft & (accept_coin < p_draft / q_draft + fault.epsilon * np.isin(slot, wrong_slots))
        recovered = has_draft & ~accepted
        residual = np.maximum(used - q, 0.0) if sampled_draft else used.copy()
        if not sampled_draft:
            residual[member, draft] = 0.0
        if fault.keeps_draft:
            residual = used
        residual = np.where(residual.sum(axis=1, keepdims=True) > 0, residual, used)
        recover_coin, draw_coin = (coins(kind, position, step, slot) for kind in (RECOVER_COIN, DRAW_COIN))
        drawn = invert(np.where(recovered[:, None], residual, used), np.where(recovered, recover_coin, draw_coin))
        y = np.where(accepted, draft, drawn)
        recovered_coin = np.where(recovered, recover_coin, np.nan)

        read = {name: values[token, y] for name, values in readings.items()}
        naive = moments_of_one(law[member, draft], y == draft)
        own = {name: read.pop(name) for name in naive}
        row = {
            "position": np.full(count, position),
            "token_id": y,
            "origin": np.select([accepted, recovered, is_bonus], [ACCEPTED, RECOVERED, BONUS], PLAIN),
            "slot": np.where(num_draft > 0, slot, -1),
            "num_draft": num_draft,
            "is_draft": has_draft & (y == draft),
            "step": step,
            **law_columns(read, rng),
            **{name: values * has_draft for name, values in (own if sampled_draft else naive).items()},
            **{f"naive_{name}": values * has_draft for name, values in naive.items()},
        }
        for name, values in row.items():
            columns.setdefault(name, []).append(values.copy())
        before, token = token, y
        slot = np.where(accepted, slot + 1, -1)

    shape = (num_replications, per_replication * num_positions)
    flat = {name: np.stack(rows, axis=1).reshape(shape) for name, rows in columns.items()}
    whole = {
        "sample": member,
        "batch_row": member % per_replication,
        "batch": member // per_replication,
        "group": group,
    }
    flat |= {name: np.repeat(values, num_positions).reshape(shape) for name, values in whole.items()}
    naive = {name: flat.pop(f"naive_{name}") for name in ("q_token", "q_mean", "q_variance")}
    return Simulation(columns=flat, naive=naive)


def invert(weights: Floats, coins: Floats) -> npt.NDArray[np.int64]:
    """First id whose cumulative weight exceeds coin * total, row by row."""
    cumulative = weights.cumsum(axis=1)
    last = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(axis=1)
    return np.minimum((cumulative <= coins[:, None] * cumulative[:, -1:]).sum(axis=1), last)


def every_reading(world: World) -> dict[str, Floats]:
    """What a scorer finds at each token under each law, [vocab, vocab] by the token before and the token."""
    law, q = world.law, world.draft
    p, rivals, tokens = law[:, :, None], law[:, None, :], np.arange(len(law))
    logs = np.log(np.where(law > 0, law, 1.0))
    entropy, mean = -(law * logs).sum(axis=1), (law * q).sum(axis=1)
    of_law = {
        "entropy": entropy,
        "var_surprisal": np.maximum((law * logs**2).sum(axis=1) - entropy**2, 0.0),
        "q_mean": np.minimum(mean, 1.0),
        "q_variance": np.maximum((law * q**2).sum(axis=1) - mean**2, 0.0),
    }
    return {
        "p_token": law,
        "q_token": q,
        "above": (rivals * (rivals > p)).sum(axis=2),
        "ties": (rivals * (rivals == p)).sum(axis=2),
        "below": (rivals * (tokens < tokens[:, None])).sum(axis=2),
        **{name: np.repeat(values[:, None], len(law), axis=1) for name, values in of_law.items()},
    }


def law_columns(read: dict[str, Floats], rng: np.random.Generator) -> dict[str, Array]:
    """What the scorer records of tokens [n] with these readings; draws two uniforms a token."""
    p, count = read["p_token"], len(read["p_token"])
    return {
        "p_token": p,
        "pit_rank": np.minimum(read["above"] + rng.random(count) * read["ties"], 1.0),
        "pit_vocab": np.minimum(read["below"] + rng.random(count) * p, 1.0),
        "entropy": read["entropy"],
        "var_surprisal": read["var_surprisal"],
        "support_violation": p == 0,
    }


def moments_of_one(p_draft: Floats, hit: Array) -> dict[str, Floats]:
    """Of the point mass at a draft of probability p: at the token, and its mean and variance over the law."""
    return {
        "q_token": hit.astype(np.float64),
        "q_mean": np.minimum(p_draft, 1.0),
        "q_variance": np.maximum(p_draft - p_draft**2, 0.0),
    }


class _Coins:
    """Uniforms by (purpose, sample, position), or what a fault makes of them."""

    def __init__(
        self,
        fault: Fault,
        rng: np.random.Generator,
        member: Array,
        per_replication: int,
        samples_per_group: int,
        num_positions: int,
        max_draft: int,
    ) -> None:
        self.fault, self.rng, self.member = fault, rng, member
        self.replication = member // per_replication
        if fault.shared_rows:
            self.shared = rng.random((4, int(self.replication[-1]) + 1, num_positions, max_draft + 1))
        place = member % samples_per_group
        twin = place >= samples_per_group // 2
        self.source = member - np.where(twin, samples_per_group // 2, 0)

    def __call__(self, purpose: int, position: int, step: Array, slot: Array) -> Floats:
        if self.fault.shared_rows:
            return self.shared[purpose, self.replication, step, slot]
        coins = self.rng.random(len(self.member))
        return coins[self.source] if self.fault.colliding_seeds else coins
