"""Writing a report's files: each appears whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write the content under a temporary name in the same folder, sync it and rename it. Text is UTF-8;
    what UTF-8 cannot hold becomes a question mark."""
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as sink:
            sink.write(data)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
