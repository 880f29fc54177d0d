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
    "flashinfer": "equivtest.kernels.flashinfer",
    "cuda": "equivtest.kernels.cuda",
}
"""Each module has `load() -> KernelBackend`, which raises KernelUnavailable with the cause."""

_AUTO_ORDER = {"cpu": ("cpp", "reference"), "cuda": ("cuda", "reference")}
"""What `auto` tries on a device, in this order."""


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


def resolve_auto(device: str = "cpu") -> tuple[str, dict[str, str]]:
    """The first backend that works here on the device, and why each one before it does not."""
    refused: dict[str, str] = {}
    for name in _AUTO_ORDER[device]:
        try:
            get_backend(name)
        except KernelUnavailable as unavailable:
            refused[name] = unavailable.reason
        else:
            return name, refused
    raise KernelUnavailable("auto", "; ".join(f"{name}: {reason}" for name, reason in refused.items()))
