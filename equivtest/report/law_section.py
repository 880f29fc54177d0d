"""What the page shows of the exact law: for each configuration its figures and a table that can be read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from equivtest.records import Arm
from equivtest.report import words
from equivtest.report.curve_figures import bias_seen, power_figure
from equivtest.report.data import ReportData
from equivtest.report.law_figures import forest_figures, pit_figure
from equivtest.report.select import is_flagged, law_evidence

TEST_WORDS = {
    "bias": "drafts kept too often or too seldom",
    "surprisal": "tokens too likely or too unlikely",
    "rank": "shape of the law",
    "vocab": "draws along the vocabulary",
    "lag": "coins shared with the token before",
    "rows": "coins shared across the batch",
    "duplicates": "equal samples",
    "support": "tokens that the filters remove",
    "residual": "rejected drafts put out again",
    "logprobs": "reported log-probabilities",
}
"""What a test looks at, by the first word of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LawRow:
    """One test on one arm."""

    arm: str
    estimate: str
    interval: str
    margin: str
    adjusted_p: str
    num_tokens: int
    flagged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LawSection:
    """The evidence against the exact law of one configuration."""

    name: str
    forest: tuple[Markup, ...]
    pit: tuple[Markup, ...]
    tests: tuple[tuple[str, str, tuple[LawRow, ...]], ...]
    """A test's name, what it looks at, and its rows."""

    @property
    def flagged(self) -> tuple[tuple[str, int], ...]:
        """Arms with flagged lines, and how many they are."""
        count = Counter(row.arm for _, _, rows in self.tests for row in rows if row.flagged)
        return tuple((arm.value, count[arm]) for arm in Arm if count[arm])


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCurve:
    """What a run like this one sees in one configuration."""

    drawing: Markup
    line: str
    """The same in words."""


def law_sections(data: ReportData) -> tuple[LawSection, ...]:
    """One section for each configuration with evidence against the law, in their order."""
    sections = (_section(data, config.name, index) for index, config in enumerate(data.configs))
    return tuple(section for section in sections if section.tests or section.pit)


def power_curves(data: ReportData) -> tuple[PowerCurve, ...]:
    """One curve for each configuration with a table of power, in their order."""
    curves = []
    for index, config in enumerate(data.configs):
        power = data.power.loc[data.power["config"] == config.name]
        drawing = power_figure(power, title=config.name, name=f"power-{index}")
        if drawing is not None:
            bias = bias_seen(power, "law")
            seen = (
                "no bias of the table" if bias is None else f"an acceptance bias of {words.number_text(bias)} or more"
            )
            curves.append(PowerCurve(drawing=drawing, line=f"{config.name}: {seen} is seen with 90 % power."))
    return tuple(curves)


def _section(data: ReportData, config: str, index: int) -> LawSection:
    law = law_evidence(data, config)
    pit = data.pit.loc[data.pit["config"] == config]
    drawings = (pit_figure(pit, order=order, name=f"pit-{index}-{order}") for order in ("rank", "vocab"))
    return LawSection(
        name=config,
        forest=forest_figures(law, name=f"forest-{index}"),
        pit=tuple(drawing for drawing in drawings if drawing is not None),
        tests=tuple(
            (test, TEST_WORDS.get(test.partition("_")[0], ""), tuple(map(_row, _records(law.loc[law["name"] == test]))))
            for test in dict.fromkeys(map(str, law["name"]))
        ),
    )


def _row(row: dict[str, Any]) -> LawRow:
    return LawRow(
        arm=row["arm"],
        estimate=words.number_text(row["estimate"]),
        interval=words.interval_text((row["ci_low"], row["ci_high"])),
        margin=words.number_text(row["margin"]),
        adjusted_p=words.p_text(row["adjusted_p"]),
        num_tokens=int(row["num_tokens"]),
        flagged=is_flagged(row["adjusted_p"]),
    )


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
