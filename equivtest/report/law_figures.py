"""The figures of the evidence against the exact law: a forest plot for each unit, and PIT histograms."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.axes
import numpy as np
import pandas as pd
from markupsafe import Markup

from equivtest.report import svg, words

ARM_MARKS = {"off": ("D", svg.INK), "on": ("o", svg.SERIES_1), "biased": ("^", svg.SERIES_3)}
"""Arms of these figures, from the top of a row down, with marker and colour."""

_ORDER_WORDS = {"rank": "likely tokens first", "vocab": "tokens in order of their ids"}

_ROOM = 1.25
"""Axes are this much wider than what must be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    unit: str
    """In its title."""
    axis: str
    """What the estimate is, in words."""
    tests: str
    """Regular expression that the names of its tests match as a whole."""
    lowest: float | None = None
    """Where the axis starts; None for an axis that is symmetric around 0."""


_PANELS = (
    _Panel(unit="probability", axis="excess probability that the draft is put out", tests=r"bias(_slot_\d+)?"),
    _Panel(unit="distance", axis="largest distance from a uniform PIT", tests="rank|vocab", lowest=0.0),
    _Panel(unit="nats", axis="excess surprisal of the token, nats", tests="surprisal_[a-z]+"),
    _Panel(unit="slope", axis="change of acceptance with the coin before", tests="lag_[a-z]+"),
)


def forest_figures(law: pd.DataFrame, *, name: str) -> tuple[Markup, ...]:
    """A forest plot for each unit in which some test of arms off, on and biased has an estimate with an interval.

    `law` is `select.law_evidence`. The axis holds the margins and the intervals of off and on; what of arm biased lies
    outside is shown by an arrow at the edge with its estimate, so that a large planted fault hides nothing.
    """
    law = law.loc[law["arm"].isin(list(ARM_MARKS))].dropna(subset=["estimate", "ci_low", "ci_high"])
    panels = ((panel, law.loc[law["name"].str.fullmatch(panel.tests)]) for panel in _PANELS)
    return tuple(_forest(panel, rows, f"{name}-{panel.unit}") for panel, rows in panels if len(rows))


def _forest(panel: _Panel, law: pd.DataFrame, name: str) -> Markup:
    tests = list(dict.fromkeys(law["name"]))
    arms = [arm for arm in ARM_MARKS if (law["arm"] == arm).any()]
    low, high = _limits(panel, law)
    spoken = []
    with svg.new_figure(4.4, 0.95 + 0.42 * len(tests), left_in=1.15) as figure:
        axes = figure.add_subplot()
        axes.set_xlim(low, high)
        axes.set_ylim(len(tests) - 0.5, -0.5)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.axvline(0, color=svg.INK, linewidth=0.8)
        for row in law.drop_duplicates("name").dropna(subset=["margin"]).to_dict("records"):
            index, margin = tests.index(row["name"]), float(row["margin"])
            left = -margin if panel.lowest is None else panel.lowest
            (band,) = axes.barh(index, margin - left, 0.86, left, color=svg.BAND, edgecolor=svg.GRID, zorder=0.4)
            band.set_gid(f"margin-{row['name']}")
        for row in law.to_dict("records"):
            test, arm = str(row["name"]), str(row["arm"])
            ends = float(row["ci_low"]), float(row["estimate"]), float(row["ci_high"])
            place = tests.index(test) + (arms.index(arm) - (len(arms) - 1) / 2) * 0.24
            _interval(axes, ends, place, arm, gid=f"{arm}-{test}")
            spoken.append(f"{test} of {arm} {words.number_text(ends[1])} ({words.interval_text((ends[0], ends[2]))})")
        axes.set_yticks(range(len(tests)), tests)
        axes.tick_params(axis="y", length=0)
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel(panel.axis)
        svg.title_and_key(axes, panel.unit, [(arm, *ARM_MARKS[arm]) for arm in arms])
        return svg.to_svg(
            figure,
            name=name,
            description=f"Estimates with 95 % intervals, {panel.axis}: {'; '.join(spoken)}.",
        )


