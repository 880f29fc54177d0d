"""The evidence against the exact law: its figures show what they should, on the page and in every other output."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from rich.console import Console

from equivtest.errors import InvalidSetting
from equivtest.records import Comparison, Word
from equivtest.report.curve_figures import bias_seen, power_figure, quantile_figure
from equivtest.report.data import ReportData
from equivtest.report.html import render_html
from equivtest.report.junit import render_junit
from equivtest.report.law_figures import forest_figures, pit_figure
from equivtest.report.select import law_evidence
from equivtest.report.summary import render_summary
from equivtest.report.terminal import verdict_screen
from equivtest.report.words import power_of_ten
from tests.report.make import report_data, without_law
from tests.report.page import Page

SMALL = {"num_prompts": 2, "num_positions": 6}
DATA = report_data(**SMALL)
LAW = law_evidence(DATA, "topp95")


@cache
def plain_page() -> str:
    """The page of DATA, rendered once."""
    return render_html(DATA)


def ids(drawing: str | None, pattern: str) -> list[str]:
    return re.findall(rf'id="[\w-]*?-({pattern})"', str(drawing))


def num_points(drawing: str | None, series: str) -> int:
    group = re.search(rf'<g id="[\w-]*-{series}">.*?</g>\n</g>', str(drawing), flags=re.DOTALL)
    assert group is not None
    return group.group().count("<use ")


def hostile(data: ReportData, text: str) -> ReportData:
    return replace(data, diagnosis=(text,), evidence=data.evidence.assign(name=text, method=text))


class TestForest:
    def test_each_unit_has_its_panel_with_a_line_for_each_arm_and_test_and_the_margins(self) -> None:
        probability, distance, nats, slope = forest_figures(LAW, name="f")
        assert sorted(ids(probability, "(?:on|biased|off)-bias[a-z_0-9]*")) == sorted(
            f"{arm}-bias{slot}" for arm in ("on", "biased") for slot in ("", *(f"_slot_{j}" for j in range(4)))
        )
        assert ids(probability, "margin-[a-z_0-9]+") == ["margin-bias"]
        assert ids(distance, "margin-[a-z_0-9]+") == ["margin-rank", "margin-vocab"]
        assert len(ids(distance, "(?:on|off|biased)-(?:rank|vocab)")) == 6
        assert "off-surprisal_plain" in ids(nats, "off-[a-z_]+")
        assert len(ids(slope, "on-lag_[a-z]+")) == 3
        assert ids(nats, "margin-.*?") == ids(slope, "margin-.*?") == []

    def test_a_line_without_an_interval_is_left_out_and_a_test_without_a_margin_has_no_band(self) -> None:
        gone = LAW.assign(ci_low=LAW["ci_low"].mask(LAW["name"] == "bias_slot_2"), margin=None)
        probability = forest_figures(gone, name="f")[0]
        assert "on-bias_slot_1" in ids(probability, "on-bias[a-z_0-9]*")
        assert "on-bias_slot_2" not in ids(probability, "on-bias[a-z_0-9]*")
        assert ids(probability, "margin-.*?") == []
        assert forest_figures(LAW.iloc[:0], name="f") == ()

    def test_a_large_planted_fault_is_an_arrow_with_its_number_and_a_small_one_is_a_point(self) -> None:
        biased = (LAW["arm"] == "biased") & (LAW["name"] == "bias")
        large = LAW.assign(estimate=LAW["estimate"].mask(biased, 0.0987))
        small = LAW.assign(estimate=LAW["estimate"].mask(biased, 0.0031))
        assert ">0.099<" in forest_figures(large, name="f")[0]
        assert ">0.0031<" not in forest_figures(small, name="f")[0]

    def test_ticks_and_numbers_keep_their_digits(self) -> None:
        numbers = re.findall(r">(0\.\d+)</text>", forest_figures(LAW, name="f")[1])
        assert {"0.005", "0.010"} <= set(numbers)

    def test_equal_evidence_gives_equal_bytes(self) -> None:
        assert forest_figures(LAW, name="f") == forest_figures(LAW.copy(), name="f")
        assert forest_figures(LAW, name="f") != forest_figures(LAW.assign(estimate=0.0), name="f")


class TestPit:
    def test_arm_on_has_its_steps_and_its_band_and_arm_off_a_point_a_bin(self) -> None:
        drawing = pit_figure(DATA.pit, order="rank", name="p")
        assert ids(drawing, "band|on|off") == ["band", "on", "off"]
        assert num_points(drawing, "off") == 20
        assert "biased" not in str(drawing)

    def test_it_says_how_many_bars_leave_the_band(self) -> None:
        flat = DATA.pit.assign(count=DATA.pit["expected"])
        here = (flat["arm"] == "on") & (flat["order"] == "rank") & flat["bin"].isin([0, 1, 19])
        tilted = flat.assign(count=flat["count"].mask(here, 1.5 * flat["expected"]))
        assert "0 of 20 bars outside" in str(pit_figure(flat, order="rank", name="p"))
        assert "3 of 20 bars outside" in str(pit_figure(tilted, order="rank", name="p"))
        assert "0 of 20 bars outside" in str(pit_figure(tilted, order="vocab", name="p"))

    def test_without_arm_on_there_is_no_figure_and_without_arm_off_no_points(self) -> None:
        assert pit_figure(DATA.pit[DATA.pit["arm"] == "off"], order="rank", name="p") is None
        alone = pit_figure(DATA.pit[DATA.pit["arm"] == "on"], order="rank", name="p")
        assert ids(alone, "band|on|off") == ["band", "on"]


class TestQuantiles:
    def test_all_small_p_values_are_drawn_and_a_hundred_thousand_cells_stay_small(self) -> None:
        few = quantile_figure(DATA.quantiles, comparison=Comparison.OFF_ON, name="q")
        assert num_points(few, "points") == 12
        assert ids(few, "band") == ["band"]
        one = DATA.quantiles[DATA.quantiles["comparison"] == "off_on"]
        many = pd.concat([one] * 8_000).assign(expected=lambda t: (pd.RangeIndex(len(t)) + 0.5) / len(t))
        drawing = quantile_figure(many, comparison=Comparison.OFF_ON, name="q")
        assert 80 <= num_points(drawing, "points") <= 120
        assert len(str(drawing)) < 20_000

    def test_a_p_value_of_zero_is_drawn_and_said(self) -> None:
        zero = DATA.quantiles.assign(observed=DATA.quantiles["observed"].mask(DATA.quantiles["expected"] < 0.1, 0.0))
        drawing = str(quantile_figure(zero, comparison=Comparison.OFF_ON, name="q"))
        assert "the smallest &lt; 1e-300" in drawing
        assert "nan" not in drawing
        assert ">1e-15<" in drawing

    def test_a_comparison_without_cells_has_no_figure(self) -> None:
        assert quantile_figure(DATA.quantiles.iloc[:0], comparison=Comparison.OFF_ON, name="q") is None


class TestPower:
    def test_both_curves_the_target_and_the_bias_that_is_seen_are_drawn(self) -> None:
        drawing = power_figure(DATA.power, title="topp95", name="w")
        assert ids(drawing, "target|seen|power-[a-z_]+") == ["target", "power-law", "seen", "power-neyman_pearson"]
        assert bias_seen(DATA.power, "law") == pytest.approx(0.0055)
        assert "law family reaches 90 % at 0.0055" in str(drawing)

    def test_a_run_that_never_reaches_the_target_says_so(self) -> None:
        weak = DATA.power.assign(power=0.5 * DATA.power["power"])
        drawing = power_figure(weak, title="topp95", name="w")
        assert ids(drawing, "seen") == []
        assert bias_seen(weak, "law") is None
        assert "no bias of the table is seen with 90 % power" in Page(render_html(replace(DATA, power=weak))).text
        assert power_figure(DATA.power.iloc[:0], title="topp95", name="w") is None


class TestPage:
    def test_the_diagnosis_leads_the_verdict_when_there_is_one(self) -> None:
        ill = Page(render_html(report_data(Word.DIFFERENT, **SMALL))).text
        first, second = report_data(Word.DIFFERENT, **SMALL).diagnosis
        places = [ill.index(text) for text in ("Do not merge.", first, second, "What to do next", "Controls")]
        assert places == sorted(places)
        assert "What is different" in ill
        assert "What is different" not in Page(plain_page()).text

    def test_a_flagged_line_is_marked_in_the_readable_table_and_one_above_the_level_is_not(self) -> None:
        on = (DATA.evidence["stratum"] == "on / topp95") & (DATA.evidence["name"] == "bias")
        calm = DATA.evidence.assign(adjusted_p=0.011)
        loud = calm.assign(adjusted_p=calm["adjusted_p"].mask(on, 0.009))
        flagged = Page(render_html(replace(DATA, evidence=loud))).text
        assert "▲ 0.009" in flagged
        assert "▲ 1 flagged in arm on" in flagged
        quiet = Page(render_html(replace(DATA, evidence=calm))).text
        assert "▲ 0.0" not in quiet
        assert "flagged in arm" not in quiet

    def test_a_run_without_a_law_has_no_trace_of_it(self) -> None:
        page = Page(render_html(without_law(DATA)))
        assert {"law", "power", "diagnosis"}.isdisjoint(page.ids)
        for word in ("Exact law", "Power", "PIT", "Margins.", "All p-values together", "By the law"):
            assert word not in page.text
        assert {"law", "power"} <= set(Page(plain_page()).ids)

    def test_hostile_names_and_sentences_stay_text(self) -> None:
        text = "<script>alert('x')</script>\"'&<b>"
        page = render_html(hostile(DATA, text))
        assert page.count("<script") == plain_page().count("<script")
        assert text in Page(page).text

    def test_three_configs_stay_under_two_megabytes_and_a_half(self) -> None:
        page = render_html(report_data(configs=("topp95", "topk50", "topk20p90")))
        assert len(page.encode()) < 2_500_000
        assert len(Page(page).ids) == len(set(Page(page).ids))


class TestOtherOutputs:
    @pytest.mark.parametrize("word", [Word.DIFFERENT, Word.EQUIVALENT])
    def test_summary_and_screen_have_the_diagnosis(self, word: Word) -> None:
        data = report_data(word, **SMALL)
        console = Console(width=400, record=True)
        with console.capture() as captured:
            console.print(verdict_screen(data))
        for text in (captured.get(), render_summary(data).replace("\\", "")):
            assert all(text.count(sentence) == 1 for sentence in data.diagnosis)

    def test_ticks_of_small_p_values(self) -> None:
        assert [power_of_ten(exponent) for exponent in (0, -1, -2, -3, -12)] == ["1", "0.1", "0.01", "1e-3", "1e-12"]

    @pytest.mark.parametrize("stratum", ["on / topp95", "off vs on / topp95"])
    def test_flagged_evidence_fails_its_case_unless_the_verdict_is_equivalent(self, stratum: str) -> None:
        failed = junit_failures(Word.DIFFERENT, stratum)
        assert [name.endswith(f" / {stratum}") for name in failed] == [True, False], failed
        assert junit_failures(Word.EQUIVALENT, stratum) == []

    def test_flagged_evidence_of_the_planted_fault_never_fails(self) -> None:
        for stratum in ("biased / topp95", "off vs biased / topp95"):
            assert junit_failures(Word.DIFFERENT, stratum) == ["spec-on samples as spec-off does"]


def junit_failures(word: Word, stratum: str) -> list[str]:
    """Failed cases of a run in which only the first line of evidence of that stratum is flagged."""
    data = report_data(word, **SMALL)
    family = data.evidence["family"].isin(["law", "joint"])
    first = data.evidence.index[family & (data.evidence["stratum"] == stratum)][0]
    adjusted = data.evidence["adjusted_p"].mask(family, 0.5).where(data.evidence.index != first, 0.0099)
    calm = data.cells.assign(rejected=False)
    root = ET.fromstring(
        render_junit(replace(data, cells=calm, controls=(), evidence=data.evidence.assign(adjusted_p=adjusted)))
    )
    return [case.attrib["name"] for case in root.findall(".//testcase") if case.find("failure") is not None]


class TestFrames:
    @pytest.mark.parametrize(
        ("frame", "column", "wrong"),
        [
            ("pit", "arm", "onn"),
            ("pit", "order", "token"),
            ("pit", "config", "other"),
            ("quantiles", "comparison", "on_off"),
            ("power", "test", "bayes"),
            ("power", "config", "other"),
        ],
    )
    def test_a_missing_column_an_empty_value_or_an_unknown_word_is_refused(
        self, frame: str, column: str, wrong: str
    ) -> None:
        table = getattr(DATA, frame)
        with pytest.raises(InvalidSetting, match=f"lacks {column}"):
            replace(DATA, **{frame: table.drop(columns=column)})
        with pytest.raises(InvalidSetting, match=rf"ReportData\.{frame}\.{column}"):
            replace(DATA, **{frame: table.assign(**{column: None})})
        with pytest.raises(InvalidSetting, match=rf"ReportData\.{frame}\.{column}.*must be"):
            replace(DATA, **{frame: table.assign(**{column: wrong})})
