"""Heat maps of cells, prompts by positions, as tables: every cell has its numbers as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from equivtest.records import Comparison
from equivtest.report import words
from equivtest.report.data import COMPARISON_ROLES, ReportData
from equivtest.report.select import num_rejected

P_LEVELS = (0.1, 0.01, 1e-3, 1e-4, 1e-6)
"""Upper ends of the levels 1 to 5 of a p-value; above the first is level 0."""

EXCESS_LEVELS = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Lower ends of the levels 1 to 5 of the TV's excess over its null mean; below the first is level 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    """One cell of a heat map."""

    level: int
    """Of the p-value, 0 to 5."""
    short: str
    """The p-value in at most six characters."""
    excess_level: int
    """Of the TV's excess, 0 to 5."""
    excess_short: str
    title: str
    """All its numbers."""
    rejected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Prompts by positions of one comparison and configuration."""

    comparison: Comparison
    title: str
    role: str
    num_rejected: int
    num_cells: int
    positions: tuple[int, ...]
    rows: tuple[tuple[str, tuple[HeatCell | None, ...]], ...]
    """Prompt id and its cells; None where a position was not tested."""


def heat_map(data: ReportData, comparison: Comparison, config: str) -> HeatMap:
    """The heat map of one comparison and configuration."""
    cells = data.cells_of(comparison, config)
    by_place = {(row["prompt_id"], row["position"]): _heat_cell(row) for row in _records(cells)}
    positions = tuple(sorted({int(position) for position in cells["position"]}))
    return HeatMap(
        comparison=comparison,
        title=comparison.words,
        role=COMPARISON_ROLES[comparison],
        num_rejected=num_rejected(cells),
        num_cells=len(cells),
        positions=positions,
        rows=tuple(
            (prompt_id, tuple(by_place.get((prompt_id, position)) for position in positions))
            for prompt_id in data.prompt_ids(config)
        ),
    )


def _heat_cell(row: Mapping[str, Any]) -> HeatCell:
    p_value, excess = float(row["p_value"]), float(row["tv_excess"])
    numbers = (
        f"{row['prompt_id']}, position {row['position']}: p {words.p_text(p_value)}, q {words.p_text(row['q_value'])}, "
        f"statistic {words.number_text(row['statistic'])}, df {words.number_text(row['df'])}, "
        f"TV {row['tv']:.3f} (null {row['tv_null_mean']:.3f}, 97.5 % {row['tv_null_q975']:.3f})"
    )
    rejected = bool(row["rejected"])
    return HeatCell(
        level=sum(p_value < upper for upper in P_LEVELS),
        short=words.p_short(p_value),
        excess_level=sum(excess >= lower for lower in EXCESS_LEVELS),
        excess_short=words.excess_short(excess),
        title=f"rejected; {numbers}" if rejected else numbers,
        rejected=rejected,
    )


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
