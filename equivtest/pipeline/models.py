"""Fetching models, for commands that may not touch the decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from equivtest.decoder.hub import resolve_model


def pull_model(name: str, *, on_message: Callable[[str], None]) -> Path:
    """The local path of a model, fetched if need be. Raises ModelUnavailable or ChecksumMismatch."""
    return resolve_model(name, on_progress=on_message)
