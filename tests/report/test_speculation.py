"""Acceptance by slot beside what the law gives, and speed."""

from __future__ import annotations

from dataclasses import replace

from equivtest.report.figures import acceptance_figure
from equivtest.report.html import render_html
from equivtest.report.speculation import acceptance_sections, speed_rows
from tests.report.make import report_data
from tests.report.page import Page

DATA = report_data(num_prompts=2, num_positions=6)


def test_the_share_of_a_faulty_arm_is_outside_its_band_and_that_of_a_correct_one_is_not() -> None:
    (section,) = acceptance_sections(DATA)
    assert {(row.arm, row.outside) for row in section.rows} == {("on", False), ("on_null", False), ("biased", True)}
    assert Page(render_html(DATA)).text.count(" outside ") >= 4
    assert [row.expected for row in section.rows if row.arm == "on"] == ["0.6200", "0.5900", "0.5600", "0.5300"]


def test_where_the_law_is_not_known_nothing_is_said_of_it() -> None:
    (section,) = acceptance_sections(replace(DATA, expected=DATA.expected.iloc[:0]))
    assert not section.has_expected
    assert not any(row.outside for row in section.rows)
    assert {row.expected for row in section.rows} == {"-"}


def test_the_figure_has_a_line_for_each_arm_with_a_law() -> None:
    drawing = acceptance_figure(DATA.acceptance, DATA.expected, name="slots")
    assert drawing is not None
    assert all(f'id="slots-law-{arm}"' in drawing for arm in ("on", "on_null", "biased"))
    assert "(the law: 0.62, 0.59, 0.56, 0.53)" in drawing
    assert "the law" not in str(acceptance_figure(DATA.acceptance, DATA.expected.iloc[:0], name="slots"))


def test_speed_is_told_against_arm_off() -> None:
    assert [(row.arm, row.tokens_per_s, row.ratio) for row in speed_rows(DATA)] == [
        ("off", "1,024", "1.00"),
        ("on", "2,048", "2.00"),
    ]
    assert speed_rows(replace(DATA, speed=())) == ()
