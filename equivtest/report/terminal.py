"""The verdict on one terminal screen; the last line is the verdict itself."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from equivtest.records import EXIT_CODES, Comparison, Family, Word
from equivtest.report import words
from equivtest.report.data import COMPARISON_EXPECTS, ReportData
from equivtest.report.kill_matrix import NATURE_TITLES, KillMatrix, kill_text
from equivtest.report.select import num_rejected, worst_cells

_STYLES: Mapping[Word, str] = {
    Word.EQUIVALENT: "bold green",
    Word.DIFFERENT: "bold red",
    Word.INCONCLUSIVE: "bold yellow",
    Word.INVALID: "bold magenta",
}
_NUM_WORST = 3
_SHORT: Mapping[Family, str] = {
    Family.MARGINAL: "marg",
    Family.JOINT: "joint",
    Family.LAW: "law",
    Family.SUPPORT: "supp",
    Family.DUPLICATES: "dupl",
    Family.REPLAY: "repl",
    Family.DRAFTS: "drft",
    Family.IDENTITY: "iden",
    Family.LOGPROBS: "logp",
}


def verdict_screen(data: ReportData) -> RenderableType:
    """What a person sees at the end of a run: comparisons, controls, the worst cells, what to do next, the verdict.

    Print it with a rich Console, which knows the width and whether to use colour. Text in it is never markup.
    """
    parts: list[RenderableType] = [_comparisons(data)]
    if data.controls:
        parts += [Text(), _controls(data)]
    worst = worst_cells(data, Comparison.OFF_ON, "p_value", _NUM_WORST).to_dict("records")
    if worst:
        parts += [Text(), Text("smallest p-values, off vs on", style="dim")]
        parts += [Text(_cell_line(row), style="red" if row["rejected"] else "") for row in worst]
    parts.append(Text())
    parts += [Text(f"- {reason}") for reason in data.reasons]
    if data.diagnosis:
        parts += [Text("diagnosis:", style="dim"), *(Text(f"  {sentence}") for sentence in data.diagnosis)]
    if data.next_steps:
        parts += [Text("next:", style="dim"), *(Text(f"  {step}") for step in data.next_steps)]
    parts.append(Text.assemble(("gate of record: ", "dim"), data.gate_of_record))
    parts += [Text(data.headline, style="bold"), verdict_line(data)]
    return Group(*parts)


def verdict_line(data: ReportData) -> Text:
    """The verdict in one short line: `✓ EQUIVALENT (exit code 0)`."""
    return verdict_text(data.word, gates=data.gates)


def verdict_text(word: Word, *, gates: bool = True) -> Text:
    """The same of a word. `gates`: whether a run of this size may decide a merge; green is for what it passes."""
    said = f"{words.mark(word, gates=gates)} {words.verdict_text(word, gates=gates).upper()}"
    style = _STYLES[word] if gates or word is not Word.EQUIVALENT else "bold"
    return Text.assemble((said, style), f" (exit code {EXIT_CODES[word]})")


def kill_screen(matrix: KillMatrix) -> RenderableType:
    """The kill matrix: a row a subject, a column a family; the last lines say whether all came out as they must."""
    parts: list[RenderableType] = []
    for nature, title in NATURE_TITLES.items():
        own = matrix.of(nature)
        if not own:
            continue
        table = plain_table("", "subject", *(f">{_SHORT[family]}" for family in Family), "stage named")
        for outcome in own:
            mark = Text("✓", style="green") if outcome.as_expected else Text("✗", style="bold red")
            cells = [Text(kill_text(outcome.kills.get(family))) for family in Family]
            table.add_row(
                mark,
                Text(outcome.name),
                *cells,
                Text("FAILED" if outcome.failed else "refused" if outcome.refused else outcome.named_stage or ""),
            )
        parts += [Text(title, style="bold"), table, Text()]
    style = "bold green" if matrix.as_expected else "bold red"
    parts += [Text(line) for line in matrix.summary]
    parts.append(Text("as it must be" if matrix.as_expected else "NOT as it must be", style=style))
    return Group(*parts)


def _cell_line(row: Mapping[Hashable, Any]) -> str:
    where = f"  {row['config']} / {row['prompt_id']} / position {row['position']}"
    numbers = f"p {words.p_text(row['p_value'])}, q {words.p_text(row['q_value'])}, TV {row['tv']:.3f}"
    mark = f" {words.REJECTED_MARK} rejected" if row["rejected"] else ""
    return f"{where}: {numbers} (null up to {row['tv_null_q975']:.3f}){mark}"


def _comparisons(data: ReportData) -> Table:
    table = plain_table("config", "compared", "expected", ">rejected", ">cells")
    for config in data.configs:
        for comparison in data.comparisons(config.name):
            cells = data.cells_of(comparison, config.name)
            table.add_row(
                Text(config.name),
                Text(comparison.words),
                Text(COMPARISON_EXPECTS[comparison]),
                Text(f"{num_rejected(cells):,}"),
                Text(f"{len(cells):,}"),
            )
    return table


def _controls(data: ReportData) -> Table:
    table = plain_table("control", "expected", "outcome", "result")
    for control in data.controls:
        style = {True: "green", False: "bold red", None: "yellow"}[control.passed]
        result = Text(words.control_text(control.passed), style=style)
        table.add_row(Text(control.name), Text(control.expected), Text(control.outcome), result)
    return table


def plain_table(*columns: str) -> Table:
    """A table without borders; a column whose name starts with ">" is a number."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table
