"""Reads the verdicts of finished runs; the gate itself computes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivtest.errors import InvalidShard
from equivtest.pipeline.manifest import Manifest, Status
from equivtest.records import EXIT_CODES, Word

_STRONGEST_FIRST = (Word.INVALID, Word.DIFFERENT, Word.INCONCLUSIVE, Word.EQUIVALENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """One run's verdict as it stands on disk."""

    run_dir: Path
    word: Word
    headline: str
    lines: tuple[str, ...]
    """Gate of record, controls, reasons and next steps."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]


def read_verdict(run_dir: Path) -> GateResult:
    """The verdict of a run. A run that did not end is invalid, whatever an older verdict file says.

    Raises RunNotFound, or InvalidShard for a damaged file.
    """
    manifest = Manifest.read(run_dir)
    path = run_dir / "verdict.json"
    if manifest.status is not Status.COMPLETE or not path.is_file():
        why = manifest.error or "its samples were not all collected"
        headline = f"this run cannot be judged: it is {manifest.status}, {why}"
        lines = (f"next: {manifest.command} --resume --run-dir {run_dir}",)
        return GateResult(run_dir=run_dir, word=Word.INVALID, headline=headline, lines=lines)
    try:
        verdict: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return GateResult(
            run_dir=run_dir,
            word=Word(verdict["verdict"]),
            headline=verdict["headline"],
            lines=(
                f"gate of record: {verdict['gate_of_record']['line']}",
                *(f"{control['name']}: {control['line']}" for control in verdict["controls"]),
                *verdict["reasons"],
                *(f"next: {step}" for step in verdict["next_steps"]),
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidShard(path, f"not a verdict: {error}; recompute it with `equivtest report {run_dir}`") from error


def worst(results: Sequence[GateResult]) -> Word:
    """The word that decides several runs: invalid before different before inconclusive before equivalent."""
    return min((result.word for result in results), key=_STRONGEST_FIRST.index)