def _limits(panel: _Panel, law: pd.DataFrame) -> tuple[float, float]:
    """The ends of the axis: margins, and the intervals of off and on, or of all when there are only others."""
    seen = law.loc[law["arm"] != "biased"]
    seen = seen if len(seen) else law
    farthest = float(seen[["ci_low", "ci_high", "margin"]].astype(float).abs().max().max())
    reach = _ROOM * farthest if farthest > 0 else 1.0
    return (-reach, reach) if panel.lowest is None else (panel.lowest - 0.04 * reach, reach)


def _interval(axes: matplotlib.axes.Axes, ends: tuple[float, float, float], place: float, arm: str, gid: str) -> None:
    """Low end, estimate and high end of one arm's line; an arrow and the number where the estimate is off the axis."""
    low, estimate, high = ends
    marker, colour = ARM_MARKS[arm]
    left, right = axes.get_xlim()
    if left <= estimate <= right:
        axes.plot([low, high], [place, place], color=colour, linewidth=1.4, gid=gid)
        axes.plot([estimate], [place], marker, color=colour, markersize=4)
        return
    edge, arrow, side = (right, ">", "right") if estimate > right else (left, "<", "left")
    inner = edge - (right - left) * (0.025 if side == "right" else -0.025)
    axes.plot([edge], [place], arrow, color=colour, markersize=5, clip_on=False, gid=gid)
    axes.text(inner, place, f"{estimate:.2g}", ha=side, va="center_baseline", fontsize=7.5)


def pit_figure(pit: pd.DataFrame, *, order: str, name: str) -> Markup | None:
    """Histogram of the PIT of arm on over its expectation, with its band, and arm off beside it; None without arm on.

    `pit` holds PIT_COLUMNS of one configuration. Shares of the expectation are shown, so that arms of different size
    compare; the axis does not start at 0, therefore counts are steps and points, not filled bars.
    """
    pit = pit.loc[pit["order"] == order].sort_values("bin")
    on, off = (_shares(pit.loc[pit["arm"] == arm]) for arm in ("on", "off"))
    if not len(on):
        return None
    edges = np.arange(len(on) + 1) / len(on)
    outside = int(((on["count"] < on["low"]) | (on["count"] > on["high"])).sum())
    with svg.new_figure(4.4, 2.4) as figure:
        axes = figure.add_subplot()
        axes.stairs(on["high"], edges, baseline=on["low"], fill=True, color=svg.BAND, gid="band")
        axes.axhline(1, color=svg.INK, linewidth=0.8)
        axes.stairs(on["count"], edges, baseline=None, color=svg.SERIES_1, linewidth=1.6, gid="on")
        marks = [("on", "", svg.SERIES_1)]
        if len(off):
            marker, colour = ARM_MARKS["off"]
            axes.plot(
                (np.arange(len(off)) + 0.5) / len(off), off["count"], marker, color=colour, markersize=3, gid="off"
            )
            marks.append(("off", marker, colour))
        farthest = max(
            float((frame[["count", "low", "high"]] - 1).abs().max().max()) for frame in (on, off) if len(frame)
        )
        axes.set_ylim(1 - _ROOM * farthest, 1 + _ROOM * farthest)
        axes.set_xlim(0, 1)
        axes.locator_params(axis="y", nbins=5)
        axes.set_xlabel(_ORDER_WORDS[order])
        axes.set_ylabel("count / expected")
        svg.title_and_key(axes, f"PIT, {order}", marks)
        return svg.to_svg(
            figure,
            name=name,
            description=(
                f"Histogram of the PIT of arm on, {_ORDER_WORDS[order]}, over what the law expects: {outside} of "
                f"{words.plural(len(on), 'bar')} outside the 95 % band, from {on['count'].min():.3f} to "
                f"{on['count'].max():.3f}."
            ),
        )


def _shares(histogram: pd.DataFrame) -> pd.DataFrame:
    """count, low and high over expected."""
    return histogram[["count", "low", "high"]].astype(float).div(histogram["expected"].astype(float), axis=0)
