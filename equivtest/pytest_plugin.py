"""A battery of tests for a rejection sampler, as a fixture and as one assertion.

    def test_my_sampler(sampler_battery):
        sampler_battery(my_sampler, form="equivtest", budget="gate")

    def test_my_sampler_on_a_gpu():
        assert_sampler(my_sampler, device="cuda")

Both fail with the findings in words. pytest finds the fixture by itself where equivtest is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from equivtest.battery import SamplerReport


def assert_sampler(sampler: Callable[..., Any], **options: Any) -> SamplerReport:
    """Fail unless `equivtest.check_sampler(sampler, **options)` finds no difference; returns its report.

    A correct sampler fails in at most one of a million seeds, and never on some runs of the same seed only.
    """
    from equivtest.battery import check_sampler

    report = check_sampler(sampler, **options)
    if not report.passed:
        pytest.fail("\n".join(report.lines()), pytrace=False)
    return report


@pytest.fixture
def sampler_battery() -> Callable[..., SamplerReport]:
    """`assert_sampler`."""
    return assert_sampler
