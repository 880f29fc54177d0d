"""The package is clean under the linters that pyproject.toml configures."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "--no-cache"), ("ruff", "format", "--check", "--no-cache"), ("mypy",)],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_linters_have_nothing_to_say(command: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", *command, *(("equivtest", "tests") if command[0] == "ruff" else ())],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
