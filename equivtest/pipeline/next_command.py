"""The command to run after a verdict: the run's own, changed in one thing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from equivtest.protocol.budgets import BUDGETS
from equivtest.records import Word

_NEXT_BUDGET = dict(zip(BUDGETS, list(BUDGETS)[1:], strict=False))


def next_command(command: str, word: Word, *, budget: str, subject: Mapping[str, Any]) -> str | None:
    """`equivtest run ...` with the other acceptance rule after a difference, which tells the rule from all else, and
    with the next larger budget where this one could not decide; None where another run helps nothing.

    command: how the run was started; budget: its budget; subject: its engine's description.
    """
    words = shlex.split(command)
    if words[:2] != ["equivtest", "run"]:
        return None
    if word is Word.DIFFERENT and subject.get("acceptance") in ("chain", "match"):
        other = "match" if subject["acceptance"] == "chain" else "chain"
        return shlex.join(_changed(words, "--acceptance", other))
    if budget in _NEXT_BUDGET and (word is Word.INCONCLUSIVE or (word is Word.EQUIVALENT and BUDGETS[budget].caveat)):
        return shlex.join(_changed(words, "--budget", _NEXT_BUDGET[budget]))
    return None


def _changed(words: list[str], option: str, value: str) -> list[str]:
    """With that value, and into a folder of its own."""
    kept: list[str] = []
    dropped = (option, "--run-dir")
    after = iter(words)
    for word in after:
        if word in dropped:
            next(after, None)
        elif word != "--resume" and not word.startswith(tuple(f"{name}=" for name in dropped)):
            kept.append(word)
    return [*kept, option, value]
