"""Law files: what they hold, that they belong to their samples, and that half of one is never taken for done."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equivtest.errors import InvalidShard, MissingSamples, UnknownName
from equivtest.records import LawColumns, ShardKey
from equivtest.samples.keys import find_shards, shard_path
from equivtest.samples.law import (
    LAW_COLUMN_DOCS,
    LAW_SCHEMA,
    law_shard_is_done,
    read_law,
    validate_law_shard,
    write_law_shard,
)
from equivtest.samples.reader import read_samples
from equivtest.samples.shards import remove_stale_temporaries, shard_is_done, write_shard
from tests.samples.make import KEY, NUM_POSITIONS, cut_short, generations_of


def law_of(key: ShardKey, num_positions: int = NUM_POSITIONS) -> tuple[np.ndarray, LawColumns]:
    """Token ids and well-formed law columns for the generations of a key."""
    generations = generations_of(key, num_positions)
    rng = np.random.default_rng(key.seed_start)
    shape = (key.num_seeds, num_positions)
    drafts = np.stack([g.draft_token_ids for g in generations]) >= 0
    unit = {name: rng.random(shape) for name in ("p_token", "p_draft", "q_token", "q_mean", "pit_rank", "pit_vocab")}
    unit["p_token"][0, 0] = 0.0
    others = {name: rng.random(shape) for name in ("q_variance", "entropy", "var_surprisal")}
    law = LawColumns(has_draft=drafts, support_violation=unit["p_token"] == 0, **unit, **others)
    return np.stack([g.token_ids for g in generations]), law


def write_both(run_dir: Path, key: ShardKey) -> Path:
    write_shard(run_dir, key, generations_of(key), NUM_POSITIONS)
    return write_law_shard(run_dir, key, *law_of(key))


def test_rows_are_those_of_the_samples_and_hold_what_was_scored(tmp_path: Path) -> None:
    path = write_both(tmp_path, KEY)
    assert path == tmp_path / "law/arm=on/config=topp95/prompt=story/seeds=0004-0007.parquet"
    token_ids, law = law_of(KEY)
    table, samples = read_law(tmp_path), read_samples(tmp_path)
    for name in ("arm", "config", "prompt_id", "seed", "position", "token_id"):
        assert table.column(name).cast(pa.string()).equals(samples.column(name).cast(pa.string()))
    for name in LAW_COLUMN_DOCS:
        if name == "surprisal":
            continue
        values = table.column(name).to_numpy().reshape(token_ids.shape).astype(float)
        hidden = ~law.has_draft if name in ("p_draft", "q_token", "q_mean", "q_variance") else np.zeros_like(token_ids)
        np.testing.assert_allclose(values, np.where(hidden, np.nan, getattr(law, name)), rtol=1e-6)
    assert table.column("p_draft").null_count == (~law.has_draft).sum()


def test_surprisal_is_null_where_the_law_does_not_hold_the_token(tmp_path: Path) -> None:
    write_both(tmp_path, KEY)
    table = read_law(tmp_path, ["p_token", "surprisal"])
    assert table.column("surprisal").null_count == 1
    p, surprisal = (table.column(name).drop_null().to_numpy() for name in table.column_names)
    np.testing.assert_allclose(surprisal, -np.log(p[1:]), rtol=1e-5)


def test_the_law_of_a_text_that_ended_is_kept(tmp_path: Path) -> None:
    generations = [cut_short(generations_of(KEY)[0], 5), *generations_of(KEY)[1:]]
    write_shard(tmp_path, KEY, generations, NUM_POSITIONS)
    token_ids = read_samples(tmp_path, ["token_id"])["token_id"].to_numpy().reshape(4, NUM_POSITIONS)
    law = law_of(KEY)[1]
    certain = {"p_token": 1.0, "entropy": 0.0, "var_surprisal": 0.0, "has_draft": False, "support_violation": False}
    for name, value in certain.items():
        getattr(law, name)[0, 5:] = value
    write_law_shard(tmp_path, KEY, token_ids, law)
    validate_law_shard(tmp_path, KEY, NUM_POSITIONS)
    table = read_law(tmp_path, ["p_token", "p_draft", "surprisal"])[5:NUM_POSITIONS]
    assert set(table["p_token"].to_pylist()) == {1.0}
    assert table["p_draft"].null_count == 11
    assert set(table["surprisal"].to_pylist()) == {0.0}
    law.entropy[0, 5:] = np.nan
    with pytest.raises(InvalidShard, match="entropy"):
        write_law_shard(tmp_path, KEY, token_ids, law)


def test_every_column_is_described_in_the_file(tmp_path: Path) -> None:
    schema = pq.read_schema(write_both(tmp_path, KEY))
    assert schema.names == LAW_SCHEMA.names
    assert all(field.metadata[b"description"] for field in schema)


def test_only_whole_and_fitting_law_files_are_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    assert not law_shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    path = write_law_shard(tmp_path, KEY, *law_of(KEY))
    assert law_shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    assert not law_shard_is_done(tmp_path, KEY, NUM_POSITIONS + 1)
    whole = path.read_bytes()
    for length in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with caplog.at_level(logging.WARNING):
            assert not law_shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    assert "scoring again" in caplog.text
    path.write_bytes(whole)
    assert law_shard_is_done(tmp_path, KEY, NUM_POSITIONS)


def test_law_columns_of_other_samples_are_not_done(tmp_path: Path) -> None:
    write_both(tmp_path, KEY)
    other = generations_of(dataclasses.replace(KEY, seed_start=14, seed_stop=18))
    write_shard(tmp_path, KEY, other, NUM_POSITIONS)
    assert shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    assert not law_shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    with pytest.raises(InvalidShard, match="scores other tokens"):
        validate_law_shard(tmp_path, KEY, NUM_POSITIONS)


def test_a_samples_file_is_not_a_law_file(tmp_path: Path) -> None:
    write_both(tmp_path, KEY)
    path = shard_path(tmp_path, KEY, kind="law")
    path.write_bytes(shard_path(tmp_path, KEY).read_bytes())
    with pytest.raises(InvalidShard, match=r"no equivtest\.law\.version in its metadata: not a law file"):
        validate_law_shard(tmp_path, KEY, NUM_POSITIONS)


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [("p_token", np.nan, "p_token nan"), ("pit_rank", 1.5, r"pit_rank 1\.5"), ("entropy", -1.0, r"entropy -1\.0")],
)
def test_columns_that_no_law_has_are_refused_before_anything_is_written(
    tmp_path: Path, column: str, value: float, problem: str
) -> None:
    token_ids, law = law_of(KEY)
    values = getattr(law, column).copy()
    values[2, 3] = value
    with pytest.raises(InvalidShard, match=problem):
        write_law_shard(tmp_path, KEY, token_ids, dataclasses.replace(law, **{column: values}))
    with pytest.raises(InvalidShard, match="for 4 seeds"):
        write_law_shard(tmp_path, KEY, token_ids[:3], law)
    assert find_shards(tmp_path, kind="law") == []


def test_law_files_are_found_apart_from_samples_and_their_temporaries_are_cleaned(tmp_path: Path) -> None:
    keys = [dataclasses.replace(KEY, arm=arm) for arm in ("off", "on")]
    for key in keys:
        write_shard(tmp_path, key, generations_of(key), NUM_POSITIONS)
    path = write_law_shard(tmp_path, keys[1], *law_of(keys[1]))
    assert find_shards(tmp_path) == keys
    assert find_shards(tmp_path, kind="law") == keys[1:]
    stale = path.with_name(".seeds=0000-0003.parquet.tmp")
    stale.write_bytes(b"half")
    assert remove_stale_temporaries(tmp_path) == (stale,)
    with pytest.raises(MissingSamples, match="score the run first"):
        read_law(tmp_path, arms=["off"])
    with pytest.raises(UnknownName, match="law column"):
        read_law(tmp_path, ["slot"])


def test_a_law_file_copied_over_another_is_refused_when_read(tmp_path: Path) -> None:
    keys = [dataclasses.replace(KEY, prompt_id=prompt_id) for prompt_id in ("chat", "story")]
    chat, story = (write_both(tmp_path, key) for key in keys)
    assert read_law(tmp_path, ["p_token"]).num_rows == 2 * KEY.num_seeds * NUM_POSITIONS
    chat.write_bytes(story.read_bytes())
    with pytest.raises(InvalidShard, match="prompt_id 'story' in a shard of prompt_id 'chat'"):
        read_law(tmp_path, ["p_token"])
