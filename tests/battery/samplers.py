"""A rejection sampler in plain torch, right as it stands, and the same with one public mistake at a time.

The mistakes are rows of the public fault list that a sampler function can make by itself; the number of the row is
named where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from equivtest.rng import Purpose, uniforms

PADDING = -1


@dataclass
class Batch:
    """One call, and what was drawn for it."""

    drafts: Tensor  # [B, K]
    q: Tensor  # [B, K, V]
    p: Tensor  # [B, K+1, V]
    one_hot: bool
    coins: Tensor  # [B, K]
    last_coin: Tensor  # [B]

    def at_drafts(self, probs: Tensor) -> Tensor:
        return probs.gather(2, self.drafts[:, :, None])[:, :, 0]


def accept_prob(batch: Batch) -> Tensor:
    p, q = batch.at_drafts(batch.p[:, :-1]), batch.at_drafts(batch.q)
    return torch.where(p >= q, 1.0, p / q.clamp(min=1e-37)) * (p > 0)


def residual(batch: Batch, rows: Tensor, slot: Tensor) -> Tensor:
    return (batch.p[rows, slot] - batch.q[rows, slot]).clamp(min=0)


def bonus(batch: Batch, rows: Tensor) -> Tensor:
    return batch.p[rows, batch.drafts.shape[1]]


def draw(weights: Tensor, coins: Tensor) -> Tensor:
    cumulative = weights.double().cumsum(dim=1)
    return torch.searchsorted(cumulative, coins.double()[:, None] * cumulative[:, -1:], right=True)[:, 0]


@dataclass
class ChainSampler:
    """fn(draft_token_ids, draft_probs, target_probs, generator) with every step open to replacement."""

    accept_prob: Callable[[Batch], Tensor] = accept_prob
    accepts: Callable[[Tensor, Tensor], Tensor] = lambda coins, a: coins < a
    residual: Callable[[Batch, Tensor, Tensor], Tensor] = residual
    bonus: Callable[[Batch, Tensor], Tensor] = bonus
    draw: Callable[[Tensor, Tensor], Tensor] = draw
    coins: Callable[[ChainSampler, torch.Generator, int, int], Tensor] | None = None
    """[B, K+1] uniforms; the generator's next ones by default."""
    last_coin: Callable[[Batch, Tensor], Tensor] = lambda batch, emitted: batch.last_coin
    after: Callable[[Batch, Tensor, Tensor, Tensor], object] | None = None
    """(batch, accepts [B, K], emitted [B], output [B, K+1]) -> what is returned."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """What is kept from call to call."""

    def __call__(
        self, draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, generator: torch.Generator
    ) -> object:
        batch_size, num_draft = draft_token_ids.shape
        if self.coins is None:
            coins = torch.rand(batch_size, num_draft + 1, generator=generator, dtype=torch.float64)
        else:
            coins = self.coins(self, generator, batch_size, num_draft)
        return self.judge(draft_token_ids, draft_probs, target_probs, coins)

    def judge(self, drafts: Tensor, draft_probs: Tensor | None, target_probs: Tensor, coins: Tensor) -> object:
        num_draft = drafts.shape[1]
        q = draft_probs
        if q is None:
            q = torch.zeros_like(target_probs[:, :-1]).scatter_(2, drafts[:, :, None], 1.0)
        batch = Batch(drafts, q, target_probs, draft_probs is None, coins[:, :-1], coins[:, -1])
        accepts = self.accepts(batch.coins, self.accept_prob(batch))
        emitted = accepts.long().cumprod(dim=1).sum(dim=1)
        rows, slot = torch.arange(len(drafts)), emitted.clamp(max=num_draft - 1)
        law = torch.where((emitted < num_draft)[:, None], self.residual(batch, rows, slot), self.bonus(batch, rows))
        law = torch.where(law.sum(dim=1, keepdim=True) > 0, law, target_probs[rows, emitted])
        last = self.draw(law, self.last_coin(batch, emitted))
        self.memory |= {"last_coin": batch.last_coin, "emitted": emitted}
        places = torch.arange(num_draft + 1)
        output = torch.cat([drafts, drafts[:, :1]], dim=1)
        output = torch.where(places < emitted[:, None], output, PADDING)
        output = torch.where(places == emitted[:, None], last[:, None], output)
        return (output, emitted) if self.after is None else self.after(batch, accepts, emitted, output)


def by_uniforms(sampler: ChainSampler) -> Callable[..., object]:
    """The same sampler, handed its coins."""

    def fn(draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor) -> object:
        return sampler.judge(draft_token_ids, draft_probs, target_probs, uniforms)

    return fn


def by_seeds(sampler: ChainSampler, mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., object]:
    """The same sampler with a counter-based stream a row; mix(seeds, positions) says which."""

    def fn(
        draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, seeds: Tensor, positions: Tensor
    ) -> object:
        keys, at = mix(seeds, positions)
        places = at[:, None] + torch.arange(draft_token_ids.shape[1])
        coins = uniforms(keys[:, None].numpy(), places.numpy(), Purpose.ACCEPT)
        # A position's own coin for the last draw, whichever purpose it is for.
        last = uniforms(keys.numpy(), at.numpy(), Purpose.RECOVER)
        both = torch.cat([torch.from_numpy(coins), torch.from_numpy(last)[:, None]], dim=1)
        return sampler.judge(draft_token_ids, draft_probs, target_probs, both)

    return fn


def right_seeds(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return seeds, positions


# --- acceptance -----------------------------------------------------------------------------------------------------


def shifted_acceptance(epsilon: float) -> ChainSampler:
    return ChainSampler(accept_prob=lambda b: accept_prob(b) + epsilon)


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p >= q, 1.0, p / q.clamp(min=1e-37)) * (p > 0)


def _sharpened(b: Batch) -> Tensor:
    p, q = (law**2 / (law**2).sum(dim=2, keepdim=True) for law in (b.p[:, :-1], b.q))
    return _ratio(b.at_drafts(p), b.at_drafts(q))


def _independent(batch: Batch, accepts: Tensor, emitted: Tensor, output: Tensor) -> Tensor:
    kept = torch.cat([accepts, torch.zeros_like(accepts[:, :1])], dim=1)
    drafts = torch.cat([batch.drafts, batch.drafts[:, :1]], dim=1)
    return torch.where(kept & (torch.arange(output.shape[1]) > emitted[:, None]), drafts, output)


def _one_coin(sampler: ChainSampler, generator: torch.Generator, batch: int, num_draft: int) -> Tensor:
    coins = torch.rand(batch, 2, generator=generator, dtype=torch.float64)
    return torch.cat([coins[:, :1].expand(batch, num_draft), coins[:, 1:]], dim=1)


# --- coins ----------------------------------------------------------------------------------------------------------


def _recovery_coin_again(sampler: ChainSampler, generator: torch.Generator, batch: int, num_draft: int) -> Tensor:
    coins = torch.rand(batch, num_draft + 1, generator=generator, dtype=torch.float64)
    before = sampler.memory.get("last_coin")
    if before is not None and len(before) == batch:
        coins[:, 0] = torch.where(sampler.memory["emitted"] < num_draft, before, coins[:, 0])
    return coins


def _only_alone(sampler: ChainSampler, generator: torch.Generator, batch: int, num_draft: int) -> Tensor:
    """As FlashInfer before 0.7.4 where its generator advances by itself: a batch of one, K + 1 a multiple of 4."""
    coins = torch.rand(batch, num_draft + 1, generator=generator, dtype=torch.float64)
    return _recovery_coin_again(sampler, generator, batch, num_draft) if (batch, num_draft) == (1, 3) else coins


def _same_in_every_row(sampler: ChainSampler, generator: torch.Generator, batch: int, num_draft: int) -> Tensor:
    return torch.rand(1, num_draft + 1, generator=generator, dtype=torch.float64).expand(batch, -1)


def _advanced_too_little(sampler: ChainSampler, generator: torch.Generator, batch: int, num_draft: int) -> Tensor:
    """The generator moves on by one row's coins, whatever the batch."""
    state = generator.get_state()
    coins = torch.rand(batch, num_draft + 1, generator=generator, dtype=torch.float64)
    generator.set_state(state)
    torch.rand(num_draft + 1, generator=generator, dtype=torch.float64)
    return coins


