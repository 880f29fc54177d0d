"""All samples of a run in one table, each token with what the law says of it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from equivtest.errors import InvalidShard
from equivtest.samples.keys import find_shards
from equivtest.samples.law import LAW_COLUMN_DOCS, LAW_SCHEMA, read_law
from equivtest.samples.reader import read_samples


def samples_with_law(run_dir: Path) -> pa.Table:
    """The columns of SAMPLES_SCHEMA, then those of LAW_COLUMN_DOCS, null for arms that were not scored; described in
    the metadata of their fields. Rows of seeds beyond the protocol are those that flags were tested on.

    Raises MissingSamples, or InvalidShard for files that are damaged or of different tokens.
    """
    scored = {key.arm for key in find_shards(run_dir, kind="law")}
    parts = []
    for arm in sorted({key.arm for key in find_shards(run_dir)}):
        samples = read_samples(run_dir, arms=[arm])
        law = read_law(run_dir, ("token_id", *LAW_COLUMN_DOCS), arms=[arm]) if arm in scored else None
        if law is not None and not law["token_id"].equals(samples["token_id"]):
            raise InvalidShard(run_dir / "law", f"holds other tokens than the samples of arm {arm}")
        for name in LAW_COLUMN_DOCS:
            field = LAW_SCHEMA.field(name).with_nullable(True)
            column = pa.nulls(samples.num_rows, field.type) if law is None else law[name]
            samples = samples.append_column(field, column)
        parts.append(samples)
    return pa.concat_tables(parts).unify_dictionaries()
