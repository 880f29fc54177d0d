"""A coin that is used twice leaves every token's own law alone, and shows in what follows a recovery."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.scorer import Scorer
from equivtest.decoder.stages import Drafts, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults import get_fault
from equivtest.faults.streams import ReusedCoin
from equivtest.kernels.contract import SpecAccept, SpecScratch, Streams
from equivtest.kernels.registry import get_backend
from equivtest.records import LawColumns
from equivtest.rng import Purpose, uniforms
from equivtest.stats.law import LawResult, law_family
from equivtest.stats.marginal import MarginalResult, marginal_family
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for
from tests.decoder.test_scorer import finished, scored
from tests.decoder.tiny_models import tiny_model

NUM_ROWS = 100_000
P = torch.tensor([0.2, 0.5, 0.3])


class Rounds:
    """Rounds of one draft, accepted by ReusedCoin around the compiled kernel; every row has the law P by default."""

    def __init__(self, probs: Tensor | None) -> None:
        self.keys, self.probs = torch.arange(NUM_ROWS), probs
        self.scratch = SpecScratch(NUM_ROWS, 1, 3)
        self.accept = ReusedCoin(self.inner)

    def inner(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        return get_backend("cpp").spec_accept(
            torch.from_numpy(drafts.token_ids), torch.from_numpy(drafts.num_draft), target_probs, drafts.probs,
            step.streams, scratch=self.scratch,
        )  # fmt: skip

    def play(self, position: int, draft_ids: np.ndarray, p: Tensor = P) -> tuple[np.ndarray, np.ndarray]:
        """Tokens put out first, and whether the draft was kept."""
        positions = torch.full((NUM_ROWS,), position)
        step = SimpleNamespace(
            index=position, table=range(NUM_ROWS), requests=np.arange(NUM_ROWS), streams=Streams(self.keys, positions)
        )
        drafts = Drafts(draft_ids[:, None], np.ones(NUM_ROWS, np.int32), self.probs)
        result = self.accept(cast("StepInput", step), drafts, p.expand(NUM_ROWS, 2, 3).clone())
        return result.output_token_ids[:, 0].numpy().copy(), result.emitted.numpy() == 1

    def coins(self, position: int, purpose: Purpose) -> np.ndarray:
        return uniforms(self.keys.numpy(), np.full(NUM_ROWS, position), purpose)


@pytest.mark.parametrize("q", [None, (0.6, 0.2, 0.2)])
def test_the_recoverys_coin_judges_the_next_draft_and_the_law_of_that_token_stays(q: tuple[float, ...] | None) -> None:
    """Draft 0 always (q None) or drawn from q. A tolerance of .01 is 5 standard errors over the recovered rows: false
    alarm 1e-6. The twin is the dependence: given the lowest coins a draft is always kept, given the highest never."""
    rng = np.random.default_rng(1)
    probs = None if q is None else torch.tensor(q).expand(NUM_ROWS, 1, 3).contiguous()
    first, second = (np.zeros(NUM_ROWS, int) if q is None else rng.choice(3, NUM_ROWS, p=q) for _ in range(2))
    rounds = Rounds(probs)
    _, kept_before = rounds.play(0, first)
    tokens, kept = rounds.play(1, second)
    ratio = P.double().numpy()[second] / (1.0 if q is None else np.array(q)[second])
    recovered = ~kept_before
    coin = np.where(recovered, rounds.coins(0, Purpose.RECOVER), rounds.coins(1, Purpose.ACCEPT))
    clear = np.abs(coin - ratio) > 1e-6
    np.testing.assert_array_equal(kept[clear], (coin < ratio)[clear])
    assert recovered.sum() > 20_000
    for rows in (recovered, ~recovered):
        frequencies = np.bincount(tokens[rows], minlength=3) / rows.sum()
        np.testing.assert_allclose(frequencies, P, atol=0.01)
    undecided = recovered & (second == 0)
    assert kept[undecided & (coin < 0.1)].all()
    assert not kept[undecided & (coin > 0.9)].any()


def test_a_draft_that_alone_has_mass_is_kept() -> None:
    """A float32 law may say a little less than 1 of its only token: a rejection would find nothing to draw."""
    rounds = Rounds(None)
    drafts = np.zeros(NUM_ROWS, int)
    _, kept_before = rounds.play(0, drafts)
    _, kept = rounds.play(1, drafts, torch.tensor([0.5, 0.0, 0.0]))
    assert kept[~kept_before].all()
    assert kept_before.mean() < 0.5


def judged(drafter: str, fault: Any) -> tuple[LawResult, MarginalResult]:
    """8 prompts, 64 samples of 16 tokens, against the law and against plain decoding."""
    backend = get_backend("cpp")
    executor = build(backend, drafter, max_draft=2, max_batch=512)
    prompts = random_prompts(8)
    requests = requests_for([p for p in prompts for _ in range(64)], CONFIGS["topp95"], max_tokens=16, run="coin")
    plain = requests_for([p for p in prompts for _ in range(64)], CONFIGS["topp95"], max_tokens=16, run="plain")
    on = executor.generate(requests, speculative=True, fault=fault)
    off = executor.generate(plain, speculative=False)
    scorer = Scorer(
        executor.model, backend, draft_model=tiny_model(backend=backend, layers=2) if drafter == "model" else None
    )
    laws = [scorer.score(finished(requests[i : i + 64], on[i : i + 64])) for i in range(0, 512, 64)]
    law = LawColumns(
        **{f.name: np.concatenate([getattr(x, f.name) for x in laws]) for f in dataclasses.fields(LawColumns)}
    )
    tokens = dataclasses.replace(scored(law, on), group=np.repeat(np.arange(8), 64 * 16))
    cells = [
        [cell for i in range(0, 512, 64) for cell in np.stack([g.token_ids for g in arm[i : i + 64]]).T]
        for arm in (off, on)
    ]
    marginal = marginal_family(*cells, num_tv_permutations=1, rng=np.random.default_rng(2))
    return law_family(tokens, drafter), marginal


@pytest.mark.parametrize("drafter", ["early_exit", "model"])
def test_only_the_lag_sees_it_and_a_correct_decoder_passes(drafter: str) -> None:
    """z of the lag is -29 with greedy drafts and -7 with sampled ones (measured). The correct twin is flagged by the
    law in one of 1,000 runs and rejected by the marginal family in one of 20; the streams are fixed."""
    law, marginal = judged(drafter, get_fault("reused_coin"))
    assert [evidence.name for evidence in law.flagged(1e-3)] == ["lag_recovered"]
    assert law.flagged(1e-3)[0].p_value < 1e-9
    assert marginal.num_rejected == 0
    law, marginal = judged(drafter, None)
    assert law.flagged(1e-3) == ()
    assert marginal.num_rejected == 0


def test_the_match_rule_has_no_such_coin() -> None:
    executor = build(get_backend("cpp"), acceptance="match")
    with pytest.raises(InvalidSetting, match="chain acceptance rule"):
        executor.generate(requests_for([(1, 2)], CONFIGS["topp95"]), speculative=True, fault=get_fault("reused_coin"))
