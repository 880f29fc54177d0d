"""The answer as a record, and as the content of verdict.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from equivtest.records import EXIT_CODES, Word
from equivtest.verdict.facts import Confirmation, Extreme, Finding, Flag, Interval, Place


class Standing(StrEnum):
    """What became of the flags of a finding."""

    CLEAR = "clear"
    """Nothing was flagged."""
    CLEARED = "cleared"
    """Every flag was tested on fresh seeds, and none stood."""
    PENDING = "pending"
    """A flag has not been tested on fresh seeds, and none has been confirmed."""
    CONFIRMED = "confirmed"
    """At least one flag stood on fresh seeds, or flags count at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gate of record, read literally: zero rejections on off vs on."""

    passed: bool | None
    """None where the comparison could not be made."""
    num_rejected: int
    num_cells: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What a control showed."""

    name: str
    """"A/A", "planted fault" or "reference law"."""
    subject: str
    """What was compared: "on vs on_null"."""
    passed: bool | None
    """None where it was not run, is undecided or had nothing to act on."""
    num_rejected: int
    num_tests: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer, and why."""

    word: Word
    headline: str
    """One sentence for whoever is on call."""
    reasons: tuple[str, ...]
    """What is wrong, where, by how much and how sure, a difference that stands by how sure; then what else is worth
    knowing."""
    next_steps: tuple[str, ...]
    """What to run or look at next, one line for each kind of problem behind the word; empty where nothing is wrong."""
    gate_of_record: Gate
    controls: tuple[Control, ...]
    findings: tuple[Finding, ...]
    standings: tuple[Standing, ...]
    """What became of the flags of each finding, in their order."""
    intervals: tuple[Interval, ...]
    """What had to lie inside a margin."""
    diagnosis: tuple[str, ...]
    """What the pattern of the evidence points to; empty where nothing stands."""
    thresholds: Mapping[str, float | bool | str]
    """Levels and rules that were used."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, in a stable order."""
        return {
            "verdict": str(self.word),
            "exit_code": self.exit_code,
            "headline": self.headline,
            "reasons": list(self.reasons),
            "next_steps": list(self.next_steps),
            "gate_of_record": asdict(self.gate_of_record),
            "controls": [asdict(control) for control in self.controls],
            "findings": [
                _finding_dict(finding, standing)
                for finding, standing in zip(self.findings, self.standings, strict=True)
            ],
            "intervals": [_interval_dict(interval) for interval in self.intervals],
            "diagnosis": list(self.diagnosis),
            "thresholds": dict(self.thresholds),
        }


def _finding_dict(finding: Finding, standing: Standing) -> dict[str, Any]:
    return {
        "family": finding.family,
        "role": str(finding.role),
        "subject": finding.subject,
        "standing": str(standing),
        "unit": finding.unit,
        "num_tests": dict(finding.num_tests),
        "num_flagged": {config: finding.flags_in(config) for config in finding.num_tests},
        "smallest_p": finding.smallest_p,
        "level": finding.level,
        "method": finding.method,
        "flagged": [_flag_dict(flag) for flag in finding.flagged],
        "extremes": [_extreme_dict(extreme) for extreme in finding.extremes],
        "confirmation": None if finding.confirmation is None else _confirmation_dict(finding.confirmation),
    }


def _place_dict(place: Place) -> dict[str, Any]:
    return {name: value for name, value in place._asdict().items() if value is not None}


def _flag_dict(flag: Flag) -> dict[str, Any]:
    return {
        **_place_dict(flag.place),
        "p_value": flag.p_value,
        "effect": flag.effect,
        "effect_by_chance": flag.effect_by_chance,
        "words": flag.words,
    }


def _interval_dict(interval: Interval) -> dict[str, Any]:
    return {
        **_place_dict(interval.place),
        "estimate": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "margin": interval.margin,
        "inside": interval.inside,
        "seeds_needed": interval.seeds_needed,
    }


def _extreme_dict(extreme: Extreme) -> dict[str, Any]:
    return {
        "name": extreme.name,
        "value": extreme.value,
        "by_chance": extreme.by_chance,
        **_place_dict(extreme.place),
    }


def _confirmation_dict(stage_2: Confirmation) -> dict[str, Any]:
    return {
        "alpha": stage_2.alpha,
        "num_samples": stage_2.num_samples,
        "tested": [_place_dict(place) for place in stage_2.tested],
        "confirmed": [_flag_dict(flag) for flag in stage_2.confirmed],
        "smallest_p": stage_2.smallest_p,
    }
