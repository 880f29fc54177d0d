"""Which rows a page shows: the largest cells. Sorting and filtering only."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from equivtest.records import Comparison
from equivtest.report.data import ReportData

_KEYS: dict[str, tuple[list[str], list[bool]]] = {
    "p_value": (["p_value", "tv_excess"], [True, False]),
    "tv_excess": (["tv_excess", "p_value"], [False, True]),
}


def worst_cells(
    data: ReportData, comparison: Comparison, by: Literal["p_value", "tv_excess"], limit: int
) -> pd.DataFrame:
    """The `limit` cells of a comparison with the smallest p-value or the largest TV excess; ties in the order given."""
    columns, ascending = _KEYS[by]
    return data.cells_of(comparison).sort_values(columns, ascending=ascending, kind="stable").head(limit)


def num_rejected(cells: pd.DataFrame) -> int:
    """How many of these cells are marked rejected."""
    return int(cells["rejected"].sum())
