"""report.html: one self-contained page. The templates lay out; this module only picks rows and formats numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from equivtest.files import write_whole
from equivtest.records import Comparison
from equivtest.report import words
from equivtest.report.curve_figures import quantile_figure
from equivtest.report.data import COMPARISON_ROLES, ReportData
from equivtest.report.figures import acceptance_figure, tv_figure
from equivtest.report.law_section import law_sections, power_curves
from equivtest.report.select import num_rejected, worst_cells

_TEMPLATES = Path(__file__).parent / "templates"
_NUM_WORST = 12
_MANY_LINES = 24
"""A table of more tests is folded away."""
_P_LEVELS = (0.1, 0.01, 1e-3, 1e-4, 1e-6)
"""Upper ends of the heat map's levels 1 to 5; above the first is level 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    """One cell of a heat map."""

    level: int
    """0 (p of at least 0.1) to 5 (p below 1e-6)."""
    short: str
    """The p-value in at most four characters."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSection:
    """What the page shows of one configuration."""

    name: str
    heat_maps: tuple[HeatMap, ...]
    tv_figures: tuple[Markup, ...]
    acceptance: Markup | None
    slots: tuple[int, ...]
    """Columns of the acceptance table."""
    slot_rows: tuple[tuple[str, tuple[str, ...]], ...]
    """Rows of the acceptance table: the arm, and accepted of reached drafts as text for each slot."""


def render_html(data: ReportData) -> str:
    """The page. Equal data give equal text."""
    sections = [_config_section(data, config.name, index) for index, config in enumerate(data.configs)]
    worst = [
        {
            "comparison": comparison,
            "title": comparison.words,
            "by_p": _records(worst_cells(data, comparison, "p_value", _NUM_WORST)),
            "by_tv": _records(worst_cells(data, comparison, "tv_excess", _NUM_WORST)),
        }
        for comparison in data.comparisons()
        # The A/A control's cells matter only when it has something to explain; the planted fault's never do.
        if comparison == "off_on" or (comparison == "on_on_null" and num_rejected(data.cells_of(comparison)))
    ]
    quantiles = [quantile_figure(data.quantiles, comparison=name, name=f"quantiles-{name}") for name in Comparison]
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            data=data,
            law_sections=law_sections(data),
            power_curves=power_curves(data),
            sections=sections,
            quantiles=[drawing for drawing in quantiles if drawing is not None],
            worst=worst,
            evidence=_records(data.evidence),
            many_lines=_MANY_LINES,
            provenance=list(flatten(data.manifest)),
            command=data.manifest.get("command"),
        )
    )


def write_html(data: ReportData, path: Path) -> Path:
    """Render the page to a file."""
    return write_whole(path, render_html(data))


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested provenance as (label, text) rows in the order given; `command` has its own place on the page."""
    for key, value in values.items():
        label = f"{prefix}{str(key).replace('_', ' ')}"
        if not prefix and key == "command":
            continue
        if isinstance(value, Mapping):
            yield from flatten(value, f"{label} / ")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield label, ", ".join(map(str, value)) or words.NOTHING
        else:
            yield label, words.NOTHING if value in (None, "") else str(value)


def environment() -> jinja2.Environment:
    """The templates, with the words of every page as filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "control": words.control_text,
        "p": words.p_text,
        "number": words.number_text,
        "share": words.share_text,
        "interval": words.interval_text,
        "tokens": words.tokens_text,
    }
    environment.globals |= {
        "marks": words.MARKS,
        "rejected_mark": words.REJECTED_MARK,
        "plural": words.plural,
    }
    return environment


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _config_section(data: ReportData, config: str, index: int) -> ConfigSection:
    comparisons = data.comparisons(config)
    cells = {comparison: data.cells_of(comparison, config) for comparison in comparisons}
    tv_max = max((float(frame[["tv", "tv_null_q975"]].max().max()) for frame in cells.values()), default=1.0)
    reached = data.acceptance.loc[(data.acceptance["config"] == config) & (data.acceptance["reached"] > 0)]
    slots = tuple(sorted({int(slot) for slot in reached["slot"]}))
    counts = {(row["arm"], int(row["slot"])): f"{row['accepted']:,} of {row['reached']:,}" for row in _records(reached)}
    return ConfigSection(
        name=config,
        heat_maps=tuple(_heat_map(data, comparison, config, frame) for comparison, frame in cells.items()),
        tv_figures=tuple(
            tv_figure(frame, comparison=comparison, tv_max=tv_max, name=f"tv-{index}-{comparison}")
            for comparison, frame in cells.items()
        ),
        acceptance=acceptance_figure(data.acceptance, config=config, name=f"slots-{index}"),
        slots=slots,
        slot_rows=tuple(
            (arm, tuple(counts.get((arm, slot), words.NOTHING) for slot in slots))
            for arm in dict.fromkeys(reached["arm"])
        ),
    )


def _heat_map(data: ReportData, comparison: Comparison, config: str, cells: pd.DataFrame) -> HeatMap:
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
    p_value = float(row["p_value"])
    numbers = (
        f"{row['prompt_id']}, position {row['position']}: p {words.p_text(p_value)}, q {words.p_text(row['q_value'])}, "
        f"statistic {words.number_text(row['statistic'])}, df {words.number_text(row['df'])}, "
        f"TV {row['tv']:.3f} (null {row['tv_null_mean']:.3f}, 97.5 % {row['tv_null_q975']:.3f})"
    )
    rejected = bool(row["rejected"])
    return HeatCell(
        level=sum(p_value < upper for upper in _P_LEVELS),
        short=words.p_short(p_value),
        title=f"rejected; {numbers}" if rejected else numbers,
        rejected=rejected,
    )
