"""junit.xml: the run as test cases, for the test pages of CI systems.

A prompt's cells are one case for each comparison and configuration, each line of evidence of every other family is
one, each control is one, and so is the verdict. The file agrees with the exit code: it has a failure or an error
exactly when the verdict is not `equivalent`. So a rejected cell or a flagged line of evidence fails its case unless
the verdict is equivalent in spite of it (it was not confirmed on fresh samples); then, and for the planted fault,
which is wanted to be found, the case passes and says the numbers in its output.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from equivtest.files import write_whole
from equivtest.records import Arm, Comparison, Word
from equivtest.report import words
from equivtest.report.data import ReportData
from equivtest.report.select import is_flagged, num_rejected

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    suite: str
    classname: str
    name: str
    failure: str | None = None
    """First line of what failed; None for a case that passed."""
    kind: str = ""
    """Type of the failure."""
    is_error: bool = False
    """The case could not say anything, as opposed to having found something."""
    output: str = ""


def render_junit(data: ReportData) -> str:
    """The file's text. Equal data give equal text."""
    cases = [*_cell_cases(data), *_evidence_cases(data), *_control_cases(data), _verdict_case(data)]
    root = ET.Element("testsuites", {"name": "equivtest", **_counts(cases)})
    for suite in dict.fromkeys(case.suite for case in cases):
        members = [case for case in cases if case.suite == suite]
        element = ET.SubElement(root, "testsuite", {"name": suite, **_counts(members)})
        for case in members:
            _add_case(element, case)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def write_junit(data: ReportData, path: Path) -> Path:
    """Render the test cases to a file."""
    return write_whole(path, render_junit(data))


def _cell_cases(data: ReportData) -> Iterator[_Case]:
    for comparison in data.comparisons():
        for config in data.configs:
            cells = data.cells_of(comparison, config.name)
            for prompt_id in dict.fromkeys(cells["prompt_id"]):
                yield _cell_case(data, comparison, config.name, prompt_id, cells[cells["prompt_id"] == prompt_id])


def _cell_case(data: ReportData, comparison: Comparison, config: str, prompt_id: str, cells: pd.DataFrame) -> _Case:
    count = num_rejected(cells)
    summary = f"{count} of {words.plural(len(cells), 'cell')} rejected"
    numbers = "\n".join(_cell_line(row) for row in cells.loc[cells["rejected"].astype(bool)].to_dict("records"))
    fails = count > 0 and comparison != "off_biased" and data.word is not Word.EQUIVALENT
    if count and not fails:
        why = "as wanted: the fault was planted" if comparison == "off_biased" else "not confirmed, so no failure"
        summary = f"{summary}, {why}"
    return _Case(
        suite=f"equivtest.{comparison}",
        classname=f"equivtest.{comparison}.{config}",
        name=f"{comparison.words} / {config} / {prompt_id}",
        failure=summary if fails else None,
        kind="rejected",
        output=numbers if fails else f"{summary}\n{numbers}".strip(),
    )


def _evidence_cases(data: ReportData) -> Iterator[_Case]:
    for row in data.evidence.loc[data.evidence["family"] != "marginal"].to_dict("records"):
        family, stratum = str(row["family"]), str(row["stratum"])
        planted = Arm.BIASED in stratum.partition(" / ")[0].split()
        flagged = is_flagged(row["adjusted_p"])
        fails = flagged and not planted and data.word is not Word.EQUIVALENT
        summary = f"adjusted p {words.p_text(row['adjusted_p'])}"
        if flagged and not fails:
            summary += ", as wanted: the fault was planted" if planted else ", not confirmed, so no failure"
        numbers = (
            f"statistic {words.number_text(row['statistic'])}, p {words.p_text(row['p_value'])}, "
            f"estimate {words.number_text(row['estimate'])}, "
            f"interval {words.interval_text((row['ci_low'], row['ci_high']))}, "
            f"margin {words.number_text(row['margin'])}, {words.plural(int(row['num_tokens']), 'token')}"
        )
        yield _Case(
            suite=f"equivtest.{family}",
            classname=f"equivtest.{family}",
            name=f"{row['name']} / {stratum}",
            failure=summary if fails else None,
            kind="flagged",
            output=numbers if fails else f"{summary}\n{numbers}",
        )


def _cell_line(row: Mapping[Hashable, Any]) -> str:
    return (
        f"position {row['position']}: p {words.p_text(row['p_value'])}, "
        f"q {words.p_text(row['q_value'])}, statistic {words.number_text(row['statistic'])}, "
        f"df {words.number_text(row['df'])}, TV {words.number_text(row['tv'])}, "
        f"null mean {words.number_text(row['tv_null_mean'])}, null 97.5 % {words.number_text(row['tv_null_q975'])}"
    )


def _control_cases(data: ReportData) -> Iterator[_Case]:
    for control in data.controls:
        said = f"{control.comparison}: expected {control.expected}; {control.outcome}"
        yield _Case(
            suite="equivtest.controls",
            classname="equivtest.controls",
            name=control.name,
            failure=None if control.passed else said,
            kind="control",
            output=f"{control.num_rejected} of {words.plural(control.num_cells, 'test')} rejected"
            if not control.passed
            else said,
        )


def _verdict_case(data: ReportData) -> _Case:
    lines = "\n".join([data.headline, *data.reasons, f"gate of record: {data.gate_of_record}", *data.next_steps])
    return _Case(
        suite="equivtest.verdict",
        classname="equivtest.verdict",
        name="spec-on samples as spec-off does",
        failure=None if data.word is Word.EQUIVALENT else f"{data.word}: {data.headline}",
        kind=str(data.word),
        is_error=data.word is Word.INVALID,
        output=lines,
    )


def _counts(cases: list[_Case]) -> dict[str, str]:
    errors = sum(case.failure is not None and case.is_error for case in cases)
    failures = sum(case.failure is not None and not case.is_error for case in cases)
    return {"tests": str(len(cases)), "failures": str(failures), "errors": str(errors)}


def _add_case(suite: ET.Element, case: _Case) -> None:
    element = ET.SubElement(suite, "testcase", {"classname": _xml(case.classname), "name": _xml(case.name)})
    if case.failure is not None:
        tag = "error" if case.is_error else "failure"
        failure = ET.SubElement(element, tag, {"type": case.kind, "message": _xml(case.failure)})
        failure.text = _xml(f"{case.failure}\n{case.output}".strip())
    elif case.output:
        ET.SubElement(element, "system-out").text = _xml(case.output)


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
