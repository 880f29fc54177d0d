"""FlashInfer on this machine, or the reason why not."""

from __future__ import annotations

from typing import Any

import pytest

from equivtest.errors import KernelUnavailable
from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend


def flashinfer_backend() -> KernelBackend:
    """The registry's one. Skips the test with the reason where there is none."""
    try:
        return get_backend("flashinfer")
    except KernelUnavailable as unavailable:
        pytest.skip(unavailable.reason)


def fresh_backend() -> KernelBackend:
    """One whose coins nobody has drawn yet."""
    flashinfer_backend()
    from equivtest.kernels.flashinfer import load

    return load()


def sampling() -> Any:
    """The module flashinfer.sampling."""
    flashinfer_backend()
    import flashinfer.sampling

    return flashinfer.sampling


def version() -> tuple[int, ...]:
    """(0, 7, 4) and the like, without a suffix."""
    flashinfer_backend()
    import flashinfer

    return tuple(int("".join(c for c in part if c.isdigit())) for part in flashinfer.__version__.split(".")[:3])
