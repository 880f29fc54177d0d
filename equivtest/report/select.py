"""Which rows a page shows: the largest cells, the evidence of an arm. Sorting and filtering only."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from equivtest.records import Arm, Comparison
from equivtest.report.data import ReportData

FLAG_LEVEL = 0.01
"""Adjusted p-value below which a line of evidence of the law and joint families is marked."""

LAW_SUBJECTS = (*Arm, "on minus off")
"""What the law family is computed on."""

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


def law_evidence(data: ReportData, config: str) -> pd.DataFrame:
    """The law family of a configuration, a test's lines together in the order of LAW_SUBJECTS, with a column `arm`."""
    law = data.evidence.loc[data.evidence["family"] == "law"]
    by_stratum = {f"{subject} / {config}": subject for subject in LAW_SUBJECTS}
    law = law.assign(arm=law["stratum"].map(by_stratum)).dropna(subset=["arm"])
    # Arm off has no drafts: its own tests come first in its rows, but not in the family.
    in_family = pd.concat([law.loc[law["arm"] == Arm.ON, "name"], law["name"]])
    tests, subjects = list(dict.fromkeys(in_family)), list(LAW_SUBJECTS)
    place = law["name"].map(tests.index) * len(subjects) + law["arm"].map(subjects.index)
    return law.loc[place.sort_values(kind="stable").index]


def is_flagged(adjusted_p: float | None) -> bool:
    """Whether a line of evidence is marked; one that was not adjusted never is."""
    return adjusted_p is not None and adjusted_p < FLAG_LEVEL
