"""Deliberately wrong stages, by name: what the test must be able to see."""

from equivtest.faults.base import Family, Fault, Nature, Setting
from equivtest.faults.registry import BY_NAME_ONLY, NOT_EXPRESSIBLE, catalogue, get_fault, known_faults, load_faults

__all__ = [
    "BY_NAME_ONLY",
    "NOT_EXPRESSIBLE",
    "Family",
    "Fault",
    "Nature",
    "Setting",
    "catalogue",
    "get_fault",
    "known_faults",
    "load_faults",
]
