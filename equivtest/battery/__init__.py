"""A battery of tests for a rejection sampler given as a function."""

from equivtest.battery.report import SamplerReport
from equivtest.battery.run import check_sampler

__all__ = ["SamplerReport", "check_sampler"]
