"""Each way in which a samples file can be wrong is refused in exact words; the untouched file passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equivtest.errors import InvalidShard
from equivtest.records import Origin, ShardKey
from equivtest.samples.schema import SAMPLES_SCHEMA, VERSION_KEY
from equivtest.samples.shards import validate_shard, write_shard
from equivtest.samples.validate import read_shard_table
from tests.samples.make import KEY, NUM_POSITIONS, cut_short, generations_of, plain_generation


@pytest.fixture
def table(tmp_path: Path) -> pa.Table:
    """Four samples, of which the last one ended after ten tokens."""
    generations = generations_of(KEY)
    generations[3] = cut_short(generations[3], 10)
    return pq.read_table(write_shard(tmp_path / "good", KEY, generations, NUM_POSITIONS), partitioning=None)


def with_column(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    """The table with one column replaced, its field kept."""
    field = SAMPLES_SCHEMA.field(name)
    plain = pa.array(values, field.type.value_type if pa.types.is_dictionary(field.type) else field.type)
    column = plain.dictionary_encode() if pa.types.is_dictionary(field.type) else plain
    nullable = field.with_nullable(True) if column.null_count else field
    return table.set_column(table.schema.get_field_index(name), nullable, column)


def with_value(name: str, value: object, *, origin: Origin | None = None) -> Callable[[pa.Table], pa.Table]:
    """Changes one entry of a column, in the first row of that origin past position 0."""

    def change(table: pa.Table) -> pa.Table:
        rows = table.to_pylist()
        row = next(i for i, r in enumerate(rows) if r["position"] > 0 and origin in (None, r["origin"]))
        values = table.column(name).to_pylist()
        values[row] = value
        return with_column(table, name, values)

    return change


def with_row(row: int, **changes: object) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        for name, value in changes.items():
            values = table.column(name).to_pylist()
            values[row] = value
            table = with_column(table, name, values)
        return table

    return change


def swap_first_two(table: pa.Table) -> pa.Table:
    return table.take([1, 0, *range(2, table.num_rows)])


def version(text: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.replace_schema_metadata({VERSION_KEY: text})


FAULTS: dict[str, tuple[str, Callable[[pa.Table], pa.Table]]] = {
    "no version": ("not a samples file", lambda table: table.replace_schema_metadata(None)),
    "other version": ("schema version 3, this program reads version 2", version("3")),
    "column of a later version": ("unknown columns: logprob", version("1")),
    "column missing": ("missing columns: slot", lambda table: table.drop_columns(["slot"])),
    "column unknown": ("unknown columns: extra", lambda table: table.append_column("extra", table.column("seed"))),
    "column order": (
        "columns in the order config, arm",
        lambda table: table.select(["config", "arm", *table.column_names[2:]]),
    ),
    "column type": (
        "column seed has type int64, the schema has int32",
        lambda table: table.set_column(3, pa.field("seed", pa.int64()), table.column("seed").cast(pa.int64())),
    ),
    "null": ("1 nulls in column token_id", with_value("token_id", None)),
    "null origin": ("1 nulls in column origin", with_value("origin", None)),
    "wrong arm": ("arm 'off' in a shard of arm 'on'", with_value("arm", "off")),
    "wrong config": ("config 'topk50' in a shard of config 'topp95'", with_value("config", "topk50")),
    "wrong prompt": ("prompt_id 'code' in a shard of prompt_id 'story'", with_value("prompt_id", "code")),
    "seed outside": ("seed 8 outside 4..7", with_value("seed", 8)),
    "position outside": ("position 16 outside 0..15", with_value("position", 16)),
    "row missing": ("1 missing rows, first at seed 7, position 15", lambda table: table.slice(0, table.num_rows - 1)),
    "row twice": ("1 duplicate rows, first at seed 4, position 2", with_value("position", 2)),
    "empty": ("64 missing rows", lambda table: table.slice(0, 0)),
    "unsorted": ("rows are not sorted by seed and position", swap_first_two),
    "unknown origin": ("unknown origin: 1 rows, first at seed 4, position 1", with_value("origin", "guessed")),
    "negative token": ("negative token_id", with_value("token_id", -1, origin=Origin.BONUS)),
    "negative step": ("negative step", with_value("step", -1)),
    "negative batch row": ("negative batch_row", with_value("batch_row", -1)),
    "negative num_draft": ("negative num_draft", with_value("num_draft", -1)),
    "negative draft": ("negative draft_token_id", with_value("draft_token_id", -1, origin=Origin.RECOVERED)),
    "accepted, no draft": ("accepted without a draft", with_value("draft_token_id", None, origin=Origin.ACCEPTED)),
    "accepted, other token": ("accepted, but token_id differs", with_value("token_id", 49_000, origin=Origin.ACCEPTED)),
    "accepted, slot": ("accepted, but slot is outside", with_value("slot", -1, origin=Origin.ACCEPTED)),
    "recovered, no draft": ("recovered without a draft", with_value("draft_token_id", None, origin=Origin.RECOVERED)),
    "recovered, slot": ("recovered, but slot is outside", with_value("slot", 100, origin=Origin.RECOVERED)),
    "bonus, draft": ("bonus with a draft token", with_value("draft_token_id", 5, origin=Origin.BONUS)),
    "bonus, slot": ("bonus, but slot is not num_draft", with_value("slot", 0, origin=Origin.BONUS)),
    "plain, draft": ("plain with a draft token", with_value("draft_token_id", 5, origin=Origin.PLAIN)),
    "plain, slot": ("plain, but slot is not -1", with_value("slot", 0, origin=Origin.PLAIN)),
    "plain, num_draft": ("plain, but num_draft is not 0", with_value("num_draft", 3, origin=Origin.PLAIN)),
    "ended, draft": ("ended with a draft token", with_value("draft_token_id", 5, origin=Origin.ENDED)),
    "ended, slot": ("ended, but slot is not -1", with_value("slot", 0, origin=Origin.ENDED)),
    "ended, num_draft": ("ended, but num_draft is not 0", with_value("num_draft", 3, origin=Origin.ENDED)),
    "unknown, slot": (
        "unknown, but slot is not -1: 1 rows, first at seed 5, position 0",
        with_row(NUM_POSITIONS, origin="unknown", slot=0, draft_token_id=None, num_draft=0),
    ),
    "unknown, num_draft": (
        "unknown, but num_draft is not 0",
        with_row(NUM_POSITIONS, origin="unknown", slot=-1, draft_token_id=None, num_draft=2),
    ),
    "ended, logprob": ("ended with a log-probability", with_value("logprob", -0.5, origin=Origin.ENDED)),
    "ended, other token": ("ended, but token_id differs", with_value("token_id", 49_000, origin=Origin.ENDED)),
    "ended at once": (
        "ended before the first token: 1 rows, first at seed 5, position 0",
        with_row(NUM_POSITIONS, origin="ended", slot=-1, draft_token_id=None, num_draft=0),
    ),
    "token after the end": (
        "a token after the end of its text: 1 rows, first at seed 7, position 12",
        with_row(3 * NUM_POSITIONS + 12, origin="plain"),
    ),
    "routed plain": (
        "speculated although the request is routed plain",
        with_value("route", "plain: min_p", origin=Origin.ACCEPTED),
    ),
    "round torn": (
        "slot does not follow an accepted slot of the same step",
        with_value("step", 10_000, origin=Origin.BONUS),
    ),
}


def test_the_untouched_shard_passes(tmp_path: Path, table: pa.Table) -> None:
    path = tmp_path / "shard.parquet"
    pq.write_table(table, path)
    validate_shard(path, KEY, NUM_POSITIONS)


def test_a_file_of_version_1_reads_as_one_without_reported_log_probabilities(tmp_path: Path, table: pa.Table) -> None:
    path = tmp_path / "shard.parquet"
    pq.write_table(version("1")(table.drop_columns(["logprob"])), path)
    validate_shard(path, KEY, NUM_POSITIONS)
    read = read_shard_table(path)
    assert read.schema.equals(SAMPLES_SCHEMA, check_metadata=True)
    assert read.drop_columns(["logprob"]).equals(table.drop_columns(["logprob"]))
    assert read["logprob"].null_count == read.num_rows
    assert read_shard_table(path, ["logprob", "seed"]).column_names == ["logprob", "seed"]
    pq.write_table(version("1")(table.drop_columns(["logprob", "slot"])), path)
    with pytest.raises(InvalidShard, match="missing columns: slot"):
        validate_shard(path, KEY, NUM_POSITIONS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_shard_is_refused_in_exact_words(tmp_path: Path, table: pa.Table, fault: str) -> None:
    problem, change = FAULTS[fault]
    path = tmp_path / "shard.parquet"
    pq.write_table(change(table), path)
    with pytest.raises(InvalidShard) as refused:
        validate_shard(path, KEY, NUM_POSITIONS)
    assert problem in refused.value.problem
    assert refused.value.path == path


def test_a_bonus_in_a_round_without_drafts_is_refused(tmp_path: Path, table: pa.Table) -> None:
    rows = table.to_pylist()
    row = next(i for i, r in enumerate(rows) if r["origin"] == "plain")
    rows[row] |= {"origin": "bonus", "slot": 0}
    for name in ("origin", "slot"):
        table = with_column(table, name, [r[name] for r in rows])
    path = tmp_path / "shard.parquet"
    pq.write_table(table, path)
    with pytest.raises(InvalidShard, match="bonus without any draft"):
        validate_shard(path, KEY, NUM_POSITIONS)


def test_the_plain_arm_may_not_speculate_whatever_its_route_says(tmp_path: Path, table: pa.Table) -> None:
    off = ShardKey(arm="off", config="topp95", prompt_id="story", seed_start=4, seed_stop=8)
    path = tmp_path / "shard.parquet"
    pq.write_table(with_column(table, "arm", ["off"] * table.num_rows), path)
    with pytest.raises(InvalidShard, match="speculated in the arm off"):
        validate_shard(path, off, NUM_POSITIONS)
    validate_shard(
        write_shard(tmp_path, off, [plain_generation(s) for s in range(4)], NUM_POSITIONS), off, NUM_POSITIONS
    )


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 100 + b"PAR1", b"text"])
def test_what_is_not_parquet_is_called_truncated_or_corrupt(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "shard.parquet"
    path.write_bytes(content)
    with pytest.raises(InvalidShard, match="truncated or corrupt"):
        validate_shard(path, KEY, NUM_POSITIONS)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidShard, match="no such file"):
        validate_shard(tmp_path / "none.parquet", KEY, NUM_POSITIONS)


def test_origins_of_the_fixture_cover_all(table: pa.Table) -> None:
    assert set(table.column("origin").to_pylist()) == {str(origin) for origin in Origin} - {"unknown"}
    assert np.array(table.column("slot")).max() > 1
