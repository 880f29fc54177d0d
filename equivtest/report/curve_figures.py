"""Figures of whole runs: the cells' p-values against uniform quantiles, and the power against bias."""

from __future__ import annotations

import numpy as np
import pandas as pd
from markupsafe import Markup

from equivtest.records import Comparison
from equivtest.report import svg, words

_SMALLEST_P = 1e-16
"""Smaller p-values, and 0, are drawn here."""

_NUM_POINTS = 120
"""Points of a quantile figure: the smallest p-values all, of the others some, evenly on the axis."""

_CURVES = (("law", "-", svg.SERIES_1, "law family"), ("neyman_pearson", "--", svg.INK, "Neyman-Pearson limit"))

TARGET_POWER = 0.9


def quantile_figure(quantiles: pd.DataFrame, *, comparison: Comparison, name: str) -> Markup | None:
    """Sorted p-values against what they are when nothing is wrong, small ones to the right; None without cells."""
    table = quantiles.loc[quantiles["comparison"] == comparison].sort_values("expected")
    if not len(table):
        return None
    expected, observed, low, high = (
        table[column].to_numpy(dtype=float).clip(_SMALLEST_P, 1) for column in ("expected", "observed", "low", "high")
    )
    outside = int(((observed < low) | (observed > high)).sum())
    shown = np.unique(np.geomspace(1, len(table), _NUM_POINTS).round().astype(int)) - 1
    with svg.new_figure(4.4, 2.9) as figure:
        axes = figure.add_subplot()
        axes.fill_between(expected[shown], low[shown], high[shown], color=svg.BAND, linewidth=0, gid="band")
        axes.plot(expected[[0, -1]], expected[[0, -1]], color=svg.INK, linewidth=0.8)
        axes.plot(expected[shown], observed[shown], "o", color=svg.POINT, markersize=2.6, gid="points")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.minorticks_off()
        for axis, values in ((axes.xaxis, expected), (axes.yaxis, np.concatenate([observed, low]))):
            exponents = _exponents(float(values.min()))
            axis.set_ticks(
                [10.0**exponent for exponent in exponents], labels=[words.power_of_ten(e) for e in exponents]
            )
        axes.set_xlim(1.15, expected.min() / 1.3)
        axes.set_ylim(1.15, min(observed.min(), low.min()) / 1.6)
        axes.set_xlabel("p-value expected by chance")
        axes.set_ylabel("p-value of the cell")
        axes.set_title(comparison.words, loc="left", fontsize=10, fontweight="bold")
        return svg.to_svg(
            figure,
            name=name,
            description=(
                f"Sorted p-values of {words.plural(len(table), 'cell')}, {comparison.words}, against uniform "
                f"quantiles: {outside} outside the pointwise 95 % band, the smallest "
                f"{words.p_text(float(table['observed'].min()))}."
            ),
        )


def _exponents(smallest: float) -> range:
    """Whole powers of ten from 1 to below the smallest value, at most six."""
    lowest = min(-1, int(np.floor(np.log10(smallest))))
    return range(0, lowest - 1, -max(1, round(-lowest / 5)))


def power_figure(power: pd.DataFrame, *, title: str, name: str) -> Markup | None:
    """Probability that a run like this one sees an acceptance bias; None without a curve.

    `power` holds POWER_COLUMNS of one configuration. The point is the first bias of the table that the law family sees
    with 90 % power.
    """
    spoken = []
    with svg.new_figure(4.4, 2.6) as figure:
        axes = figure.add_subplot()
        axes.axhline(TARGET_POWER, color=svg.ALERT, linewidth=0.9, gid="target")
        for test, line, colour, label in _CURVES:
            curve = power.loc[power["test"] == test].sort_values("bias")
            if not len(curve):
                continue
            axes.plot(
                curve["bias"], curve["power"], line, color=colour, linewidth=1.5, label=label, gid=f"power-{test}"
            )
            bias = bias_seen(power, test)
            spoken.append(
                f"{label} reaches 90 % at {words.number_text(bias)}" if bias is not None else f"{label} does not"
            )
            if bias is not None and test == "law":
                axes.plot([bias], [TARGET_POWER], "o", color=colour, markersize=5, gid="seen")
        if not spoken:
            return None
        axes.set_ylim(0, 1.05)
        axes.set_xlim(power["bias"].min(), power["bias"].max())
        axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 1], ["0", "0.25", "0.5", "0.75", "0.9", "1"])
        axes.locator_params(axis="x", nbins=6)
        axes.set_xlabel("acceptance bias")
        axes.set_ylabel("power")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.legend(loc="lower right", fontsize=8, handlelength=2)
        return svg.to_svg(
            figure, name=name, description=f"Power against acceptance bias, {title}: {'; '.join(spoken)}."
        )


def bias_seen(power: pd.DataFrame, test: str) -> float | None:
    """The first bias above 0 of a test's curve whose power is at least 90 %; None if the table has none."""
    seen = power.loc[(power["test"] == test) & (power["bias"] > 0) & (power["power"] >= TARGET_POWER), "bias"]
    return float(seen.min()) if len(seen) else None
