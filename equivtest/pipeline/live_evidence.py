"""Evidence that only the engine can give, taken while it is loaded and kept in the run folder.

A report is recomputed from the file, without a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equivtest.errors import InvalidShard
from equivtest.files import write_whole
from equivtest.records import Evidence

IDENTITY_FILE = "identity.json"
"""Replay, greedy identity and draft laws of arm on."""
ALTERNATIVES_FILE = "alternatives.json"
"""Which other law explains the tokens of arm on, where they do not follow their own."""

Lines = Mapping[str, tuple[Evidence, ...]]
"""Evidence by config."""


def keep_lines(path: Path, lines: Lines) -> None:
    """Write evidence so that `kept_lines` gives it back."""
    content = {config: [dataclasses.asdict(line) for line in own] for config, own in lines.items()}
    write_whole(path, json.dumps(content, indent=1) + "\n")


def kept_lines(path: Path) -> Lines:
    """What `keep_lines` wrote; empty where there is no file. Raises InvalidShard for a damaged one."""
    if not path.exists():
        return {}
    try:
        content: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8"))
        return {config: tuple(Evidence(**line) for line in own) for config, own in content.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidShard(path, f"not a file of evidence ({error}); delete it and run with --resume") from error
