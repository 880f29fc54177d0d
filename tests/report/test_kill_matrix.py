"""The kill matrix as page, Markdown, parquet and terminal screen."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from equivtest.records import KILL_LEVEL, Family, Kill, Nature
from equivtest.report.kill_matrix import COLUMNS, KillMatrix, Outcome, render_html, render_markdown, write_kill_matrix
from equivtest.report.terminal import kill_screen


def outcome(name: str, nature: Nature, *found: Family, **fields: object) -> Outcome:
    kills = {
        family: Kill(
            family=family,
            test="bias",
            p_value=1e-9 if family in found else 0.3,
            num_tokens=4096 if family in found else None,
        )
        for family in (Family.MARGINAL, Family.LAW, Family.REPLAY)
    }
    base = Outcome(
        name=name,
        nature=nature,
        kind="a kind",
        ids=(7,),
        reports=("engine#7",),
        stage="accept",
        description="what is <b>wrong</b> & why",
        config="topp95",
        drafter="early_exit",
        acceptance="chain",
        expected=frozenset({Family.LAW}),
        kills=kills,
        diagnosis=("acceptance is inflated",) if found else (),
        named_stage="accept" if found else None,
        refused=None,
    )
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def matrix(*outcomes: Outcome) -> KillMatrix:
    return KillMatrix(outcomes=outcomes, provenance={"command": "equivtest controls", "seconds": 3.0})


RIGHT = matrix(
    outcome("correct", Nature.CONTROL),
    outcome("variant", Nature.VARIANT),
    outcome("lossy", Nature.LOSSY, Family.LAW),
    outcome("fault", Nature.FAULT, Family.LAW, Family.MARGINAL),
    outcome("replayed", Nature.FAULT, Family.REPLAY, named_stage="streams"),
    outcome("refused", Nature.FAULT, kills={}, refused="InvalidKernelInput: row 3"),
)


def test_a_matrix_that_is_as_it_must_be_says_so() -> None:
    assert RIGHT.as_expected
    assert RIGHT.summary == (
        "Correct decoders (A/A): 1 of 1 passed",
        "Valid variants: 1 of 1 passed",
        "Lossy by design: 1 of 1 found",
        "Faults: 3 of 3 found",
        "diagnosis names the stage of 1 of 2 faults that were found",
    )


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (outcome("survivor", Nature.FAULT), "not found, and must be: survivor"),
        (outcome("survivor", Nature.LOSSY), "not found, and must be: survivor"),
        (outcome("blamed", Nature.VARIANT, Family.LAW), "found, and must not be: blamed"),
        (outcome("blamed", Nature.CONTROL, Family.REPLAY), "found, and must not be: blamed"),
        (outcome("stuck", Nature.VARIANT, kills={}, refused="no"), "found, and must not be: stuck"),
        (outcome("broken", Nature.FAULT, kills={}, failed="IndexError: 7"), "broken: NOT MEASURED: IndexError: 7"),
        (outcome("broken", Nature.VARIANT, kills={}, failed="IndexError: 7"), "broken: NOT MEASURED: IndexError: 7"),
    ],
)
def test_one_subject_that_is_not_as_it_must_be_is_named(wrong: Outcome, line: str) -> None:
    spoilt = matrix(*RIGHT.outcomes, wrong)
    assert not spoilt.as_expected
    assert line in spoilt.summary
    for text in (render_html(spoilt), render_markdown(spoilt), screen(spoilt)):
        assert line in text


def test_a_fault_too_subtle_for_the_budget_may_be_missed_and_is_named() -> None:
    subtle = outcome("subtle", Nature.FAULT, may_be_missed=True)
    assert matrix(*RIGHT.outcomes, subtle).as_expected
    assert "Faults: 3 of 4 found; too subtle for this budget: subtle" in matrix(*RIGHT.outcomes, subtle).summary
    blamed = outcome("blamed", Nature.VARIANT, Family.LAW, may_be_missed=True)
    assert not matrix(*RIGHT.outcomes, blamed).as_expected


def test_an_empty_matrix_has_shown_nothing() -> None:
    assert not matrix().as_expected


def test_found_means_at_the_level() -> None:
    kill = Kill(family=Family.LAW, test="bias", p_value=KILL_LEVEL, num_tokens=1)
    assert kill.found
    assert not dataclasses.replace(kill, p_value=KILL_LEVEL * 1.01).found


def test_the_page_is_whole_and_escapes_what_others_wrote() -> None:
    page = render_html(RIGHT)
    HTMLParser().feed(page)
    assert "what is &lt;b&gt;wrong&lt;/b&gt; &amp; why" in page
    assert "<b>wrong" not in page
    assert "src=" not in page
    assert page.count("<tr>") >= len(RIGHT.outcomes)
    for subject in RIGHT.outcomes:
        assert subject.name in page


def test_the_markdown_has_a_row_a_subject_and_its_tokens() -> None:
    lines = render_markdown(RIGHT).splitlines()
    (row,) = [line for line in lines if line.startswith("| ✓ | fault |")]
    assert row.count("● 4k") == 2
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_the_parquet_file_has_a_row_for_every_family_that_looked(tmp_path: Path) -> None:
    write_kill_matrix(RIGHT, tmp_path)
    table = pq.read_table(tmp_path / "controls.parquet")
    assert table.column_names == list(COLUMNS)
    assert table.num_rows == 5 * 3 + 1
    rows = {(row["subject"], row["family"]): row for row in table.to_pylist()}
    assert rows["fault", "law"]["num_tokens"] == 4096
    assert rows["fault", "replay"]["num_tokens"] is None
    assert rows["fault", "law"]["expected"]
    assert rows["refused", None]["refused"].startswith("InvalidKernelInput")
    assert {row["as_expected"] for row in rows.values()} == {True}
    record = json.loads((tmp_path / "controls.json").read_text())
    assert record["as_expected"] is True
    assert record["summary"] == list(RIGHT.summary)


def test_the_same_matrix_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_kill_matrix(RIGHT, tmp_path / folder)
    for name in ("controls.parquet", "controls.html", "controls.md", "controls.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def screen(shown: KillMatrix) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(kill_screen(shown))
    return capture.get()


def test_the_last_line_of_the_screen_says_how_it_ended() -> None:
    assert screen(RIGHT).rstrip().splitlines()[-1] == "as it must be"
    assert screen(matrix(outcome("blamed", Nature.VARIANT, Family.LAW))).rstrip().endswith("NOT as it must be")
