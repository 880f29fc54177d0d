"""The kill matrix for people and programs: controls.html, controls.md, controls.parquet and one terminal screen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from equivtest.files import write_whole
from equivtest.records import KILL_LEVEL, Family, Kill, Nature
from equivtest.report import words
from equivtest.report.html import environment, flatten
from equivtest.report.summary import escape, table

NATURE_TITLES: Mapping[Nature, str] = {
    Nature.CONTROL: "Correct decoders (A/A): must pass",
    Nature.VARIANT: "Valid variants: must pass",
    Nature.LOSSY: "Lossy by design: must be found",
    Nature.FAULT: "Faults: must be found",
}
"""In the order of the page."""

FOUND, MISSED = "●", "·"
"""Marks of a family that found a subject and of one that did not; what was not looked at is left blank."""

VERSION_KEY = b"equivtest.controls.version"
CONTROLS_VERSION = 1
"""Raised when a column of controls.parquet changes its name, type or meaning."""

COLUMNS: Mapping[str, pa.DataType] = {
    "subject": pa.string(),
    "nature": pa.string(),
    "kind": pa.string(),
    "ids": pa.list_(pa.int32()),
    "reports": pa.list_(pa.string()),
    "stage": pa.string(),
    "config": pa.string(),
    "drafter": pa.string(),
    "acceptance": pa.string(),
    "family": pa.string(),
    "expected": pa.bool_(),
    "found": pa.bool_(),
    "p_value": pa.float64(),
    "test": pa.string(),
    "num_tokens": pa.int64(),
    "refused": pa.string(),
    "failed": pa.string(),
    "as_expected": pa.bool_(),
    "named_stage": pa.string(),
    "diagnosis": pa.string(),
}
"""controls.parquet: a row for each subject and family that looked at it; num_tokens is null where it found nothing, and
a subject that was refused or failed has one row without a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one subject."""

    name: str
    nature: Nature
    kind: str
    ids: tuple[int, ...]
    reports: tuple[str, ...]
    stage: str
    description: str
    config: str
    drafter: str
    acceptance: str
    expected: frozenset[Family]
    """What found it at the gate budget before; its author's guess for a fault from elsewhere."""
    kills: Mapping[Family, Kill]
    """Every family that looked."""
    diagnosis: tuple[str, ...]
    named_stage: str | None
    """Where the first sentence of the diagnosis points."""
    refused: str | None
    """What kernels or samples objected to: a decoder that does not get through its own checks is found."""
    failed: str | None = None
    """What went wrong where it could not be measured: never as it must be."""
    may_be_missed: bool = False
    """Too subtle a fault for the samples of this matrix."""

    @property
    def killed(self) -> bool:
        return self.refused is not None or any(kill.found for kill in self.kills.values())

    @property
    def as_expected(self) -> bool:
        if self.failed is not None:
            return False
        return self.killed is self.nature.must_be_found or (self.may_be_missed and not self.killed)

    @property
    def words(self) -> str:
        """What found it, for a line of progress."""
        if self.failed is not None:
            return f"NOT MEASURED: {self.failed}"
        if self.refused is not None:
            return f"found: refused ({self.refused})"
        found = [family.value for family, kill in self.kills.items() if kill.found]
        return f"found by {', '.join(found)}" if found else "not found"

    @property
    def well_named(self) -> bool:
        return self.named_stage == self.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMatrix:
    """Every subject, and how the matrix was made."""

    outcomes: tuple[Outcome, ...]
    provenance: Mapping[str, Any]

    def of(self, nature: Nature) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.nature is nature)

    @property
    def as_expected(self) -> bool:
        return bool(self.outcomes) and all(outcome.as_expected for outcome in self.outcomes)

    @property
    def summary(self) -> tuple[str, ...]:
        """One line a nature, one on the diagnoses, and one on each subject that did not come out as it must."""
        lines = []
        for nature, title in NATURE_TITLES.items():
            own = self.of(nature)
            if own:
                found = nature.must_be_found
                right = sum(outcome.killed is found and outcome.failed is None for outcome in own)
                subtle = [outcome.name for outcome in own if outcome.may_be_missed and not outcome.killed]
                aside = f"; too subtle for this budget: {', '.join(subtle)}" if subtle else ""
                lines.append(f"{title.split(':')[0]}: {right} of {len(own)} {'found' if found else 'passed'}{aside}")
        told = [outcome for outcome in self.of(Nature.FAULT) if outcome.killed and outcome.refused is None]
        if told:
            named = sum(outcome.well_named for outcome in told)
            lines.append(f"diagnosis names the stage of {named} of {len(told)} faults that were found")
        lines += [
            f"{outcome.name}: {outcome.words}"
            if outcome.failed
            else f"{'found' if outcome.killed else 'not found'}, and must {'not ' * outcome.killed}be: {outcome.name}"
            for outcome in self.outcomes
            if not outcome.as_expected
        ]
        return tuple(lines)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of controls.parquet."""
        for outcome in self.outcomes:
            yield from _rows(outcome)


def write_kill_matrix(matrix: KillMatrix, folder: Path) -> None:
    """controls.parquet, controls.html, controls.md and the provenance as controls.json."""
    schema = pa.schema(COLUMNS.items(), metadata={VERSION_KEY: str(CONTROLS_VERSION).encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(matrix.rows()), schema=schema), sink, compression="zstd")
    write_whole(folder / "controls.parquet", sink.getvalue().to_pybytes())
    write_whole(folder / "controls.html", render_html(matrix))
    write_whole(folder / "controls.md", render_markdown(matrix))
    record = {**matrix.provenance, "summary": list(matrix.summary), "as_expected": matrix.as_expected}
    write_whole(folder / "controls.json", json.dumps(record, indent=2) + "\n")


def render_html(matrix: KillMatrix) -> str:
    """One self-contained page."""
    return (
        environment()
        .get_template("controls.html.j2")
        .render(
            matrix=matrix,
            families=list(Family),
            sections=[(title, _groups(matrix.of(nature))) for nature, title in NATURE_TITLES.items()],
            level=KILL_LEVEL,
            found=FOUND,
            missed=MISSED,
            provenance=list(flatten(matrix.provenance)),
        )
    )


def render_markdown(matrix: KillMatrix) -> str:
    """The same for a pull request."""
    lines = ["## Kill matrix: " + ("every subject came out as it must" if matrix.as_expected else "NOT as it must"), ""]
    lines += [f"- {escape(line)}" for line in matrix.summary]
    for nature, title in NATURE_TITLES.items():
        own = matrix.of(nature)
        if own:
            header = ("", "Subject", *(family.value for family in Family), "Diagnosis")
            lines += ["", f"### {title}", "", *table(header, [_markdown_row(outcome) for outcome in own])]
    lines.append(f"{FOUND} found, with the tokens it took; {MISSED} not found; blank: not looked at.")
    lines.append(f"A family finds a subject at an adjusted p-value of at most {KILL_LEVEL:g}.")
    return "\n".join(lines) + "\n"


def _markdown_row(outcome: Outcome) -> tuple[str, ...]:
    mark = "✓" if outcome.as_expected else "✗"
    said = outcome.failed or outcome.refused or "; ".join(outcome.diagnosis)
    return (mark, outcome.name, *(kill_text(outcome.kills.get(family)) for family in Family), said)


def kill_text(kill: Kill | None) -> str:
    """`● 8k`: found with so many tokens."""
    if kill is None:
        return ""
    return f"{FOUND} {words.tokens_text(kill.num_tokens)}" if kill.found else MISSED


def _groups(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Outcomes by kind, in order."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.kind, []).append(outcome)
    return list(groups.items())


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    common = {
        "subject": outcome.name,
        "nature": outcome.nature.value,
        **{name: list(getattr(outcome, name)) for name in ("ids", "reports")},
        **{
            name: getattr(outcome, name)
            for name in ("kind", "stage", "config", "drafter", "acceptance", "refused", "failed")
        },
        "as_expected": outcome.as_expected,
        "named_stage": outcome.named_stage,
        "diagnosis": "; ".join(outcome.diagnosis) or None,
    }
    for family, kill in outcome.kills.items():
        yield common | {
            "family": family.value,
            "expected": family in outcome.expected,
            "found": kill.found,
            "p_value": kill.p_value,
            "test": kill.test,
            "num_tokens": kill.num_tokens,
        }
    if not outcome.kills:
        yield common
