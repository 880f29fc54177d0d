"""Deliberately wrong stages, by name: what the test must be able to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from equivtest.errors import UnknownName
from equivtest.faults.acceptance import inflated_acceptance
from equivtest.faults.base import Fault
from equivtest.faults.streams import reused_coin

__all__ = ["Fault", "get_fault", "known_faults"]

_FACTORIES: Mapping[str, Callable[..., Fault]] = {
    "inflated_acceptance": inflated_acceptance,
    "reused_coin": reused_coin,
}


def known_faults() -> tuple[str, ...]:
    """Names that `get_fault` takes."""
    return tuple(_FACTORIES)


def get_fault(name: str, **params: float) -> Fault:
    """The fault of that name with its parameters. Raises UnknownName, or InvalidSetting out of range."""
    if name not in _FACTORIES:
        raise UnknownName("fault", name, _FACTORIES)
    return _FACTORIES[name](**params)
