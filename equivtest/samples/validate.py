"""What makes a samples file valid, and the exact words for what does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from equivtest.errors import InvalidShard
from equivtest.records import Arm, Origin, ShardKey
from equivtest.samples.schema import NULLABLE, SAMPLES_SCHEMA, read_version, schema_problem

BoolArray = npt.NDArray[np.bool_]

_KEY_NAMES = ("arm", "config", "prompt_id")


def read_shard_table(path: Path, columns: list[str] | None = None, *, schema: pa.Schema = SAMPLES_SCHEMA) -> pa.Table:
    """The table of one shard. Raises InvalidShard when the file is absent, damaged or of another schema."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            problem = schema_problem(file.schema_arrow, schema)
            table = None if problem else read_version(file, schema, columns or schema.names)
    except FileNotFoundError as absent:
        raise InvalidShard(path, "no such file") from absent
    except (pa.ArrowException, OSError) as damaged:
        raise InvalidShard(path, f"truncated or corrupt: {damaged}") from damaged
    if problem is not None:
        raise InvalidShard(path, problem)
    return table


def read_keyed_table(
    path: Path, key: ShardKey, columns: Sequence[str] | None = None, *, schema: pa.Schema = SAMPLES_SCHEMA
) -> pa.Table:
    """The table of one shard (None: all columns), once its rows name the key and its first and last seed.

    A file that was copied or renamed to the path of another key is refused. Raises InvalidShard for that, and as
    `read_shard_table` does. The grid of seeds and positions is left to `check_rows`.
    """
    wanted = schema.names if columns is None else list(dict.fromkeys(columns))
    table = read_shard_table(path, list(dict.fromkeys([*wanted, *_KEY_NAMES, "seed"])), schema=schema)
    for problem in (*_name_problems(table, key), *_seed_range_problems(table, key)):
        raise InvalidShard(path, problem)
    return table.select(wanted)


def check_rows(path: Path, table: pa.Table, key: ShardKey, num_positions: int) -> None:
    """Raise InvalidShard unless the rows are exactly the samples of `key`, `num_positions` tokens each."""
    for problem in _problems(table, key, num_positions):
        raise InvalidShard(path, problem)


def _problems(table: pa.Table, key: ShardKey, num_positions: int) -> Iterator[str]:
    """Problems in an order in which each check may rely on the ones before it."""
    yield from key_problems(table, key, num_positions, NULLABLE)
    rows = _Rows(table)
    for claim, broken in rows.broken_claims(key):
        if broken.any():
            row = int(np.argmax(broken))
            yield f"{claim}: {int(broken.sum())} rows, first at seed {rows.seed[row]}, position {rows.position[row]}"


def key_problems(table: pa.Table, key: ShardKey, num_positions: int, nullable: Collection[str]) -> Iterator[str]:
    """Nulls where none may be, names that are not the key's, and a grid of seeds and positions that is not whole."""
    for name in table.column_names:
        if name not in nullable and table.column(name).null_count:
            yield f"{table.column(name).null_count} nulls in column {name}"
    yield from _name_problems(table, key)
    yield from _grid_problems(table, key, num_positions)


def _name_problems(table: pa.Table, key: ShardKey) -> Iterator[str]:
    """Names that are not the key's, a null included."""
    for name in _KEY_NAMES:
        wrong = sorted(set(pc.unique(table.column(name)).to_pylist()) - {getattr(key, name)}, key=str)
        if wrong:
            yield f"{name} {wrong[0]!r} in a shard of {name} {getattr(key, name)!r}"


def _seed_range_problems(table: pa.Table, key: ShardKey) -> Iterator[str]:
    """A first or last seed that is not the key's."""
    seeds = pc.min_max(table.column("seed")).as_py()
    if (seeds["min"], seeds["max"]) != (key.seed_start, key.seed_stop - 1):
        held = "no seeds" if seeds["min"] is None else f"seeds {seeds['min']}..{seeds['max']}"
        yield f"{held} in a shard of seeds {key.seed_start}..{key.seed_stop - 1}"


