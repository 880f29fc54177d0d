"""Matplotlib figures as inline SVG that follows the page: its colours are the page's CSS colours, in light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib.style
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK = "#000001"
"""Stands for the colour of text; replaced by `currentColor`."""

_CSS_COLOURS: Mapping[str, str] = {
    INK: "currentColor",
    "#000002": "var(--grid)",
    "#000003": "var(--band)",
    "#000004": "var(--point)",
    "#000005": "var(--alert)",
    "#000006": "var(--series-1)",
    "#000007": "var(--series-2)",
    "#000008": "var(--series-3)",
}
GRID, BAND, POINT, ALERT, SERIES_1, SERIES_2, SERIES_3 = list(_CSS_COLOURS)[1:]
"""Colours that matplotlib takes and the page defines."""

_SETTINGS: Mapping[str, Any] = {
    # Text stays text: it can be read aloud, searched and scaled by the page. Fixed ids make equal figures equal bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "equivtest",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
}

_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_MARKERS = re.compile(r'<g([^>]*)>\n((?:<use [^>]* style="[^"]*"/>\n)+)</g>')
_MARKER_STYLE = re.compile(r' style="([^"]*)"')


@contextmanager
def new_figure(width_in: float, height_in: float, *, left_in: float = 0.55) -> Iterator[Figure]:
    """A figure under the page's settings; draw and `to_svg` it inside the block. Size and left margin in inches."""
    # From the defaults, so that a matplotlibrc of the user changes nothing.
    with matplotlib.style.context(["default", dict(_SETTINGS)]):
        figure = Figure(figsize=(width_in, height_in))
        # Fixed margins: all figures of a row line up, and a figure is drawn once, not twice.
        figure.subplots_adjust(
            left=left_in / width_in, right=1 - 0.1 / width_in, bottom=0.45 / height_in, top=1 - 0.25 / height_in
        )
        yield figure


def title_and_key(axes: Axes, title: str, marks: Sequence[tuple[str, str, str]]) -> None:
    """A title on the left above the axes; on the right its marks: (label, marker or "" for a line, colour)."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="" if marker else "-", markersize=4, label=label)
        for label, marker, colour in marks
    ]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 0.98),
        borderaxespad=0,
        fontsize=8,
        ncols=len(handles),
        handlelength=1.2,
        handletextpad=0.3,
        columnspacing=1.0,
    )


def to_svg(figure: Figure, *, name: str, description: str) -> Markup:
    """The figure as an `<svg>` element for a page, without namespaces, metadata or links to anywhere.

    `name` (letters, digits, hyphens) is unique on the page: it keeps the ids of several figures apart.
    `description` is what a screen reader says instead of the figure.
    """
    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = sink.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r'xlink:href="#', f'href="#{name}-', body)
    body = re.sub(
        r"<[^>]*>", lambda tag: _LONG_NUMBER.sub(_short, tag.group()), body
    )  # coordinates, never what is said
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"font-family: [^;\"]*;?", "", body)
    body = re.sub(r' transform="rotate\(-0[^"]*"', "", body)
    body = re.sub(r"\n\s*", "\n", body)
    body = _MARKERS.sub(_hoist_style, body)
    for colour, css in _CSS_COLOURS.items():
        body = body.replace(colour, css)
    width, height = (round(float(inches) * 72) for inches in figure.get_size_inches())
    opening = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {}" width="{}" height="{}">').format(
        description, width, height, width, height
    )
    return opening + Markup(body.strip())


def _short(number: re.Match[str]) -> str:
    return f"{float(number.group()):.2f}"


def _hoist_style(markers: re.Match[str]) -> str:
    """The points of one series with their style said once, on their group: a third of the size."""
    attributes, points = markers.groups()
    styles = set(_MARKER_STYLE.findall(points))
    if len(styles) != 1 or "style=" in attributes:
        return markers.group()
    return f'<g{attributes} style="{styles.pop()}">\n{_MARKER_STYLE.sub("", points)}</g>'
