"""Every claim about the contract is tested on each backend."""

from __future__ import annotations

import pytest

from equivtest.kernels.contract import KernelBackend
from equivtest.kernels.registry import get_backend

from .on_device import OnDevice


@pytest.fixture(params=["reference", "cpp", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    found = get_backend(request.param)
    return found if "cpu" in found.capabilities.devices else OnDevice(found)
