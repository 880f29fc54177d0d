"""Samples that another program wrote are read in each layout, and what is wrong with them is located."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equivtest.errors import InvalidShard, MissingSamples, UsageError
from equivtest.samples.recorded import DEFAULT_CONFIG, CellFamily, read_recorded
from equivtest.samples.shards import write_shard
from tests.samples.make import KEY, NUM_POSITIONS, generations_of, spec_generation

TOKENS = np.arange(12, dtype=np.int32).reshape(3, 4)
SEEDS = (7, 3, 5)


def token_rows() -> list[dict[str, object]]:
    return [
        {"prompt_id": "story", "seed": seed, "position": position, "token_id": int(TOKENS[row, position])}
        for row, seed in enumerate(SEEDS)
        for position in range(4)
    ]


def sample_rows() -> list[dict[str, object]]:
    return [{"prompt_id": "story", "seed": seed, "token_ids": TOKENS[row].tolist()} for row, seed in enumerate(SEEDS)]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_the_three_layouts_give_the_same_arrays_sorted_by_seed(tmp_path: Path) -> None:
    files = [
        write_parquet(tmp_path / "rows.parquet", token_rows()),
        write_jsonl(tmp_path / "rows.jsonl", token_rows()),
        write_jsonl(tmp_path / "samples.jsonl", sample_rows()),
    ]
    for path in files:
        recorded = read_recorded(path)
        assert list(recorded.tokens) == [CellFamily(DEFAULT_CONFIG, "story")]
        tokens = recorded.tokens[DEFAULT_CONFIG, "story"]
        assert tokens.dtype == np.int32
        assert np.array_equal(tokens, TOKENS[[1, 2, 0]])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_text("\r\n".join(map(json.dumps, sample_rows())), encoding="utf-8-sig")
    assert np.array_equal(read_recorded(path).tokens[DEFAULT_CONFIG, "story"], TOKENS[[1, 2, 0]])


def test_configs_and_prompts_are_told_apart_and_may_differ_in_length(tmp_path: Path) -> None:
    rows = [row | {"config": "topk50"} for row in sample_rows()]
    rows += [row | {"config": "topp95", "prompt_id": "code", "token_ids": [1, 2]} for row in sample_rows()]
    recorded = read_recorded(write_jsonl(tmp_path / "on.jsonl", rows))
    assert {tuple(family): tokens.shape for family, tokens in recorded.tokens.items()} == {
        ("topk50", "story"): (3, 4),
        ("topp95", "code"): (3, 2),
    }


def test_a_shard_of_a_run_and_a_folder_of_one_arm_can_be_read(tmp_path: Path) -> None:
    path = write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    expected = np.stack([spec_generation(seed).token_ids for seed in range(4, 8)])
    for source in (path, tmp_path / "samples" / "arm=on"):
        assert np.array_equal(read_recorded(source).tokens["topp95", "story"], expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_id": None}, "prompt_id is empty in 1 rows, first in row 2"),
        ({"token_id": None}, "token_id is empty in 1 rows, first in row 2"),
        ({"token_id": -5}, "token_id is -5 in row 2"),
        ({"seed": 2**31}, "seed is 2147483648 in row 2"),
        ({"position": 1}, "seed 7, position 1 is there twice"),
    ],
)
def test_a_wrong_entry_of_a_parquet_file_is_located(tmp_path: Path, change: dict[str, object], words: str) -> None:
    rows = token_rows()
    rows[2] |= change
    with pytest.raises(InvalidShard, match=words):
        read_recorded(write_parquet(tmp_path / "on.parquet", rows))


def test_a_missing_or_mistyped_column_is_named(tmp_path: Path) -> None:
    without = [{key: value for key, value in row.items() if key != "seed"} for row in token_rows()]
    with pytest.raises(InvalidShard, match="no column seed; it has prompt_id, position, token_id"):
        read_recorded(write_parquet(tmp_path / "on.parquet", without))
    words = [row | {"token_id": "the"} for row in token_rows()]
    with pytest.raises(InvalidShard, match="column token_id has type string, must be whole numbers"):
        read_recorded(write_parquet(tmp_path / "on.parquet", words))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON: .* at column 2"),
        ("[1]", "line 2: must be a JSON object"),
        ('{"prompt_id": "story", "seed": 1}', "line 2: lacks position"),
        ('{"seed": 1, "token_ids": [1]}', "line 2: lacks prompt_id"),
        ('{"prompt_id": "story", "seed": "1", "token_ids": [1]}', "line 2: seed is '1', must be a whole number"),
        ('{"prompt_id": "story", "seed": true, "token_ids": [1]}', "line 2: seed is True"),
        ('{"prompt_id": 3, "seed": 1, "token_ids": [1]}', "line 2: prompt_id is 3, must be text"),
        ('{"prompt_id": "story", "seed": 1, "token_ids": []}', "line 2: token_ids must be a list"),
        ('{"prompt_id": "story", "seed": 1, "token_ids": [1.5]}', "line 2: token_ids must be a list"),
        ('{"prompt_id": "story", "seed": 1, "position": 0, "token_id": -1}', "line 2: token_id is -1"),
    ],
)
def test_a_wrong_line_is_located(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "on.jsonl"
    path.write_text('{"prompt_id": "story", "seed": 0, "token_ids": [1]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InvalidShard, match=words) as refused:
        read_recorded(path)
    assert refused.value.path == path


def test_a_shorter_list_repeats_its_last_token(tmp_path: Path) -> None:
    rows = sample_rows()
    rows[1]["token_ids"] = [1, 2]
    recorded = read_recorded(write_jsonl(tmp_path / "on.jsonl", rows))
    family = CellFamily(DEFAULT_CONFIG, "story")
    assert recorded.tokens[family].tolist() == [[1, 2, 2, 2], TOKENS[2].tolist(), TOKENS[0].tolist()]
    assert recorded.ended_early == {family}
    assert not read_recorded(write_jsonl(tmp_path / "on.jsonl", sample_rows())).ended_early
    rows[0]["token_ids"] = list(range(1_000))
    assert read_recorded(write_jsonl(tmp_path / "on.jsonl", rows)).tokens[family].shape == (3, 1_000)


def test_rows_that_are_not_there_are_refused_with_the_remedy(tmp_path: Path) -> None:
    for lost in ([7], [6, 7]):
        rows = [row for index, row in enumerate(token_rows()) if index not in lost]
        words = rf"{len(lost)} of 12 tokens .* first at seed 3, position {4 - len(lost)}; .* ignore end-of-text"
        for write, name in ((write_jsonl, "on.jsonl"), (write_parquet, "on.parquet")):
            with pytest.raises(MissingSamples, match=words):
                read_recorded(write(tmp_path / name, rows))


def test_a_stray_position_is_refused_without_allocating_a_grid_for_it(tmp_path: Path) -> None:
    rows = token_rows()
    rows[2]["position"] = 2**31 - 1
    with pytest.raises(MissingSamples, match="seed 7 has position 2147483647"):
        read_recorded(write_parquet(tmp_path / "on.parquet", rows))


@pytest.mark.parametrize("name", ["on.parquet", "on.jsonl"])
def test_a_file_with_two_arms_is_refused_and_one_arm_is_read(tmp_path: Path, name: str) -> None:
    write = write_parquet if name.endswith("parquet") else write_jsonl
    one = [row | {"arm": "on"} for row in token_rows()]
    two = one + [row | {"arm": "off"} for row in token_rows()]
    assert len(read_recorded(write(tmp_path / name, one)).tokens) == 1
    with pytest.raises(InvalidShard, match="holds the arms off, on"):
        read_recorded(write(tmp_path / name, two))


def test_what_is_not_a_samples_file_is_a_usage_error_or_an_invalid_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_recorded(tmp_path / "none.jsonl")
    (tmp_path / "on.csv").write_text("seed\n")
    with pytest.raises(UsageError, match=r"samples are read from \.parquet or \.jsonl"):
        read_recorded(tmp_path / "on.csv")
    with pytest.raises(UsageError, match=r"holds no \.parquet or \.jsonl file"):
        read_recorded(tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidShard, match="truncated or corrupt"):
        read_recorded(tmp_path / "bad.parquet")
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidShard, match="not UTF-8"):
        read_recorded(tmp_path / "bad.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(MissingSamples, match="no rows"):
        read_recorded(tmp_path / "empty.jsonl")
