"""What a benchmark hands over: a table, and what it was measured on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_PACKAGES = ("equivtest", "torch", "transformers", "flashinfer-python", "triton", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One benchmark's figures."""

    what: Mapping[str, Any]
    """The settings, with device and versions."""
    table: tuple[Mapping[str, Any], ...]
    """Rows with the same columns."""

    def rows(self) -> list[dict[str, Any]]:
        """The table."""
        return [dict(row) for row in self.table]

    def settings(self) -> dict[str, Any]:
        """Everything but the table."""
        return dict(self.what)


def describe_device(device: str) -> dict[str, Any]:
    """Name and size of the device, and the versions of what runs on it; versions of absent packages are None."""
    found: dict[str, Any] = {"device": device, "versions": {name: _version(name) for name in _PACKAGES}}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "device_name": properties.name,
            "device_memory_bytes": properties.total_memory,
            "device_processors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
