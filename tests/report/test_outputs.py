"""summary.md, junit.xml, the tables and the terminal agree with the data, with each other and with the exit code."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from equivtest.errors import InvalidSetting
from equivtest.files import write_whole
from equivtest.records import EXIT_CODES, Word
from equivtest.report.data import CELL_COLUMNS, EVIDENCE_COLUMNS, MAY_BE_EMPTY, ReportData
from equivtest.report.html import render_html
from equivtest.report.junit import render_junit, write_junit
from equivtest.report.summary import render_summary, write_summary
from equivtest.report.tables import write_cells, write_evidence
from equivtest.report.terminal import verdict_screen
from equivtest.report.words import interval_text, number_text, p_short, p_text
from tests.report.make import cells, report_data, with_prompt_id, without_law
from tests.report.page import Page

SMALL = {"num_prompts": 2, "num_positions": 6}


def data_with_one_cell(*, rejected: bool, word: Word) -> ReportData:
    """A quiet run, but for one cell of off vs on: chat, position 3."""
    table = cells(num_prompts=2, num_positions=6, faulty=())
    here = (table["comparison"] == "off_on") & (table["prompt_id"] == "chat") & (table["position"] == 3)
    if rejected:
        table.loc[here, ["p_value", "q_value"]] = [3.2e-9, 1.5e-7]
        table.loc[here, "rejected"] = True
    data = without_law(report_data(word, **SMALL))
    return replace(data, cells=table)


def screen(data: ReportData, width: int = 100, *, colour: bool = False) -> str:
    console = Console(width=width, force_terminal=colour, color_system="standard" if colour else None, record=True)
    with console.capture() as captured:
        console.print(verdict_screen(data))
    return captured.get()


class TestSummary:
    @pytest.mark.parametrize("word", Word)
    def test_its_first_line_is_the_verdict(self, word: Word) -> None:
        data = report_data(word, **SMALL)
        lines = render_summary(data).splitlines()
        assert lines[0].startswith("## ")
        assert f" {word.upper()}: " in lines[0]
        assert lines[2] == f"**{data.headline}**"
        assert f"Exit code {EXIT_CODES[word]}." in "\n".join(lines)

    def test_a_pass_that_carries_no_merge_has_not_the_sign_of_one_that_does(self) -> None:
        large, small = report_data(**SMALL), replace(report_data(**SMALL), gates=False)
        assert render_summary(large).startswith("## ✓ EQUIVALENT: ")
        assert render_summary(small).startswith("## ○ EQUIVALENT, GATES NOTHING: ")

    def test_a_rejected_cell_is_listed_and_a_passing_run_lists_none(self) -> None:
        loud = render_summary(data_with_one_cell(rejected=True, word=Word.DIFFERENT))
        quiet = render_summary(data_with_one_cell(rejected=False, word=Word.EQUIVALENT))
        assert "| topp95 | chat | 3 | 3.2e-09 | 1.5e-07 |" in loud
        assert loud.count("▲ rejected") == 1
        assert "| topp95 | off vs on | the test | 1 | 12 |" in loud
        assert "▲ rejected" not in quiet
        assert "| topp95 | off vs on | the test | 0 | 12 |" in quiet

    def test_text_cannot_break_out_of_its_table_cell_or_become_markup(self) -> None:
        hostile = "a|b\n# <script> [x](y) `z` *w*"
        text = render_summary(with_prompt_id(report_data(**SMALL), "story", hostile))
        assert "<script>" not in text.replace("\\<script\\>", "")
        rows = [line for line in text.splitlines() if line.startswith("| topp95 | a")]
        assert rows
        assert all(row.replace("\\|", "").count("|") == 9 for row in rows)

    def test_next_commands_are_code(self) -> None:
        assert "- `equivtest run --config topp95 --budget gate`" in render_summary(
            report_data(Word.INCONCLUSIVE, **SMALL)
        )


class TestJunit:
    @pytest.mark.parametrize("word", Word)
    def test_it_parses_and_its_counts_match_its_cases(self, word: Word) -> None:
        root = ET.fromstring(render_junit(report_data(word, configs=("topp95", "topk50"), **SMALL)))
        suites = root.findall("testsuite")
        for element in (root, *suites):
            assert int(element.attrib["tests"]) == len(element.findall(".//testcase"))
            assert int(element.attrib["failures"]) == len(element.findall(".//failure"))
            assert int(element.attrib["errors"]) == len(element.findall(".//error"))
        num_lines = int(report_data(word, **SMALL).evidence["family"].isin(["law", "joint"]).sum())
        assert len(root.findall(".//testcase")) == 3 * 2 * 2 + 2 * num_lines + 2 + 1
        names = [(case.attrib["classname"], case.attrib["name"]) for case in root.findall(".//testcase")]
        assert len(set(names)) == len(names)

    @pytest.mark.parametrize("word", Word)
    @pytest.mark.parametrize("rejected", [True, False])
    def test_it_is_red_exactly_when_the_exit_code_is_not_zero(self, word: Word, rejected: bool) -> None:
        data = replace(data_with_one_cell(rejected=rejected, word=word), controls=())
        root = ET.fromstring(render_junit(data))
        red = root.findall(".//failure") + root.findall(".//error")
        assert bool(red) == (data.exit_code != 0)

    def test_a_rejected_cell_fails_its_case_with_its_numbers_and_a_passing_run_has_no_failure(self) -> None:
        loud = ET.fromstring(render_junit(data_with_one_cell(rejected=True, word=Word.DIFFERENT)))
        quiet = ET.fromstring(render_junit(data_with_one_cell(rejected=False, word=Word.EQUIVALENT)))
        failed = [case for case in loud.findall(".//testcase") if case.find("failure") is not None]
        assert [case.attrib["name"] for case in failed] == [
            "off vs on / topp95 / chat",
            "spec-on samples as spec-off does",
        ]
        failure = failed[0].find("failure")
        assert failure is not None
        assert failure.attrib["message"] == "1 of 6 cells rejected"
        assert "position 3: p 3.2e-09, q 1.5e-07" in str(failure.text)
        assert quiet.findall(".//failure") == []

    def test_a_line_of_any_family_but_the_cells_own_is_a_case_and_fails_with_the_run(self) -> None:
        data = data_with_one_cell(rejected=False, word=Word.DIFFERENT)
        line = {**report_data(**SMALL).evidence.iloc[0].to_dict(), "family": "identity", "name": "replay"}
        flagged = replace(data, evidence=pd.DataFrame([{**line, "stratum": "on / topp95", "adjusted_p": 1e-9}]))
        root = ET.fromstring(render_junit(flagged))
        (case,) = root.findall(".//testcase[@classname='equivtest.identity']")
        assert case.find("failure") is not None
        quiet = replace(data, word=Word.EQUIVALENT, evidence=flagged.evidence.assign(adjusted_p=0.9))
        (case,) = ET.fromstring(render_junit(quiet)).findall(".//testcase[@classname='equivtest.identity']")
        assert case.find("failure") is None

    def test_an_unconfirmed_rejection_passes_and_says_so(self) -> None:
        root = ET.fromstring(render_junit(data_with_one_cell(rejected=True, word=Word.EQUIVALENT)))
        said = [case.findtext("system-out") or "" for case in root.findall(".//testcase")]
        assert sum("1 of 6 cells rejected, not confirmed, so no failure\nposition 3:" in text for text in said) == 1

    def test_rejections_of_the_planted_fault_are_no_failures_but_missing_it_is(self) -> None:
        caught, missed = (
            ET.fromstring(render_junit(report_data(word, **SMALL))) for word in (Word.EQUIVALENT, Word.INVALID)
        )
        assert caught.findall(".//failure") == []
        assert [failure.attrib["type"] for failure in missed.findall(".//failure")] == ["control"]
        assert [error.attrib["type"] for error in missed.findall(".//error")] == ["invalid"]

    def test_text_that_xml_cannot_hold_is_replaced(self) -> None:
        data = replace(report_data(Word.DIFFERENT, **SMALL), headline="a\x00b\x1b[31m <c> & \ud800 ]]>")
        case = ET.fromstring(render_junit(data)).find(".//testcase[@classname='equivtest.verdict']/failure")
        assert case is not None
        assert "a\ufffdb\ufffd[31m <c> & \ufffd ]]>" in str(case.text)


@pytest.mark.parametrize(("p_value", "below_any_float"), [(0.0, True), (3.2e-9, False)])
def test_a_p_value_below_any_float_is_nowhere_written_as_nought(p_value: float, below_any_float: bool) -> None:
    data = data_with_one_cell(rejected=True, word=Word.DIFFERENT)
    smallest = data.cells["p_value"].idxmin()
    data.cells.loc[smallest, ["p_value", "q_value"]] = p_value
    line = {**report_data(**SMALL).evidence.iloc[0].to_dict(), "family": "law", "stratum": "on / topp95"}
    data = replace(data, evidence=pd.DataFrame([{**line, "p_value": p_value, "adjusted_p": p_value}]))
    page = Page(render_html(data))
    titles = "; ".join(value for _, name, value in page.attributes if name == "title")
    for text in (page.text, titles, render_summary(data), render_junit(data), screen(data)):
        assert ("< 1e-300" in text.replace("\\", "").replace("&lt;", "<")) is below_any_float
        assert not re.search(r"\b[pq] 0(?![.\d])", text)
        assert "| 0 | 0 |" not in text


class TestTables:
    def test_cells_and_evidence_come_back_as_they_were(self, tmp_path: Path) -> None:
        data = report_data(Word.DIFFERENT, **SMALL)
        read_cells = pq.read_table(write_cells(data, tmp_path / "cells.parquet")).to_pandas()
        read_evidence = pq.read_table(write_evidence(data, tmp_path / "evidence.parquet")).to_pandas()
        assert tuple(read_cells.columns) == CELL_COLUMNS
        assert tuple(read_evidence.columns) == EVIDENCE_COLUMNS
        pd.testing.assert_frame_equal(read_cells, data.cells, check_dtype=False)
        pd.testing.assert_frame_equal(
            read_evidence, data.evidence.astype(dict.fromkeys(MAY_BE_EMPTY, float)), check_dtype=False
        )

    def test_what_a_test_does_not_define_is_null_and_not_nan(self, tmp_path: Path) -> None:
        data = report_data(**SMALL)
        data.cells.loc[data.cells.index[0], "df"] = float("nan")
        cells_table = pq.read_table(write_cells(data, tmp_path / "cells.parquet"))
        evidence_table = pq.read_table(write_evidence(data, tmp_path / "evidence.parquet"))
        assert cells_table.column("df").null_count == 1
        assert evidence_table.column("margin").null_count == int(data.evidence["margin"].isna().sum()) > 0


def test_every_file_has_the_same_bytes_for_equal_data(tmp_path: Path) -> None:
    writers = {
        "cells.parquet": write_cells,
        "evidence.parquet": write_evidence,
        "summary.md": write_summary,
        "junit.xml": write_junit,
    }
    for name, write in writers.items():
        first = write(report_data(Word.DIFFERENT, **SMALL), tmp_path / name).read_bytes()
        again = write(report_data(Word.DIFFERENT, **SMALL), tmp_path / name).read_bytes()
        other = write(
            report_data(Word.DIFFERENT, configs=("topk50",), num_prompts=2, num_positions=6), tmp_path / name
        ).read_bytes()
        assert first == again
        assert first != other


class TestTerminal:
    @pytest.mark.parametrize("width", [40, 80, 140])
    @pytest.mark.parametrize("word", Word)
    def test_the_last_line_is_the_verdict_and_no_line_is_too_wide(self, word: Word, width: int) -> None:
        lines = screen(report_data(word, **SMALL), width).rstrip("\n").split("\n")
        assert lines[-1].strip() == f"{'✓✗?!'[list(Word).index(word)]} {word.upper()} (exit code {EXIT_CODES[word]})"
        assert max(map(len, lines)) <= width

    def test_green_is_for_a_pass_that_carries_a_merge(self) -> None:
        green = "\x1b[1;32m"
        large, small = report_data(**SMALL), replace(report_data(**SMALL), gates=False)
        assert f"{green}✓ EQUIVALENT" in screen(large, colour=True).splitlines()[-1]
        last = screen(small, colour=True).splitlines()[-1]
        assert "○ EQUIVALENT, GATES NOTHING" in last
        assert green not in last

    def test_it_fits_one_screen(self) -> None:
        assert len(screen(report_data(Word.EQUIVALENT), 100).splitlines()) <= 24
        assert len(screen(report_data(Word.DIFFERENT), 100).splitlines()) <= 28, "with a diagnosis of two sentences"

    def test_a_rejected_cell_is_marked_and_a_passing_run_has_no_mark(self) -> None:
        loud = screen(data_with_one_cell(rejected=True, word=Word.DIFFERENT))
        quiet = screen(data_with_one_cell(rejected=False, word=Word.EQUIVALENT))
        assert "topp95 / chat / position 3: p 3.2e-09" in loud
        assert loud.count("▲ rejected") == 1
        assert "▲" not in quiet

    def test_text_in_square_brackets_is_text(self) -> None:
        data = replace(report_data(**SMALL), headline="[red]not red[/red] [link=x]y[/link]")
        assert "[red]not red[/red] [link=x]y[/link]" in screen(data)

    def test_colour_only_where_the_console_has_it(self) -> None:
        assert "\x1b[" in screen(report_data(**SMALL), colour=True)
        assert "\x1b[" not in screen(report_data(**SMALL))


class TestData:
    def test_a_missing_column_an_unknown_comparison_or_an_empty_number_is_refused(self) -> None:
        data = report_data(**SMALL)
        with pytest.raises(InvalidSetting, match="lacks tv"):
            replace(data, cells=data.cells.drop(columns="tv"))
        with pytest.raises(InvalidSetting, match="must be one of off_on"):
            replace(data, cells=data.cells.assign(comparison="on_off"))
        with pytest.raises(InvalidSetting, match=r"ReportData\.cells\.p_value"):
            replace(data, cells=data.cells.assign(p_value=float("nan")))
        with pytest.raises(InvalidSetting, match="must be listed in configs"):
            replace(data, cells=data.cells.assign(config="other"))

    def test_an_empty_df_is_allowed(self) -> None:
        data = report_data(**SMALL)
        assert replace(data, cells=data.cells.assign(df=float("nan"))).cells["df"].isna().all()


class TestWords:
    @pytest.mark.parametrize(
        ("p_value", "text", "short"),
        [
            (1.0, "1", "1"),
            (0.9951, "0.995", "1"),
            (0.5, "0.5", ".50"),
            (0.0312, "0.0312", ".031"),
            (0.00099, "9.9e-04", ".001"),
            (2.1e-7, "2.1e-07", "2e-7"),
            (9.7e-10, "9.7e-10", "1e-9"),
            (3e-12, "3.0e-12", "e-12"),
            (1e-300, "1.0e-300", "e-300"),
            (4e-305, "< 1e-300", "<e-300"),
            (0.0, "< 1e-300", "<e-300"),
        ],
    )
    def test_p_values_read_well_and_the_short_form_fits_a_cell(self, p_value: float, text: str, short: str) -> None:
        assert p_text(p_value) == text
        assert p_short(p_value) == short
        assert len(short) <= 6

    def test_numbers_are_grouped_rounded_or_absent(self) -> None:
        assert number_text(65_536) == "65,536"
        assert number_text(3.0) == "3"
        assert number_text(0.123456) == "0.1235"
        assert number_text(None) == number_text(float("nan")) == "-"
        assert interval_text((-0.002, 0.0061)) == "-0.002 to 0.0061"
        assert interval_text((None, None)) == "-"


def test_a_report_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_whole(tmp_path / "summary.md", "old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
