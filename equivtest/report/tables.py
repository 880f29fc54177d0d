"""cells.parquet and evidence.parquet: the numbers behind every page, for programs."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from equivtest.files import write_whole
from equivtest.report.data import CELL_COLUMNS, EVIDENCE_COLUMNS, MAY_BE_EMPTY, ReportData

TABLES_VERSION = 1
"""Raised when a column of one of these tables changes its name, type or meaning."""

VERSION_KEY = b"equivtest.tables.version"

_INTEGERS = frozenset({"position", "num_a", "num_b", "num_bins", "num_tokens"})
_TEXTS = frozenset({"comparison", "config", "prompt_id", "family", "name", "stratum", "method"})


def write_cells(data: ReportData, path: Path) -> Path:
    """Write the cells, sorted as given. Equal data give equal bytes (with one version of pyarrow)."""
    return _write(data.cells, CELL_COLUMNS, path)


def write_evidence(data: ReportData, path: Path) -> Path:
    """Write the evidence, sorted as given. Equal data give equal bytes (with one version of pyarrow)."""
    return _write(data.evidence, EVIDENCE_COLUMNS, path)


def _write(frame: pd.DataFrame, columns: tuple[str, ...], path: Path) -> Path:
    schema = pa.schema(
        [pa.field(name, _column_type(name), nullable=name in MAY_BE_EMPTY) for name in columns],
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
    return pa.bool_() if name == "rejected" else pa.float64()
