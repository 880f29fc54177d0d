"""The scripts that the page carries, and the policy that lets it run these and nothing else."""

from __future__ import annotations

import base64
import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup

from equivtest.errors import ChecksumMismatch

VENDOR = Path(__file__).parent / "vendor"
_OWN = ("page.js", "cells.js", "samples.js")
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """Scripts in the order in which they run."""

    contents: tuple[Markup, ...]
    policy: str
    """A content security policy: no network, no other script."""


@cache
def page_scripts(*, plots: bool) -> Scripts:
    """Our own, and with `plots` the plotting library. Raises ChecksumMismatch for one that is not as published."""
    contents = [*(_vendored() if plots else ()), *((_TEMPLATES / name).read_text("utf-8") for name in _OWN)]
    return Scripts(contents=tuple(map(Markup, contents)), policy=_policy(contents))


def _vendored() -> list[str]:
    scripts = []
    for entry in tomllib.loads((VENDOR / "vendor.toml").read_text("utf-8"))["script"]:
        content = (VENDOR / entry["file"]).read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != entry["sha256"]:
            raise ChecksumMismatch(VENDOR / entry["file"], entry["sha256"], found)
        scripts.append(content.decode())
    return scripts


def _policy(contents: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
