"""Fetching and exporting models, for commands that may not touch the decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from equivtest.decoder.export import export_folder
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.weights import load_checkpoint


def pull_model(name: str, *, on_message: Callable[[str], None]) -> Path:
    """The local path of a model, fetched if need be. Raises ModelUnavailable or ChecksumMismatch."""
    return resolve_model(name, on_progress=on_message)


def export_model(name: str, folder: Path, *, on_message: Callable[[str], None]) -> None:
    """Write a model as a Hugging Face folder in float32. Raises as `resolve_model` and `export_folder` do."""
    export_folder(load_checkpoint(resolve_model(name, on_progress=on_message)), folder)
