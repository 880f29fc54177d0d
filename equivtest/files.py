"""Writing files that appear whole or not at all, whatever happens to the process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from equivtest.errors import RunBusy

TEMPORARY_SUFFIX = ".tmp"
"""Ends the name of a file that is being written; it begins with a dot."""


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path`, whole and synced, when the block ends, and never when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write the content, text as UTF-8, in one atomic step and return the path."""
    with atomic_file(path) as sink:
        sink.write(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone. Raises RunBusy while another process holds it; a killed one lets go."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise RunBusy(folder) from held
        yield


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
