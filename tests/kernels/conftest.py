"""Every claim about the contract is tested on each backend."""

from __future__ import annotations

import pytest

from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend


@pytest.fixture(params=["reference", "cpp"])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return get_backend(request.param)
