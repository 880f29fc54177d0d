"""Kernel backends by name. A backend is imported and built only when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import cast

from equivtest.errors import KernelUnavailable, UnknownName
from equivtest.kernels.contract import KernelBackend

_MODULES = {
    "reference": "equivtest.kernels.reference",
    "cpp": "equivtest.kernels.cpp",
}
"""Each module has `load() -> KernelBackend`, which raises KernelUnavailable with the cause."""

_AUTO_ORDER = ("cpp", "reference")
"""What `auto` tries on a CPU, in this order."""


def known_backends() -> tuple[str, ...]:
    """Names that `get_backend` takes, besides "auto"."""
    return tuple(_MODULES)


@functools.cache
def get_backend(name: str) -> KernelBackend:
    """The backend of that name, built on first use.

    Raises UnknownName, or KernelUnavailable with the reason. Nothing falls back: a caller that wants a choice made
    asks `resolve_auto` once, prints the answer and records it.
    """
    if name not in _MODULES:
        raise UnknownName("kernel backend", name, _MODULES)
    load = cast("Callable[[], KernelBackend]", import_module(_MODULES[name]).load)
    return load()


def resolve_auto() -> tuple[str, dict[str, str]]:
    """The first backend that works here, and why each one before it does not."""
    refused: dict[str, str] = {}
    for name in _AUTO_ORDER:
        try:
            get_backend(name)
        except KernelUnavailable as unavailable:
            refused[name] = unavailable.reason
        else:
            return name, refused
    raise KernelUnavailable("auto", "; ".join(f"{name}: {reason}" for name, reason in refused.items()))
