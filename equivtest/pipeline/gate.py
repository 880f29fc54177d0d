"""Reads the verdicts of finished runs; the gate itself computes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivtest.errors import InvalidShard
from equivtest.pipeline.manifest import VERDICT_FILE, Manifest, Status, resume_command
from equivtest.records import EXIT_CODES, Word
from equivtest.samples.keys import shard_path
from equivtest.samples.law import law_shard_is_done
from equivtest.samples.shards import shard_is_done

_STRONGEST_FIRST = (Word.INVALID, Word.DIFFERENT, Word.INCONCLUSIVE, Word.EQUIVALENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """One run's verdict as it stands on disk."""

    run_dir: Path
    word: Word
    headline: str
    lines: tuple[str, ...]
    """Gate of record, controls, diagnosis, reasons and next steps."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]


def read_verdict(run_dir: Path) -> GateResult:
    """The verdict of a run. A run that did not end, or whose samples are not all there and whole, is invalid, whatever
    its verdict file says.

    Raises RunNotFound, or InvalidShard for a damaged manifest or verdict.
    """
    manifest = Manifest.read(run_dir)
    path = run_dir / VERDICT_FILE
    if problem := _not_finished(run_dir, manifest):
        lines = (f"next: {resume_command(manifest.command, run_dir)}",)
        headline = f"this run cannot be judged: {problem}"
        return GateResult(run_dir=run_dir, word=Word.INVALID, headline=headline, lines=lines)
    if not path.is_file():
        lines = (f"next: equivtest report {run_dir}",)
        headline = "this run cannot be judged: it holds no verdict, because its last analysis failed"
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
                *(f"diagnosis: {sentence}" for sentence in verdict["diagnosis"]),
                *verdict["reasons"],
                *(f"next: {step}" for step in verdict["next_steps"]),
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidShard(path, f"not a verdict: {error}; recompute it with `equivtest report {run_dir}`") from error


def _not_finished(run_dir: Path, manifest: Manifest) -> str | None:
    """Why the samples of a run are not what a verdict may stand on."""
    if manifest.status is not Status.COMPLETE:
        return f"it is {manifest.status}, {manifest.error or 'its samples were not all collected'}"
    protocol = manifest.judged_protocol
    shards = [shard for batch in protocol.batches() for shard in batch]
    bad = [shard for shard in shards if not shard_is_done(run_dir, shard, protocol.num_positions)]
    if not bad and manifest.options.get("law"):
        scored = [shard for shard in shards if shard.arm in protocol.law_arms]
        bad = [shard for shard in scored if not law_shard_is_done(run_dir, shard, protocol.num_positions)]
        if bad:
            first = shard_path(run_dir, bad[0], kind="law")
            return f"{len(bad)} of {len(scored)} files of law columns are gone or damaged, the first is {first}"
    if bad:
        first = shard_path(run_dir, bad[0])
        return f"{len(bad)} of {len(shards)} files of samples are gone or damaged, the first is {first}"
    return None


def worst(results: Sequence[GateResult]) -> Word:
    """The word that decides several runs: invalid before different before inconclusive before equivalent."""
    return min((result.word for result in results), key=_STRONGEST_FIRST.index)
