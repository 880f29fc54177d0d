"""The figures of the page: TV beside its null, and acceptance by slot."""

from __future__ import annotations

import numpy as np
import pandas as pd
from markupsafe import Markup

from equivtest.records import Comparison
from equivtest.report import svg

_ARM_STYLES = (("on", svg.SERIES_1, ""), ("on_null", svg.SERIES_2, "///"), ("biased", svg.SERIES_3, "\\\\\\"))
"""Arms of the acceptance figure with colour and hatch, so that colour is not the only difference."""


def tv_figure(cells: pd.DataFrame, *, comparison: Comparison, tv_max: float, name: str) -> Markup:
    """Each cell's TV against its null mean and 97.5 % quantile, cells sorted by null mean.

    `tv_max` is the upper end of the axis, the same for all comparisons that are shown side by side.
    """
    cells = cells.sort_values(["tv_null_mean", "tv_null_q975"], kind="stable")
    rank = np.arange(1, len(cells) + 1)
    tv, mean, upper = (cells[column].to_numpy(dtype=float) for column in ("tv", "tv_null_mean", "tv_null_q975"))
    rejected = cells["rejected"].to_numpy(dtype=bool)
    above = int((tv > upper).sum())
    with svg.new_figure(4.4, 2.9) as figure:
        axes = figure.add_subplot()
        axes.fill_between(rank, mean, upper, color=svg.BAND, linewidth=0, label="null: mean to 97.5 %")
        axes.plot(rank, mean, color=svg.INK, linewidth=1.0, label="null mean")
        axes.plot(rank[~rejected], tv[~rejected], "o", color=svg.POINT, markersize=2.6, label="cell")
        if rejected.any():
            axes.plot(rank[rejected], tv[rejected], "^", color=svg.ALERT, markersize=5, label="cell rejected")
        axes.set_ylim(0, tv_max * 1.22 if tv_max > 0 else 1)
        axes.set_xlim(0, len(cells) + 1)
        axes.set_xlabel("cells, sorted by the mean of their null")
        axes.set_ylabel("TV")
        axes.set_title(comparison.words, loc="left", fontsize=10, fontweight="bold")
        axes.legend(loc="upper left", fontsize=7.5, handlelength=1.4, ncols=2, columnspacing=1.0)
        return svg.to_svg(
            figure,
            name=name,
            description=(
                f"Total variation of {len(cells)} cells, {comparison.words}, beside its null: "
                f"{above} above the 97.5 % quantile, {int(rejected.sum())} rejected. Numbers are in the tables."
            ),
        )


def acceptance_figure(acceptance: pd.DataFrame, expected: pd.DataFrame, *, name: str) -> Markup | None:
    """Bars of accepted over reached drafts by slot, for the speculative arms, each with a line where the law puts it;
    None when nothing speculated.

    `acceptance` and `expected` hold ACCEPTANCE_COLUMNS and EXPECTED_COLUMNS of one configuration.
    """
    styles = [style for style in _ARM_STYLES if (acceptance["arm"] == style[0]).any()]
    if not styles:
        return None
    spoken = []
    with svg.new_figure(4.4, 2.6) as figure:
        axes = figure.add_subplot()
        width = 0.8 / len(styles)
        for index, (arm, colour, hatch) in enumerate(styles):
            rows = acceptance.loc[acceptance["arm"] == arm].sort_values("slot")
            rate = rows["accepted"].to_numpy(dtype=float) / rows["reached"].to_numpy(dtype=float)
            offset = (index - (len(styles) - 1) / 2) * width
            axes.bar(
                rows["slot"].to_numpy(dtype=float) + offset,
                rate,
                width * 0.92,
                facecolor=colour,
                edgecolor=svg.INK,
                linewidth=0.4,
                hatch=hatch,
                label=arm,
            )
            law = expected.loc[expected["arm"] == arm].sort_values("slot")
            place = law["slot"].to_numpy(dtype=float) + offset
            axes.hlines(
                law["expected"], place - width / 2, place + width / 2, color=svg.ALERT, linewidth=1.6, gid=f"law-{arm}"
            )
            spoken.append(f"{arm} " + ", ".join(f"{share:.2f}" for share in rate))
            if len(law):
                spoken[-1] += " (the law: " + ", ".join(f"{share:.2f}" for share in law["expected"]) + ")"
        if len(expected):
            axes.plot([], [], color=svg.ALERT, linewidth=1.6, label="law")
        axes.set_ylim(0, 1.18)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
        axes.set_xticks(sorted(acceptance["slot"].unique().tolist()))
        axes.set_xlabel("slot in the draft block")
        axes.set_ylabel("accepted / reached")
        axes.legend(loc="upper left", fontsize=7.5, ncols=4, handlelength=1.4)
        return svg.to_svg(figure, name=name, description=f"Acceptance by slot, from slot 0 on: {'; '.join(spoken)}.")
