"""Every planted mistake is found and named, and the sampler that it was planted in passes."""

from __future__ import annotations

import pytest

from equivtest.battery import SamplerReport, check_sampler
from equivtest.battery.contract import Breach
from tests.battery.samplers import ALONE, ENDLESS, FAULTS, ChainSampler, Planted, shifted_acceptance


def smoke(sampler: object, *only: str, **options: object) -> SamplerReport:
    return check_sampler(sampler, budget="smoke", vocab=(), only=only or ("random", "filtered"), **options)


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_a_planted_mistake_is_found_and_named(planted: Planted) -> None:
    planted.sampler.memory.clear()
    report = smoke(planted.sampler)
    assert not report.passed
    assert report.exit_code == 1
    assert any(found.stage == planted.stage and planted.words in found.what for found in report.findings), "\n".join(
        report.lines()
    )


def test_the_sampler_without_a_mistake_passes() -> None:
    """The laws of the faults: a correct sampler fails with probability 1e-6, and the seed is fixed."""
    report = smoke(ChainSampler())
    assert report.passed, "\n".join(report.lines())
    assert report.exit_code == 0


def test_a_row_that_ends_without_a_token_where_the_residual_is_empty_is_named_so() -> None:
    """Rare: probabilities of 1 - 1e-9, which round to 1 in both laws. The correct twin puts out a token of p there."""
    report = check_sampler(ENDLESS, budget="gate", vocab=(), only=("tiny",), seed=2)
    (found,) = report.findings
    assert (found.stage, "end with their accepted drafts" in found.what) == ("recover", True)
    assert not Breach("unended", "recover", "", 1, 1, "").unreadable, "it hides nothing else that is wrong"
    assert check_sampler(ChainSampler(), budget="gate", vocab=(), only=("tiny",), seed=2).passed


def test_a_coin_that_only_a_batch_of_one_uses_twice_is_found() -> None:
    """Single rows play 512 rounds of laws that show it best, at 12 standard deviations; the correct twin passes."""
    report = check_sampler(ALONE, budget="gate", vocab=(), only=("half",))
    (found,) = report.findings
    assert found.stage == "coins"
    assert "the recovered token of a round tells the first acceptance of the next, in the same row" in found.what
    assert "single rows" in found.what
    assert check_sampler(ChainSampler(), budget="gate", vocab=(), only=("half",)).passed


@pytest.mark.parametrize("bias", [0.003, -0.003])
def test_a_bias_of_three_thousandths_is_found_at_the_default_budget(bias: float) -> None:
    """On dense and on one-hot drafts, with 90 % power or more; the interval of the estimate holds what was planted.

    Where p exceeds q or 1 - .003 nothing can be added, so the estimate may be a little smaller.
    """
    report = check_sampler(shifted_acceptance(bias), budget="gate", vocab=(), only=("close",))
    strata = {item.stratum: item for item in report.evidence if item.name == "acceptance"}
    assert report.smallest_bias <= 0.003
    for drafts in ("dense drafts", "one-hot drafts"):
        assert strata[drafts].adjusted_p <= 1e-6
        assert abs(strata[drafts].estimate - bias) < 0.0015
    assert {found.stage for found in report.findings} == {"accept"}


def test_no_bias_is_seen_in_the_twin_without_one() -> None:
    report = check_sampler(ChainSampler(), budget="gate", vocab=(), only=("close",))
    assert report.passed, "\n".join(report.lines())
    item = next(item for item in report.evidence if (item.name, item.stratum) == ("acceptance", "all laws"))
    assert item.ci_low - 1e-3 < 0 < item.ci_high + 1e-3
