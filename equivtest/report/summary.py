"""summary.md: the verdict on one screen of GitHub-flavoured Markdown, for a pull request or a job summary."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from equivtest.files import write_whole
from equivtest.records import Comparison
from equivtest.report import words
from equivtest.report.data import COMPARISON_ROLES, ReportData
from equivtest.report.select import num_rejected, worst_cells

_NUM_WORST = 5
_MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def render_summary(data: ReportData) -> str:
    """The summary; the verdict is its first line. Equal data give equal text."""
    return "\n".join(_lines(data)) + "\n"


def write_summary(data: ReportData, path: Path) -> Path:
    """Render the summary to a file."""
    return write_whole(path, render_summary(data))


def escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _lines(data: ReportData) -> Iterator[str]:
    verdict = words.verdict_text(data.word, gates=data.gates).upper()
    yield f"## {words.mark(data.word, gates=data.gates)} {verdict}: {escape(data.title)}"
    yield ""
    yield f"**{escape(data.headline)}**"
    yield ""
    for reason in data.reasons:
        yield f"- {escape(reason)}"
    if data.reasons:
        yield ""
    if data.diagnosis:
        yield "### Diagnosis"
        yield ""
        yield from (f"- {escape(sentence)}" for sentence in data.diagnosis)
        yield ""
    yield f"Literal gate of record: {escape(data.gate_of_record)}. Exit code {data.exit_code}."
    yield ""
    yield "### Comparisons"
    yield ""
    yield from table(
        ("Config", "Compared", "Role", "Rejected", "Cells"),
        [
            (
                config.name,
                comparison.words,
                COMPARISON_ROLES[comparison],
                str(num_rejected(cells)),
                str(len(cells)),
            )
            for config in data.configs
            for comparison in data.comparisons(config.name)
            for cells in [data.cells_of(comparison, config.name)]
        ],
    )
    if data.controls:
        yield "### Controls"
        yield ""
        yield from table(
            ("Control", "Compared", "Expected", "Outcome", "Result"),
            [(c.name, c.comparison, c.expected, c.outcome, words.control_text(c.passed)) for c in data.controls],
        )
    yield "### Smallest p-values, off vs on"
    yield ""
    yield from table(
        ("Config", "Prompt", "Position", "p", "q", "TV", "Null 97.5 %", "Rejected"),
        [
            (
                row["config"],
                row["prompt_id"],
                str(row["position"]),
                words.p_text(row["p_value"]),
                words.p_text(row["q_value"]),
                f"{row['tv']:.3f}",
                f"{row['tv_null_q975']:.3f}",
                f"{words.REJECTED_MARK} rejected" if row["rejected"] else "no",
            )
            for row in worst_cells(data, Comparison.OFF_ON, "p_value", _NUM_WORST).to_dict("records")
        ],
    )
    if data.next_steps:
        yield "### What to do next"
        yield ""
        for step in data.next_steps:
            yield f"- `{step}`" if step.startswith("equivtest ") and "`" not in step else f"- {escape(step)}"
        yield ""
    yield f"Run {escape(data.run_id)}. The numbers are in its report.html, cells.parquet and evidence.parquet."


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(escape(value) for value in row) + " |"
    yield ""
