"""report.html: one self-contained page. The templates lay out; this module only picks rows and formats numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from equivtest.files import write_whole
from equivtest.records import Comparison, Word
from equivtest.report import words
from equivtest.report.curve_figures import quantile_figure
from equivtest.report.data import ReportData
from equivtest.report.figures import tv_figure
from equivtest.report.heat_map import EXCESS_LEVELS, HeatMap, heat_map
from equivtest.report.law_section import law_sections, power_curves
from equivtest.report.scripts import page_scripts
from equivtest.report.select import num_rejected, worst_cells
from equivtest.report.speculation import acceptance_sections, speed_rows

_TEMPLATES = Path(__file__).parent / "templates"
_NUM_WORST = 12
_NUM_REASONS = 3
"""Lines of the banner that say how large and how sure a difference is, the surest first; the rest are folded away."""
_MANY_LINES = 24
"""A table of more tests is folded away."""
_KEY_FACTS = frozenset(
    {
        "run id", "status", "fingerprint", "code / version", "code / git commit", "code / git dirty", "subject / model",
        "subject / device", "subject / device name", "subject / dtype", "subject / kernels", "subject / drafter",
        "subject / acceptance", "subject / torch", "machine / cpu", "machine / python", "protocol / budget",
        "protocol / num seeds", "protocol / run seed", "protocol / planted", "started", "error",
    }
)  # fmt: skip
"""What of the provenance is not folded away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSection:
    """What the page shows of one configuration."""

    name: str
    heat_maps: tuple[HeatMap, ...]
    tv_figures: tuple[Markup, ...]


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
    facts = list(flatten(data.manifest))
    shown = _NUM_REASONS if data.word is Word.DIFFERENT else len(data.reasons)
    quantiles = [quantile_figure(data.quantiles, comparison=name, name=f"quantiles-{name}") for name in Comparison]
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            data=data,
            law_sections=law_sections(data),
            power_curves=power_curves(data),
            sections=sections,
            acceptance=acceptance_sections(data),
            speed=speed_rows(data),
            shown=data.shown.to_json() if data.shown.cells else None,
            excess_levels=EXCESS_LEVELS,
            scripts=page_scripts(plots=bool(data.shown.cells)),
            quantiles=[drawing for drawing in quantiles if drawing is not None],
            worst=worst,
            evidence=_records(data.evidence),
            many_lines=_MANY_LINES,
            key_facts=[fact for fact in facts if fact[0] in _KEY_FACTS],
            other_facts=[fact for fact in facts if fact[0] not in _KEY_FACTS],
            command=data.manifest.get("command"),
            reasons=data.reasons[:shown],
            more_reasons=data.reasons[shown:],
            mark=words.mark(data.word, gates=data.gates),
            verdict=words.verdict_text(data.word, gates=data.gates),
            merge=words.merge_text(data.word, gates=data.gates),
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


@functools.cache
def environment() -> jinja2.Environment:
    """The templates, with the words of every page as filters."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}  # in the order given
    environment.filters |= {
        "control": words.control_text,
        "p": words.p_text,
        "number": words.number_text,
        "share": words.share_text,
        "interval": words.interval_text,
        "tokens": words.tokens_text,
    }
    environment.globals |= {
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
    return ConfigSection(
        name=config,
        heat_maps=tuple(heat_map(data, comparison, config) for comparison in comparisons),
        tv_figures=tuple(
            tv_figure(frame, comparison=comparison, tv_max=tv_max, name=f"tv-{index}-{comparison}")
            for comparison, frame in cells.items()
        ),
    )