def _grid_problems(table: pa.Table, key: ShardKey, num_positions: int) -> Iterator[str]:
    """Each seed of the key has each position exactly once, in order."""
    seed, position = (table.column(name).to_numpy().astype(np.int64) for name in ("seed", "position"))
    outside = (seed < key.seed_start) | (seed >= key.seed_stop)
    if outside.any():
        yield f"seed {seed[np.argmax(outside)]} outside {key.seed_start}..{key.seed_stop - 1}"
    outside = (position < 0) | (position >= num_positions)
    if outside.any():
        yield f"position {position[np.argmax(outside)]} outside 0..{num_positions - 1}"
    place = (seed - key.seed_start) * num_positions + position
    counts = np.bincount(place, minlength=key.num_seeds * num_positions)
    for word, wrong in (("duplicate", counts > 1), ("missing", counts == 0)):
        if wrong.any():
            first = int(np.argmax(wrong))
            yield (
                f"{int(wrong.sum())} {word} rows, first at seed {key.seed_start + first // num_positions}, "
                f"position {first % num_positions}"
            )
    if not (np.diff(place) > 0).all():
        yield "rows are not sorted by seed and position"


class _Rows:
    """The columns of a complete, sorted shard as numpy arrays [num_rows]."""

    def __init__(self, table: pa.Table) -> None:
        integers = ("seed", "position", "token_id", "slot", "step", "batch_row", "num_draft")
        self.seed, self.position, self.token_id, self.slot, self.step, self.batch_row, self.num_draft = (
            table.column(name).to_numpy().astype(np.int64) for name in integers
        )
        self.has_logprob = table.column("logprob").is_valid().to_numpy()
        self.has_draft = table.column("draft_token_id").is_valid().to_numpy()
        self.draft_token_id = pc.fill_null(table.column("draft_token_id"), -1).to_numpy()
        self.origin = table.column("origin").cast(pa.string())
        self.routed_plain = ~pc.equal(table.column("route").cast(pa.string()), "spec").to_numpy()

    def _is(self, origin: Origin) -> BoolArray:
        return np.asarray(pc.equal(self.origin, str(origin)).to_numpy(), dtype=np.bool_)

    def broken_claims(self, key: ShardKey) -> Iterator[tuple[str, BoolArray]]:
        """Each claim a valid shard keeps, in the words of its violation, and the rows that break it."""
        accepted, recovered, bonus, plain, ended, unknown = (self._is(origin) for origin in Origin)
        speculated = accepted | recovered | bonus
        in_block = (self.slot >= 0) & (self.slot < self.num_draft)
        yield "unknown origin", ~(speculated | plain | ended | unknown)
        for name in ("token_id", "step", "batch_row", "num_draft"):
            yield f"negative {name}", getattr(self, name) < 0
        yield "negative draft_token_id", self.has_draft & (self.draft_token_id < 0)
        yield "accepted without a draft token", accepted & ~self.has_draft
        yield "accepted, but token_id differs from draft_token_id", accepted & (self.token_id != self.draft_token_id)
        yield "accepted, but slot is outside 0..num_draft-1", accepted & ~in_block
        yield "recovered without a draft token", recovered & ~self.has_draft
        yield "recovered, but slot is outside 0..num_draft-1", recovered & ~in_block
        yield "bonus with a draft token", bonus & self.has_draft
        yield "bonus, but slot is not num_draft", bonus & (self.slot != self.num_draft)
        yield "bonus without any draft; such a token is plain", bonus & (self.num_draft == 0)
        for origin, rows in (("plain", plain), ("ended", ended), ("unknown", unknown)):
            yield f"{origin} with a draft token", rows & self.has_draft
            yield f"{origin}, but slot is not -1", rows & (self.slot != -1)
            yield f"{origin}, but num_draft is not 0", rows & (self.num_draft != 0)
        yield "ended with a log-probability", ended & self.has_logprob
        yield "ended before the first token", ended & (self.position == 0)
        yield "ended, but token_id differs from the one before", ended & (self.token_id != np.roll(self.token_id, 1))
        yield "a token after the end of its text", ~ended & (self.position > 0) & np.roll(ended, 1)
        yield "speculated although the request is routed plain", self.routed_plain & speculated
        yield "speculated in the arm off", speculated & (key.arm == Arm.OFF)
        yield "slot does not follow an accepted slot of the same step", (self.slot > 0) & ~self._follows(accepted)

    def _follows(self, accepted: BoolArray) -> BoolArray:
        """Whether the row before is the accepted slot before, in the same sample and step."""
        follows = np.zeros(len(self.slot), dtype=np.bool_)
        follows[1:] = (
            accepted[:-1]
            & (np.diff(self.seed) == 0)
            & (np.diff(self.step) == 0)
            & (np.diff(self.slot) == 1)
            & (np.diff(self.num_draft) == 0)
        )
        return follows
