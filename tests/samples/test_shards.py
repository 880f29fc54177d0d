"""Shards are atomic, deterministic and resumable."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from equivtest.errors import InvalidSetting, InvalidShard
from equivtest.records import ShardKey
from equivtest.samples.keys import find_shards, shard_path
from equivtest.samples.schema import COLUMN_DOCS, SAMPLES_SCHEMA
from equivtest.samples.shards import (
    remove_stale_temporaries,
    shard_is_done,
    validate_shard,
    write_shard,
)
from tests.samples.make import KEY, NUM_POSITIONS, cut_short, generations_of, plain_generation, spec_generation


def test_the_path_names_the_arm_config_prompt_and_the_inclusive_seed_range() -> None:
    key = ShardKey(arm="off", config="topp95", prompt_id="story", seed_start=0, seed_stop=256)
    expected = "run/samples/arm=off/config=topp95/prompt=story/seeds=0000-0255.parquet"
    assert shard_path(Path("run"), key).as_posix() == expected


@pytest.mark.parametrize("prompt_id", ["a/b", "../../up", "x=y", "sp ace", "%2F", "日本", "."])
def test_any_prompt_id_stays_inside_the_run_folder_and_is_found_again(tmp_path: Path, prompt_id: str) -> None:
    key = replace(KEY, prompt_id=prompt_id)
    path = write_shard(tmp_path, key, generations_of(key), NUM_POSITIONS)
    assert path.resolve().is_relative_to(tmp_path.resolve() / "samples" / "arm=on" / "config=topp95")
    assert find_shards(tmp_path) == [key]


@pytest.mark.parametrize("change", [{"seed_stop": 4}, {"seed_start": -1}, {"prompt_id": ""}])
def test_a_key_that_names_nothing_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        replace(KEY, **change)


def test_a_written_shard_holds_every_field_of_every_generation(tmp_path: Path) -> None:
    generations = generations_of(KEY)
    table = pq.read_table(write_shard(tmp_path, KEY, generations, NUM_POSITIONS), partitioning=None)
    assert table.schema.equals(SAMPLES_SCHEMA, check_metadata=True)
    rows = table.to_pylist()
    for index, row in enumerate(rows):
        generation, position = generations[index // NUM_POSITIONS], index % NUM_POSITIONS
        draft = int(generation.draft_token_ids[position])
        assert row == {
            "arm": "on",
            "config": "topp95",
            "prompt_id": "story",
            "seed": KEY.seed_start + index // NUM_POSITIONS,
            "position": position,
            "token_id": generation.token_ids[position],
            "origin": str(generation.origins[position]),
            "slot": generation.slots[position],
            "draft_token_id": None if draft == -1 else draft,
            "step": generation.steps[position],
            "batch_row": 3,
            "num_draft": generation.num_drafts[position],
            "route": "spec",
            "logprob": None,
        }
    assert len(rows) == KEY.num_seeds * NUM_POSITIONS


def test_a_text_that_ended_early_repeats_its_last_token_as_ended(tmp_path: Path) -> None:
    for key, make in ((KEY, spec_generation), (replace(KEY, arm="off"), plain_generation)):
        generations = [make(seed) for seed in range(4)]
        generations[1] = cut_short(generations[1], 5)
        path = write_shard(tmp_path, key, generations, NUM_POSITIONS)
        validate_shard(path, key, NUM_POSITIONS)
        rows = pq.read_table(path, partitioning=None).to_pylist()[NUM_POSITIONS : 2 * NUM_POSITIONS]
        assert [row["position"] for row in rows] == list(range(NUM_POSITIONS))
        assert rows[4]["origin"] != "ended"
        for row in rows[5:]:
            nothing = {"origin": "ended", "slot": -1, "draft_token_id": None, "num_draft": 0, "logprob": None}
            assert row == rows[4] | nothing | {"position": row["position"]}


def test_reported_log_probabilities_are_kept_as_they_are_and_null_where_none_was_reported(tmp_path: Path) -> None:
    generations = generations_of(KEY)
    values = np.linspace(-4, 0, NUM_POSITIONS, dtype=np.float32)
    values[3], values[4] = -np.inf, np.nan
    generations[0] = replace(generations[0], logprobs=values)
    generations[1] = replace(cut_short(generations[1], 5), logprobs=values[:5])
    column = pq.read_table(write_shard(tmp_path, KEY, generations, NUM_POSITIONS), partitioning=None)["logprob"]
    assert np.array_equal(column[:16].to_numpy(), values, equal_nan=True)
    assert column[16:21].null_count == 0
    assert column[21:].null_count == len(column) - 21
    generations[1] = replace(generations[1], logprobs=values)
    with pytest.raises(InvalidShard, match="logprobs has 16 entries for 5 tokens"):
        write_shard(tmp_path, KEY, generations, NUM_POSITIONS)


def test_every_column_is_described_in_the_file(tmp_path: Path) -> None:
    schema = pq.read_schema(write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS))
    assert {field.name: field.metadata[b"description"].decode() for field in schema} == dict(COLUMN_DOCS)


def test_the_same_rows_give_the_same_bytes_and_other_rows_do_not(tmp_path: Path) -> None:
    first = write_shard(tmp_path / "a", KEY, generations_of(KEY), NUM_POSITIONS).read_bytes()
    again = write_shard(tmp_path / "b", KEY, generations_of(KEY), NUM_POSITIONS).read_bytes()
    other = write_shard(
        tmp_path / "c", KEY, [spec_generation(seed) for seed in (4, 5, 6, 99)], NUM_POSITIONS
    ).read_bytes()
    assert first == again
    assert first != other


def test_generations_that_do_not_fit_the_key_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    generations = generations_of(KEY)
    faulty = {
        "3 generations for 4 seeds": generations[:3],
        "a generation of 18 tokens for 16 positions": [*generations[:3], spec_generation(7, num_positions=18)],
        "a generation of 0 tokens": [*generations[:3], cut_short(generations[3], 0)],
        "slots has 15 entries for 16 tokens": [
            *generations[:3],
            replace(generations[3], slots=generations[3].slots[1:]),
        ],
        "negative token_id": [*generations[:3], replace(generations[3], token_ids=-generations[3].token_ids - 1)],
    }
    for problem, rows in faulty.items():
        with pytest.raises(InvalidShard, match=problem):
            write_shard(tmp_path, KEY, rows, NUM_POSITIONS)
    assert list(tmp_path.rglob("*.parquet*")) == []


_KILLED_WRITER = """
import os, sys
from pathlib import Path
from tests.samples.make import KEY, NUM_POSITIONS, generations_of
from equivtest.samples.shards import write_shard
os.replace = lambda *names: os._exit(9)
write_shard(Path(sys.argv[1]), KEY, generations_of(KEY), NUM_POSITIONS)
"""


def test_a_writer_killed_before_the_rename_leaves_no_shard_and_its_temporary_is_cleaned(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED_WRITER, str(tmp_path)], check=False)
    assert killed.returncode == 9
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in left] == [".seeds=0004-0007.parquet.tmp"]
    assert not shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    assert find_shards(tmp_path) == []
    assert remove_stale_temporaries(tmp_path) == tuple(left)
    assert not left[0].exists()


def test_a_write_that_raises_leaves_the_old_shard_and_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    before = path.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path, KEY, [spec_generation(seed) for seed in range(4)], NUM_POSITIONS)
    assert path.read_bytes() == before
    assert remove_stale_temporaries(tmp_path) == ()


def test_cleaning_touches_nothing_but_temporaries(tmp_path: Path) -> None:
    path = write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    stale = path.with_name(".seeds=0000-0003.parquet.tmp")
    stale.write_bytes(b"half")
    assert remove_stale_temporaries(tmp_path) == (stale,)
    assert shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    assert remove_stale_temporaries(tmp_path / "no such run") == ()


def test_a_shard_cut_short_at_any_length_is_never_done(tmp_path: Path) -> None:
    path = write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    whole = path.read_bytes()
    for length in (0, 3, 4, len(whole) // 3, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert not shard_is_done(tmp_path, KEY, NUM_POSITIONS)
    path.write_bytes(whole)
    assert shard_is_done(tmp_path, KEY, NUM_POSITIONS)


def test_a_flipped_bit_in_the_data_is_never_done(tmp_path: Path) -> None:
    path = write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    whole = path.read_bytes()
    metadata = pq.ParquetFile(path).metadata.row_group(0)
    for index in range(metadata.num_columns):
        column = metadata.column(index)
        start = column.dictionary_page_offset or column.data_page_offset
        damaged = bytearray(whole)
        damaged[start + column.total_compressed_size - 1] ^= 0x10
        path.write_bytes(bytes(damaged))
        assert not shard_is_done(tmp_path, KEY, NUM_POSITIONS), column.path_in_schema


def test_resume_writes_only_what_is_not_done_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = [replace(KEY, seed_start=start, seed_stop=start + 4) for start in (0, 4, 8)]
    for key in keys[:2]:
        write_shard(tmp_path, key, generations_of(key), NUM_POSITIONS)
    shard_path(tmp_path, keys[1]).write_bytes(b"PAR1 not really PAR1")
    with caplog.at_level(logging.WARNING):
        pending = [key for key in keys if not shard_is_done(tmp_path, key, NUM_POSITIONS)]
    assert pending == keys[1:]
    assert [record.message for record in caplog.records if "seeds=0004-0007" in record.message] != []
    assert len(caplog.records) == 1


def test_a_shard_of_another_run_length_is_not_done(tmp_path: Path) -> None:
    write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    assert not shard_is_done(tmp_path, KEY, NUM_POSITIONS * 2)
    assert not shard_is_done(tmp_path, KEY, NUM_POSITIONS // 2)


def test_shards_are_found_sorted_by_seed_number_and_filtered_by_name(tmp_path: Path) -> None:
    keys = [
        replace(KEY, arm=arm, seed_start=start, seed_stop=start + 1)
        for arm in ("off", "on")
        for start in (2, 9_999, 10_000)
    ]
    for key in reversed(keys):
        write_shard(tmp_path, key, generations_of(key), NUM_POSITIONS)
    (shard_path(tmp_path, keys[0]).parent / "seeds=first-last.parquet").write_bytes(b"")
    assert find_shards(tmp_path) == keys
    assert find_shards(tmp_path, arms=["on"]) == keys[3:]
    assert find_shards(tmp_path, configs=["other"]) == []


def test_sixty_four_thousand_rows_keep_their_order(tmp_path: Path) -> None:
    key = replace(KEY, seed_start=0, seed_stop=512)
    path = write_shard(tmp_path, key, generations_of(key, 128), 128)
    validate_shard(path, key, 128)
    table = pq.read_table(path, partitioning=None)
    place = table.column("seed").to_numpy() * 128 + table.column("position").to_numpy()
    assert np.array_equal(place, np.arange(512 * 128))
