"""cells.parquet, evidence.parquet and controls.parquet: the numbers behind every page, for programs.

Every column says what it holds, in the metadata of its field.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from equivtest.files import write_whole
from equivtest.report.data import CELL_COLUMNS, EVIDENCE_COLUMNS, MAY_BE_EMPTY, ReportData
from equivtest.report.summary import table

TABLES_VERSION = 1
"""Raised when a column of one of these tables changes its name, type or meaning."""

VERSION_KEY = b"equivtest.tables.version"

_INTEGERS = frozenset({"position", "num_a", "num_b", "num_bins", "num_tokens", "num_rejected", "num_cells"})
_TEXTS = frozenset({"comparison", "config", "prompt_id", "family", "name", "stratum", "method", "expected", "outcome"})
_FLAGS = frozenset({"rejected", "passed"})

CELL_DOCS: Mapping[str, str] = {
    "comparison": "off_on (the test), on_on_null (the A/A control) or off_biased (the planted fault)",
    "config": "name of the sampling configuration",
    "prompt_id": "id of the prompt within its set",
    "position": "index of the generated token, 0 for the first token after the prompt",
    "num_a": "samples of the first arm",
    "num_b": "samples of the second arm",
    "num_bins": "bins of the histogram after rare tokens were joined; with one, nothing is tested and p is 1",
    "statistic": "chi-squared, or the largest z",
    "df": "degrees of freedom; null where the statistic has none",
    "p_value": "of the cell alone",
    "q_value": "adjusted for all cells of the comparison by Benjamini and Hochberg (or Yekutieli)",
    "rejected": "q_value at or below 0.05",
    "tv": "total variation distance of the two histograms",
    "tv_null_mean": "its mean if both arms had one law",
    "tv_null_q975": "its 97.5 % quantile if both arms had one law",
    "tv_excess": "tv minus tv_null_mean",
}
EVIDENCE_DOCS: Mapping[str, str] = {
    "family": "marginal, joint, law, identity or sequential",
    "name": "the test within its family",
    "stratum": "what it was computed on, for instance off vs on / topp95",
    "statistic": "the test's statistic",
    "df": "degrees of freedom; null where the statistic has none",
    "p_value": "of this test alone",
    "adjusted_p": "adjusted for every test that it was made with; null where nothing was adjusted",
    "estimate": "effect size, in the unit that method names; null where the test has none",
    "ci_low": "lower end of its 95 % interval",
    "ci_high": "upper end of its 95 % interval",
    "margin": "the interval must lie within plus or minus this for a verdict of equivalent; null where it need not",
    "num_tokens": "tokens that the test looked at",
    "method": "how p-value and estimate were computed",
}
CONTROL_DOCS: Mapping[str, str] = {
    "name": "A/A, planted fault or reference law",
    "comparison": "what was compared",
    "expected": "what had to come out",
    "outcome": "what came out",
    "num_rejected": "tests rejected",
    "num_cells": "tests made: cells, and what other families look at",
    "passed": "null where it was not run, is undecided or had nothing to act on",
}


def write_cells(data: ReportData, path: Path) -> Path:
    """Write the cells, sorted as given. Equal data give equal bytes (with one version of pyarrow)."""
    return _write(data.cells, {name: CELL_DOCS[name] for name in CELL_COLUMNS}, path)


def write_evidence(data: ReportData, path: Path) -> Path:
    """Write the evidence, sorted as given. Equal data give equal bytes (with one version of pyarrow)."""
    return _write(data.evidence, {name: EVIDENCE_DOCS[name] for name in EVIDENCE_COLUMNS}, path)


def write_controls(data: ReportData, path: Path) -> Path:
    """Write the controls, one row each."""
    frame = pd.DataFrame([asdict(control) for control in data.controls], columns=list(CONTROL_DOCS))
    return _write(frame, CONTROL_DOCS, path)


def write_columns(folder: Path) -> Path:
    """columns.md: what every column of the parquet files in the folder holds, from their own metadata."""
    lines = ["# Columns", ""]
    for path in sorted(folder.glob("*.parquet")):
        lines += [f"## {path.name}", "", *table(("Column", "Type", "Holds"), _described(pq.read_schema(path)))]
    return write_whole(folder / "columns.md", "\n".join(lines))


def _described(schema: pa.Schema) -> list[tuple[str, str, str]]:
    """Name, type and description of each column; a text is a text however it is coded."""
    return [
        (
            field.name,
            str(field.type.value_type if pa.types.is_dictionary(field.type) else field.type),
            (field.metadata or {}).get(b"description", b"").decode(),
        )
        for field in schema
    ]


def _write(frame: pd.DataFrame, columns: Mapping[str, str], path: Path) -> Path:
    schema = pa.schema(
        [
            pa.field(
                name,
                _column_type(name),
                nullable=name in MAY_BE_EMPTY or name == "passed",
                metadata={"description": description},
            )
            for name, description in columns.items()
        ],
        metadata={VERSION_KEY: str(TABLES_VERSION).encode()},
    )
    arrays = [pa.Array.from_pandas(frame[name], type=schema.field(name).type) for name in columns]
    sink = io.BytesIO()
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=schema),
        sink,
        version="2.6",
        compression="zstd",
        compression_level=3,
        row_group_size=65_536,
    )
    return write_whole(path, sink.getvalue())


def _column_type(name: str) -> pa.DataType:
    if name in _TEXTS:
        return pa.string()
    if name in _INTEGERS:
        return pa.int64()
    return pa.bool_() if name in _FLAGS else pa.float64()
