"""The columns of a samples file: one row per position of every sample, sorted by seed and position.

A text that ended early has every position all the same: rows of origin `ended` repeat its last token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 2
"""Raised when a column changes its name, type or meaning; a file of an unknown version is refused, never guessed at."""

VERSION_KEY = b"equivtest.samples.version"
"""Key of the version in the metadata of the arrow schema."""

COLUMN_DOCS: Mapping[str, str] = MappingProxyType(
    {
        "arm": "off (plain decoding), on (speculative), on_null (speculative, other seeds) or biased (planted fault)",
        "config": "name of the sampling configuration",
        "prompt_id": "id of the prompt within its set",
        "seed": "replicate number of the sample within (arm, config, prompt_id)",
        "position": "index of the generated token, 0 for the first token after the prompt",
        "token_id": "the token put out",
        "origin": "accepted, recovered, bonus or plain: how the token came to be put out; ended: the text had stopped; "
        "unknown: the engine does not say",
        "slot": "index in the draft block: 0..num_draft-1, num_draft for bonus, -1 for plain, ended and unknown",
        "draft_token_id": "the draft offered at this position; null for bonus, plain, ended and unknown",
        "step": "index of the batch step that put the token out",
        "batch_row": "row of the request in the batch at that step",
        "num_draft": "drafts offered to the request at that step",
        "route": "spec, or plain: and the reason why the request does not go the speculative way",
        "logprob": "log-probability that the engine reported for the token, nats; null where it reported none",
    }
)
"""What each column holds, in the order of the file; also written into the metadata of each field."""

_NAME = pa.dictionary(pa.int32(), pa.string())
_TYPES: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "arm": _NAME,
        "config": _NAME,
        "prompt_id": _NAME,
        "seed": pa.int32(),
        "position": pa.int32(),
        "token_id": pa.int32(),
        "origin": _NAME,
        "slot": pa.int8(),
        "draft_token_id": pa.int32(),
        "step": pa.int32(),
        "batch_row": pa.int32(),
        "num_draft": pa.int8(),
        "route": _NAME,
        "logprob": pa.float32(),
    }
)

NULLABLE = frozenset({"draft_token_id", "logprob"})
"""The columns that may hold nulls."""

SAMPLES_SCHEMA = pa.schema(
    [
        pa.field(name, _TYPES[name], nullable=name in NULLABLE, metadata={"description": description})
        for name, description in COLUMN_DOCS.items()
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()},
)
"""The arrow schema of every samples file that is written."""

_SAMPLES_SCHEMA_1 = pa.schema(
    [field for field in SAMPLES_SCHEMA if field.name != "logprob"], metadata={VERSION_KEY: b"1"}
)
"""Version 1: no engine reported log-probabilities, and no text ended early."""


def read_version(file: pq.ParquetFile, expected: pa.Schema, columns: Sequence[str]) -> pa.Table:
    """Those columns of a file without a `schema_problem`; what its version did not have yet is null."""
    table = file.read([name for name in columns if name in file.schema_arrow.names], use_threads=False)
    for name in columns:
        if name not in table.column_names:
            table = table.append_column(expected.field(name), pa.nulls(table.num_rows, expected.field(name).type))
    return table.select(columns).replace_schema_metadata(expected.metadata)


def schema_problem(schema: pa.Schema, expected: pa.Schema = SAMPLES_SCHEMA) -> str | None:
    """What is wrong with the schema of a file that should have the schema `expected`, or None.

    `expected` has its version as its only metadata. Descriptions of columns are not compared. A samples file may be of
    version 1.
    """
    ((key, expected_version),) = expected.metadata.items()
    version = (schema.metadata or {}).get(key)
    if expected is SAMPLES_SCHEMA and version == b"1":
        return schema_problem(schema, _SAMPLES_SCHEMA_1)
    if version is None:
        kind = key.decode().split(".")[1]
        return f"no {key.decode()} in its metadata: not a {kind} file"
    if version != expected_version:
        return (
            f"schema version {version.decode(errors='replace')}, this program reads version {expected_version.decode()}"
        )
    missing = [name for name in expected.names if name not in schema.names]
    if missing:
        return f"missing columns: {', '.join(missing)}"
    unknown = [name for name in schema.names if name not in expected.names]
    if unknown:
        return f"unknown columns: {', '.join(unknown)}"
    if schema.names != expected.names:
        return f"columns in the order {', '.join(schema.names)}; the schema has {', '.join(expected.names)}"
    for field in expected:
        actual = schema.field(field.name)
        if actual.type != field.type:
            return f"column {field.name} has type {actual.type}, the schema has {field.type}"
    return None