def _ignores_the_generator(sampler: ChainSampler, generator: torch.Generator, batch: int, num_draft: int) -> Tensor:
    return torch.rand(batch, num_draft + 1, dtype=torch.float64)


def _fixed_seed(sampler: ChainSampler, generator: torch.Generator, batch: int, num_draft: int) -> Tensor:
    """Draws from a generator of its own, which every stream starts alike."""
    key = f"own of {generator.initial_seed()}"
    fresh = torch.Generator().manual_seed(7)
    if key in sampler.memory:
        fresh.set_state(sampler.memory[key])
    coins = torch.rand(batch, num_draft + 1, generator=fresh, dtype=torch.float64)
    sampler.memory[key] = fresh.get_state()
    return coins


def _of_the_decision(batch: Batch, emitted: Tensor) -> Tensor:
    return batch.coins.gather(1, emitted.clamp(max=batch.coins.shape[1] - 1)[:, None])[:, 0]


# --- the last token -------------------------------------------------------------------------------------------------


def _mode(law: Tensor) -> Tensor:
    return (law == law.amax(dim=1, keepdim=True)).float()


def _lost_block(weights: Tensor, coins: Tensor) -> Tensor:
    return draw(weights, coins) % -(-weights.shape[1] // 2)


def _changes_q(b: Batch, rows: Tensor, slot: Tensor) -> Tensor:
    law = residual(b, rows, slot)
    b.q /= 1.01
    return law


def _nothing_to_recover(batch: Batch, accepts: Tensor, emitted: Tensor, output: Tensor) -> object:
    """Where rounding leaves no residual, nothing takes the place of the rejected draft, as in FlashInfer 0.7.4."""
    rows, num_draft = torch.arange(len(emitted)), batch.drafts.shape[1]
    left = residual(batch, rows, emitted.clamp(max=num_draft - 1)).sum(dim=1)
    ends = torch.arange(num_draft + 1) == emitted[:, None]
    return output.masked_fill(ends & ((emitted < num_draft) & (left == 0))[:, None], PADDING), emitted


def _without_bonus(batch: Batch, accepts: Tensor, emitted: Tensor, output: Tensor) -> Tensor:
    num_draft = batch.drafts.shape[1]
    last = torch.arange(num_draft + 1) == num_draft
    return torch.where((emitted == num_draft)[:, None] & last, PADDING, output)


class Planted(NamedTuple):
    """A sampler with one mistake."""

    name: str
    """With the number of the public report, where there is one."""
    sampler: ChainSampler
    stage: str
    """Stage that a finding must name."""
    words: str
    """Words that it must hold."""


FAULTS = (
    Planted("accept all (17)", ChainSampler(accept_prob=lambda b: torch.ones(b.drafts.shape)),
            "accept", "every draft is accepted"),
    Planted("coin at 0 (18)", ChainSampler(accepts=lambda coins, a: a > 0), "accept", "a coin that is always 0"),
    Planted("no coin", ChainSampler(accepts=lambda coins, a: a >= 1), "accept", "without a coin"),
    Planted("too often", shifted_acceptance(0.03), "accept", "too high by 0.0"),
    Planted("too seldom", shifted_acceptance(-0.03), "accept", "too low by 0.0"),
    Planted("coarse coin with <= (19)", ChainSampler(accepts=lambda coins, a: (coins * 32).floor() / 32 <= a),
            "accept", "accept a draft of target probability 0"),
    Planted("q ignored in the ratio (12)", ChainSampler(accept_prob=lambda b: b.at_drafts(b.p[:, :-1])),
            "accept", "as if q were a point mass"),
    Planted("ratio of other laws (13)", ChainSampler(accept_prob=_sharpened), "accept", "temperature 1/2"),
    Planted("p of the next slot (38)",
            ChainSampler(accept_prob=lambda b: _ratio(b.at_drafts(b.p[:, 1:]), b.at_drafts(b.q))),
            "accept", "p is read one slot too far"),
    Planted("q of the row before (37)",
            ChainSampler(accept_prob=lambda b: _ratio(b.at_drafts(b.p[:, :-1]), b.at_drafts(b.q.roll(1, 0)))),
            "accept", "q is that of the row before"),
    Planted("slots judged independently", ChainSampler(after=_independent), "accept", "independently of earlier"),
    Planted("one coin for all slots (28)", ChainSampler(coins=_one_coin), "accept", "one coin serves all slots"),
    Planted("recovered from p", ChainSampler(residual=lambda b, r, s: b.p[r, s]), "recover", "drawn from p, not"),
    Planted("recovered from p without the draft",
            ChainSampler(residual=lambda b, r, s: b.p[r, s].scatter(1, b.drafts[r, s, None], 0.0)),
            "recover", "from p without the rejected draft"),
    Planted("recovered is the mode (5)", ChainSampler(residual=lambda b, r, s: _mode(residual(b, r, s))),
            "recover", "nothing is drawn"),
    Planted("stale residual (21)", ChainSampler(residual=lambda b, r, s: residual(b, r, (s - 1).clamp(min=0))),
            "recover", "residual of the slot before"),
    Planted("recovered from |p - q|", ChainSampler(residual=lambda b, r, s: (b.p[r, s] - b.q[r, s]).abs()),
            "recover", "what is negative is not cut off"),
    Planted("wrong block (26)", ChainSampler(draw=_lost_block), "recover", "recover a token of target probability 0"),
    Planted("bonus one row early (38)", ChainSampler(bonus=lambda b, r: b.p[r, -2]), "bonus", "one slot too early"),
    Planted("bonus of another request (34)", ChainSampler(bonus=lambda b, r: b.p[r.roll(1), -1]),
            "bonus", "that of the row before"),
    Planted("bonus is the mode (3)", ChainSampler(bonus=lambda b, r: _mode(b.p[r, -1])), "bonus", "nothing is drawn"),
    Planted("no bonus", ChainSampler(after=_without_bonus), "bonus", "put out no bonus token"),
    Planted("decision's coin draws the token", ChainSampler(last_coin=_of_the_decision),
            "recover", "the coin of the last accept decision draws this token too"),
    Planted("recovery coin again (56)", ChainSampler(coins=_recovery_coin_again),
            "coins", "the recovered token of a round tells the first acceptance of the next, in the same row"),
    Planted("one stream for all rows (33)", ChainSampler(coins=_same_in_every_row), "coins", "across the batch"),
    Planted("generator moves on too little", ChainSampler(coins=_advanced_too_little),
            "coins", "of the next, in the row 1 before"),
    Planted("generator ignored (30)", ChainSampler(coins=_ignores_the_generator),
            "seeds", "put out other tokens when the same seed comes again"),
    Planted("seed without effect (6)", ChainSampler(coins=_fixed_seed), "seeds", "whatever the seed is"),
    Planted("telemetry as count (39)", ChainSampler(after=lambda b, accepts, e, output: (output, accepts.sum(dim=1))),
            "count", "past the first rejection"),
    Planted("count of all tokens", ChainSampler(after=lambda b, a, emitted, output: (output, emitted + 1)),
            "count", "among the accepted drafts"),
    Planted("padding of 0", ChainSampler(after=lambda b, a, e, output: output.clamp(min=0)),
            "contract", "are padded with 0"),
    Planted("id of vocab_size",
            ChainSampler(after=lambda b, a, e, output: torch.where(output == 0, b.p.shape[2], output)),
            "contract", "put out ids outside 0.."),
    Planted("q divided in place (23)", ChainSampler(residual=_changes_q), "contract", "change draft_probs in place"),
)  # fmt: skip
ENDLESS = ChainSampler(after=_nothing_to_recover)
"""Right but where the residual is empty."""
ALONE = ChainSampler(coins=_only_alone)
"""Right but in batches of one row."""
