"""What the page shows of speculation itself: what became of the drafts, and how fast it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup

from equivtest.records import Arm
from equivtest.report import words
from equivtest.report.data import ReportData
from equivtest.report.figures import acceptance_figure

_ORDER = list(map(str, Arm))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRow:
    """One arm and slot."""

    arm: str
    slot: int
    reached: int
    accepted: int
    share: str
    expected: str
    """What the law gives; `-` where it is not known."""
    band: str
    """Where 95 % of correct runs lie."""
    outside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSection:
    """Acceptance by slot of one configuration."""

    name: str
    drawing: Markup
    rows: tuple[SlotRow, ...]
    has_expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """What generating one arm took."""

    arm: str
    num_tokens: int
    seconds: str
    tokens_per_s: str
    ratio: str
    """Against arm off."""


def acceptance_sections(data: ReportData) -> tuple[AcceptanceSection, ...]:
    """One for each configuration in which drafts were reached."""
    sections = []
    for index, config in enumerate(data.configs):
        own = data.acceptance.loc[(data.acceptance["config"] == config.name) & (data.acceptance["reached"] > 0)]
        expected = data.expected.loc[data.expected["config"] == config.name]
        drawing = acceptance_figure(own, expected, name=f"slots-{index}")
        if drawing is not None:
            table = own.merge(expected.drop(columns="config"), how="left", on=["arm", "slot"])
            rows = [_slot_row({str(key): value for key, value in row.items()}) for row in table.to_dict("records")]
            rows.sort(key=lambda row: (_ORDER.index(row.arm), row.slot))
            sections.append(
                AcceptanceSection(name=config.name, drawing=drawing, rows=tuple(rows), has_expected=bool(len(expected)))
            )
    return tuple(sections)


def speed_rows(data: ReportData) -> tuple[SpeedRow, ...]:
    """A row for each arm that was timed."""
    plain = next((arm.tokens_per_s for arm in data.speed if arm.arm == Arm.OFF), None)
    return tuple(
        SpeedRow(
            arm=arm.arm,
            num_tokens=arm.num_tokens,
            seconds=f"{arm.seconds:,.1f}",
            tokens_per_s=f"{arm.tokens_per_s:,.0f}",
            ratio=words.NOTHING if plain is None else f"{arm.tokens_per_s / plain:.2f}",
        )
        for arm in sorted(data.speed, key=lambda arm: _ORDER.index(arm.arm))
    )


def _slot_row(row: dict[str, Any]) -> SlotRow:
    share, known = row["accepted"] / row["reached"], not pd.isna(row["expected"])
    return SlotRow(
        arm=row["arm"],
        slot=int(row["slot"]),
        reached=int(row["reached"]),
        accepted=int(row["accepted"]),
        share=f"{share:.4f}",
        expected=f"{row['expected']:.4f}" if known else words.NOTHING,
        band=f"{row['low']:.4f} to {row['high']:.4f}" if known else words.NOTHING,
        outside=known and not row["low"] <= share <= row["high"],
    )
