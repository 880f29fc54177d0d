"""Samples files: their names, how one is written so that a killed run never leaves half of one, and what resume means.

A shard holds a run of seeds of one (arm, config, prompt). It is written under a temporary name in its own folder,
synced and renamed, so whatever carries the final name is whole. A shard that exists and validates is never generated
again: that is all that resume is.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from equivtest.errors import InvalidShard
from equivtest.files import TEMPORARY_SUFFIX, atomic_file
from equivtest.records import Generation, Origin, ShardKey
from equivtest.samples.keys import shard_path
from equivtest.samples.schema import SAMPLES_SCHEMA
from equivtest.samples.validate import check_rows, read_shard_table

_LOG = logging.getLogger(__name__)

_ROW_GROUP_ROWS = 65_536
_COMPRESSION_LEVEL = 3
_ORIGIN_CODES = {origin: code for code, origin in enumerate(Origin)}
_ARRAYS = ("origins", "slots", "draft_token_ids", "steps", "batch_rows", "num_drafts", "logprobs")


def write_shard(run_dir: Path, key: ShardKey, generations: Sequence[Generation], num_positions: int) -> Path:
    """Write the generations of seeds `seed_start..seed_stop-1`, in that order, and return the path of the shard.

    A text that ended early is filled up to `num_positions` with rows of origin `ended`. The rows are validated before
    anything is written. The same rows give the same bytes (with one version of pyarrow). A process killed at any moment
    leaves the previous file, or none, or the whole new one under the name.
    Raises InvalidShard when the generations do not make a valid shard.
    """
    path = shard_path(run_dir, key)
    if len(generations) != key.num_seeds:
        raise InvalidShard(path, f"{len(generations)} generations for {key.num_seeds} seeds")
    table = _to_table(path, key, generations, num_positions)
    check_rows(path, table, key, num_positions)
    write_table(path, table)
    return path


def validate_shard(path: Path, key: ShardKey, num_positions: int) -> None:
    """Raise InvalidShard with the exact problem unless the file holds precisely the samples of `key`.

    Checks that the file is whole (page checksums included), the schema and its version, nulls, keys, that each seed has
    each position once and in order, and that origin, slot and draft agree with each other.
    """
    check_rows(path, read_shard_table(path), key, num_positions)


def shard_is_done(run_dir: Path, key: ShardKey, num_positions: int) -> bool:
    """Whether the shard exists and validates. An invalid one is reported by a log warning and counts as not done."""
    path = shard_path(run_dir, key)
    if not path.exists():
        return False
    try:
        validate_shard(path, key, num_positions)
    except InvalidShard as invalid:
        _LOG.warning("generating again: %s", invalid)
        return False
    return True


def remove_stale_temporaries(run_dir: Path) -> tuple[Path, ...]:
    """Delete the temporary files that killed runs left, and return their paths, sorted.

    Call it before collecting: a run folder has one writer at a time.
    """
    folders = (run_dir / kind for kind in ("samples", "law"))
    stale = tuple(sorted(path for folder in folders for path in folder.rglob(f".*{TEMPORARY_SUFFIX}")))
    for path in stale:
        path.unlink()
        _LOG.info("removed the temporary file of a killed run: %s", path)
    return stale


def write_table(path: Path, table: pa.Table) -> None:
    """A parquet file with page checksums that appears whole or not at all."""
    with atomic_file(path) as sink:
        pq.write_table(
            table,
            sink,
            version="2.6",
            compression="zstd",
            compression_level=_COMPRESSION_LEVEL,
            row_group_size=_ROW_GROUP_ROWS,
            write_page_checksum=True,
        )


def _to_table(path: Path, key: ShardKey, generations: Sequence[Generation], num_positions: int) -> pa.Table:
    """Rows of SAMPLES_SCHEMA, sorted by seed and position."""
    num_rows = len(generations) * num_positions
    whole = [_filled_up(path, generation, num_positions) for generation in generations]
    routes = {route: code for code, route in enumerate(dict.fromkeys(str(g.route) for g in whole))}
    origins = np.array([_ORIGIN_CODES[origin] for g in whole for origin in g.origins])
    draft_ids = np.concatenate([g.draft_token_ids for g in whole])
    reported = np.repeat([g.logprobs is not None for g in whole], num_positions)
    logprobs = [np.zeros(num_positions, np.float32) if g.logprobs is None else g.logprobs for g in whole]
    columns = {
        "arm": constant_column(key.arm, num_rows),
        "config": constant_column(key.config, num_rows),
        "prompt_id": constant_column(key.prompt_id, num_rows),
        "seed": np.repeat(np.arange(key.seed_start, key.seed_stop), num_positions),
        "position": np.tile(np.arange(num_positions), len(whole)),
        "token_id": np.concatenate([g.token_ids for g in whole]),
        "origin": _dictionary(origins, [*Origin]),
        "slot": np.concatenate([g.slots for g in whole]),
        "draft_token_id": pa.array(draft_ids, pa.int32(), mask=draft_ids == -1),
        "step": np.concatenate([g.steps for g in whole]),
        "batch_row": np.concatenate([g.batch_rows for g in whole]),
        "num_draft": np.concatenate([g.num_drafts for g in whole]),
        "route": _dictionary(np.repeat([routes[str(g.route)] for g in whole], num_positions), list(routes)),
        "logprob": pa.array(
            np.concatenate(logprobs), pa.float32(), mask=~reported | (origins == _ORIGIN_CODES[Origin.ENDED])
        ),
    }
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values).cast(SAMPLES_SCHEMA.field(name).type)
        for name, values in columns.items()
    ]
    return pa.Table.from_arrays(arrays, schema=SAMPLES_SCHEMA)


def _filled_up(path: Path, generation: Generation, num_positions: int) -> Generation:
    """The generation with every position: after its last token rows of origin `ended` that repeat it."""
    num_tokens = len(generation.token_ids)
    for name in _ARRAYS:
        values = getattr(generation, name)
        if values is not None and len(values) != num_tokens:
            raise InvalidShard(path, f"{name} has {len(values)} entries for {num_tokens} tokens")
    if not 1 <= num_tokens <= num_positions:
        raise InvalidShard(path, f"a generation of {num_tokens} tokens for {num_positions} positions")
    if num_tokens == num_positions:
        return generation
    after = (0, num_positions - num_tokens)
    return dataclasses.replace(
        generation,
        token_ids=np.pad(generation.token_ids, after, mode="edge"),
        origins=(*generation.origins, *[Origin.ENDED] * after[1]),
        slots=np.pad(generation.slots, after, constant_values=-1),
        draft_token_ids=np.pad(generation.draft_token_ids, after, constant_values=-1),
        steps=np.pad(generation.steps, after, mode="edge"),
        batch_rows=np.pad(generation.batch_rows, after, mode="edge"),
        num_drafts=np.pad(generation.num_drafts, after),
        logprobs=None if generation.logprobs is None else np.pad(generation.logprobs, after),
    )


def constant_column(value: str, num_rows: int) -> pa.DictionaryArray:
    """One name for every row."""
    return _dictionary(np.zeros(num_rows, dtype=np.int32), [value])


def _dictionary(codes: npt.NDArray[np.integer], values: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array([str(v) for v in values]))
