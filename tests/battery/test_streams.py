"""Seeds, batch order and edge coins: what a sampler claims, held token for token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equivtest.battery import SamplerReport, check_sampler
from tests.battery.samplers import ChainSampler, accept_prob, by_seeds, by_uniforms, draw, right_seeds

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def smoke(sampler: object, only: tuple[str, ...] = ("random",)) -> SamplerReport:
    return check_sampler(sampler, budget="smoke", vocab=(), only=only)


def _first_seed_for_all(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return seeds[:1] + torch.arange(len(seeds)), positions


def _place_in_the_batch(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return seeds + 7 * torch.arange(len(seeds)), positions


def _batch_size(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return seeds * len(seeds), positions


def _same_every_round(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return seeds, torch.zeros_like(positions)


@pytest.mark.parametrize(
    ("mix", "stage", "words"),
    [
        (_first_seed_for_all, "seeds", "ignore the seeds of all rows but the first"),
        (_first_seed_for_all, "seeds", "in another order of the batch"),
        (_place_in_the_batch, "seeds", "a row's coins depend on its place"),
        (_batch_size, "seeds", "a row's coins depend on its batch-mates"),
        (_same_every_round, "coins", "shared between rounds"),
        (lambda seeds, positions: (torch.full_like(seeds, 5), positions), "seeds", "whatever the seed is"),
        (lambda seeds, positions: (seeds // 64, positions), "coins", "shared across the batch"),
    ],
)
def test_a_stream_that_is_not_a_rows_own_is_found(mix: Mix, stage: str, words: str) -> None:
    report = smoke(by_seeds(ChainSampler(), mix))
    assert any(found.stage == stage and words in found.what for found in report.findings), "\n".join(report.lines())


def test_a_stream_of_a_rows_own_passes() -> None:
    report = smoke(by_seeds(ChainSampler(), right_seeds))
    assert report.passed, "\n".join(report.lines())


def _late_draw(weights: Tensor, coins: Tensor) -> Tensor:
    """searchsorted from the left: a coin of 0 finds the first id, whatever its probability."""
    cumulative = weights.double().cumsum(dim=1)
    return torch.searchsorted(cumulative, coins.double()[:, None] * cumulative[:, -1:])[:, 0]


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (ChainSampler(accepts=lambda coins, a: coins <= a), "accept a draft of target probability 0, at coins 0"),
        (ChainSampler(accepts=lambda coins, a: coins < a - 2**-24), "reject a draft whose target probability is at "),
        (ChainSampler(draw=_late_draw), "target probability 0, at coins 0"),
    ],
    ids=["less or equal (19)", "one ulp short", "draw at coin 0"],
)
def test_the_smallest_and_the_largest_coin_show_a_wrong_comparison(sampler: ChainSampler, words: str) -> None:
    """No number of random coins would: these differ from a correct sampler once in sixteen million draws."""
    report = smoke(by_uniforms(sampler), only=("half",))
    assert any(words in found.what for found in report.findings), "\n".join(report.lines())


def test_the_edge_coins_pass_a_right_comparison() -> None:
    report = smoke(by_uniforms(ChainSampler()), only=("half",))
    assert report.passed, "\n".join(report.lines())


def test_uniforms_of_ones_own_are_found() -> None:
    """A function that is handed its coins and draws others cannot be replayed."""

    def fn(draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniforms: Tensor) -> object:
        own = torch.rand(uniforms.shape, dtype=torch.float64)
        return ChainSampler().judge(draft_token_ids, draft_probs, target_probs, own)

    report = smoke(fn, only=("half",))
    assert any("when the same seed comes again" in found.what for found in report.findings)


def test_the_pieces_of_the_planted_sampler_are_right() -> None:
    assert accept_prob is ChainSampler().accept_prob
    assert draw(torch.tensor([[0.0, 0.5, 0.5]]), torch.tensor([0.0])).tolist() == [1]
