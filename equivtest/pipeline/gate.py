"""Reads the verdicts of finished runs; the gate itself computes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivtest.errors import InvalidSetting, InvalidShard
from equivtest.pipeline.manifest import VERDICT_FILE, Manifest, Status, describe_code, resume_command
from equivtest.pipeline.next_command import next_command
from equivtest.protocol.budgets import BUDGETS, get_budget, is_smaller
from equivtest.protocol.plan import Protocol, fingerprint
from equivtest.protocol.prompts import load_prompt_set, prompt_set_names
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
    caveat: str = ""
    """Why it carries no merge though it passes: what a run of its budget cannot show; empty where it does."""
    judged: bool = True
    """Whether this is the run's own verdict: it was not refused, and its samples are there."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a gate asks of a run besides its verdict."""

    fingerprint: str | None = None
    """Digits that its fingerprint begins with; empty for any fingerprint of this code."""
    budget: str | None = None
    """The smallest budget of which `equivalent` passes."""

    @classmethod
    def parse(cls, require: Sequence[str]) -> Requirements:
        """From the words of the command line, `fingerprint`, `fingerprint=HEX` or `budget=NAME`.

        Raises InvalidSetting for another word, and UnknownName for another budget.
        """
        digits, budget = None, None
        for word in require:
            name, equals, value = word.partition("=")
            if name == "budget" and equals:
                budget = get_budget(value).name
            elif name == "fingerprint" and (not equals or (len(value) >= _SHORTEST and not set(value) - _HEX)):
                digits = value
            else:
                requirement = (
                    f"must be fingerprint, fingerprint=HEX with at least {_SHORTEST} digits of 0-9a-f, or budget=NAME"
                )
                raise InvalidSetting("require", word, requirement)
        return cls(fingerprint=digits, budget=budget)


_SHORTEST = 8
_HEX = frozenset("0123456789abcdef")


def read_verdict(run_dir: Path, require: Sequence[str] = ()) -> GateResult:
    """The verdict of a run. A run that did not end, or whose samples are not all there and whole, is invalid, whatever
    its verdict file says.

    require: "fingerprint" refuses, as invalid, a run of other code than this, or of a protocol that this code does not
    have (prompts, configs); "fingerprint=HEX", with at least 8 digits, refuses one of another protocol or subject too;
    "budget=NAME" refuses `equivalent` of a smaller budget (a difference is one at any size).

    Raises RunNotFound, as `Requirements.parse` does, or InvalidShard for a damaged manifest or verdict.
    """
    wanted = Requirements.parse(require)
    manifest = Manifest.read(run_dir)
    path = run_dir / VERDICT_FILE
    if problem := _not_finished(run_dir, manifest):
        return _unjudged(run_dir, f"cannot be judged: {problem}", resume_command(manifest.command, run_dir))
    if wanted.fingerprint is not None and (problem := _other(manifest, wanted.fingerprint)):
        return _unjudged(run_dir, f"is refused: {problem}", "run it again with this code and this configuration")
    if not path.is_file():
        reason = "cannot be judged: it holds no verdict, because its last analysis failed"
        return _unjudged(run_dir, reason, f"equivtest report {run_dir}")
    try:
        verdict: dict[str, Any] = json.loads(path.read_text("utf-8"))
        word, budget = Word(verdict["verdict"]), manifest.judged_protocol.budget
        if word is Word.EQUIVALENT and wanted.budget is not None and is_smaller(budget, wanted.budget):
            reason = f"is refused: it is equivalent at budget {budget}, and budget {wanted.budget} is required"
            return _unjudged(run_dir, reason, f"run it again with --budget {wanted.budget}")
        return GateResult(
            run_dir=run_dir,
            word=word,
            caveat=BUDGETS[budget].caveat if word is Word.EQUIVALENT and budget in BUDGETS else "",
            headline=verdict["headline"],
            lines=(
                f"fingerprint: {manifest.fingerprint}",
                f"gate of record: {verdict['gate_of_record']['line']}",
                *(f"{control['name']}: {control['line']}" for control in verdict["controls"]),
                *(f"diagnosis: {sentence}" for sentence in verdict["diagnosis"]),
                *verdict["reasons"],
                *(f"next: {step}" for step in (*verdict["next_steps"], *_command(manifest, word))),
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidShard(path, f"not a verdict: {error}; recompute it with `equivtest report {run_dir}`") from error


def _command(manifest: Manifest, word: Word) -> tuple[str, ...]:
    """The command that the page names too."""
    budget = manifest.judged_protocol.budget
    command = next_command(manifest.command, word, budget=budget, subject=manifest.subject)
    return () if command is None else (command,)


def _unjudged(run_dir: Path, reason: str, step: str) -> GateResult:
    lines, headline = (f"next: {step}",), f"this run {reason}"
    return GateResult(run_dir=run_dir, word=Word.INVALID, headline=headline, lines=lines, judged=False)


def _other(manifest: Manifest, digits: str) -> str | None:
    """Why the run is not one of this code and of the fingerprint asked for."""
    recorded, present = manifest.code.get("source_sha256"), describe_code()["source_sha256"]
    if recorded != present:
        return f"it ran other code (source_sha256 {str(recorded)[:12]}, here {present[:12]})"
    protocol = Protocol.from_dict(manifest.protocol)
    if fingerprint(protocol, manifest.subject) != manifest.fingerprint:
        return "its fingerprint is not that of the protocol and subject in its manifest"
    prompts = manifest.protocol["prompt_set"]
    if prompts in prompt_set_names() and load_prompt_set(prompts).sha256 != protocol.prompt_set_sha256:
        return f"its prompts are not those of the set {prompts} here"
    if not manifest.fingerprint.startswith(digits):
        return f"its fingerprint is {manifest.fingerprint}, not {digits}"
    return None


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
