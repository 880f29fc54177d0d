"""What is read back is what was written, and what lacks is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equivtest.errors import InvalidSetting, InvalidShard, MissingSamples, UnknownName
from equivtest.records import Generation, ShardKey
from equivtest.samples.keys import shard_path
from equivtest.samples.reader import acceptance_by_arm, acceptance_by_slot, read_arm_tokens, read_samples
from equivtest.samples.schema import SAMPLES_SCHEMA
from equivtest.samples.shards import write_shard
from tests.samples.make import KEY, NUM_POSITIONS, cut_short, generations_of, plain_generation, spec_generation


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for arm in ("off", "on"):
        for config in ("topp95", "topk50"):
            for prompt_id in ("story", "code"):
                for start in (0, 4):
                    key = ShardKey(arm=arm, config=config, prompt_id=prompt_id, seed_start=start, seed_stop=start + 4)
                    write_shard(tmp_path, key, generations_of(key), NUM_POSITIONS)
    return tmp_path


def tokens_of(run_dir: Path, seeds: range, **changes: object) -> np.ndarray:
    where = {"arm": "on", "config": "topp95", "prompt_id": "story", "num_positions": NUM_POSITIONS} | changes
    return read_arm_tokens(run_dir, seeds=seeds, **where)


def test_tokens_come_back_by_seed_and_position_across_shards(run_dir: Path) -> None:
    tokens = tokens_of(run_dir, range(0, 8))
    expected = np.stack([spec_generation(seed).token_ids for seed in range(8)])
    assert tokens.dtype == np.int32
    assert tokens.shape == (8, NUM_POSITIONS)
    assert np.array_equal(tokens, expected)
    assert np.array_equal(tokens_of(run_dir, range(3, 6)), expected[3:6])
    assert np.array_equal(tokens_of(run_dir, range(3, 6), num_positions=5), expected[3:6, :5])


@pytest.mark.parametrize(
    ("seeds", "changes", "words"),
    [
        (range(0, 9), {}, "16 of 144 tokens of arm on, config topp95, prompt story, first at seed 8, position 0"),
        (range(0, 8), {"num_positions": 17}, "8 of 136 tokens .* first at seed 0, position 16"),
        (range(0, 8), {"prompt_id": "unknown"}, "128 of 128 tokens"),
        (range(0, 8), {"arm": "biased"}, "128 of 128 tokens of arm biased"),
    ],
)
def test_missing_tokens_are_counted_and_the_first_is_named(
    run_dir: Path, seeds: range, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(MissingSamples, match=words):
        tokens_of(run_dir, seeds, **changes)


def test_a_token_that_two_shards_hold_is_refused(run_dir: Path) -> None:
    write_shard(
        run_dir, replace(KEY, seed_start=3, seed_stop=5), [spec_generation(3), spec_generation(4)], NUM_POSITIONS
    )
    with pytest.raises(InvalidShard, match="a token that is there already"):
        tokens_of(run_dir, range(0, 8))


def test_a_damaged_shard_is_refused_when_read(run_dir: Path) -> None:
    path = shard_path(run_dir, replace(KEY, seed_start=4, seed_stop=8))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidShard, match="truncated or corrupt"):
        tokens_of(run_dir, range(0, 8))
    with pytest.raises(InvalidShard, match="truncated or corrupt"):
        read_samples(run_dir)
    assert tokens_of(run_dir, range(0, 4)).shape == (4, NUM_POSITIONS)


def assert_refused_when_read(run_dir: Path, words: str) -> None:
    """Both readers refuse the shards of KEY's cell family, whether or not the key columns are asked for."""
    with pytest.raises(InvalidShard, match=words):
        tokens_of(run_dir, range(0, 8))
    for columns in (None, ["token_id"]):
        with pytest.raises(InvalidShard, match=words):
            read_samples(run_dir, columns, arms=["on"], configs=["topp95"], prompt_ids=["story"])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"prompt_id": "code"}, "prompt_id 'code' in a shard of prompt_id 'story'"),
        ({"config": "topk50"}, "config 'topk50' in a shard of config 'topp95'"),
        ({"arm": "off"}, "arm 'off' in a shard of arm 'on'"),
        ({"seed_start": 0, "seed_stop": 4}, r"seeds 0\.\.3 in a shard of seeds 4\.\.7"),
    ],
    ids=["prompt", "config", "arm", "seeds"],
)
def test_a_shard_copied_over_another_is_refused_when_read(run_dir: Path, other: dict[str, object], words: str) -> None:
    source, target = shard_path(run_dir, replace(KEY, **other)), shard_path(run_dir, KEY)
    target.write_bytes(source.read_bytes())
    assert_refused_when_read(run_dir, rf"seeds=0004-0007\.parquet: {words}")


@pytest.mark.parametrize(("start", "stop"), [(4, 7), (5, 8), (4, 9), (3, 8)])
def test_a_shard_renamed_to_other_seeds_is_refused_when_read(run_dir: Path, start: int, stop: int) -> None:
    path = shard_path(run_dir, KEY)
    path.rename(shard_path(run_dir, replace(KEY, seed_start=start, seed_stop=stop)))
    assert_refused_when_read(run_dir, rf"seeds 4\.\.7 in a shard of seeds {start}\.\.{stop - 1}")


def test_a_shard_in_a_renamed_folder_is_refused_when_read(run_dir: Path) -> None:
    folder = shard_path(run_dir, KEY).parent
    folder.rename(folder.with_name("prompt=chat"))
    with pytest.raises(InvalidShard, match="prompt_id 'story' in a shard of prompt_id 'chat'"):
        tokens_of(run_dir, range(0, 8), prompt_id="chat")
    with pytest.raises(InvalidShard, match="prompt_id 'story' in a shard of prompt_id 'chat'"):
        read_samples(run_dir, ["token_id"])


def test_a_shard_without_rows_is_refused_when_read(run_dir: Path) -> None:
    path = shard_path(run_dir, KEY)
    pq.write_table(pq.read_table(path, partitioning=None).slice(0, 0), path)
    assert_refused_when_read(run_dir, r"no seeds in a shard of seeds 4\.\.7")


@pytest.mark.parametrize("seeds", [range(0), range(0, 8, 2)])
def test_seeds_must_be_consecutive(run_dir: Path, seeds: range) -> None:
    with pytest.raises(InvalidSetting):
        tokens_of(run_dir, seeds)


def test_the_whole_run_is_one_table_in_the_schema_sorted_by_key(run_dir: Path) -> None:
    table = read_samples(run_dir)
    assert table.num_rows == 2 * 2 * 2 * 8 * NUM_POSITIONS
    assert table.schema.equals(SAMPLES_SCHEMA)
    frame = table.to_pandas()
    assert frame["arm"].cat.categories.tolist() == ["off", "on"]
    columns = ("arm", "config", "prompt_id", "seed", "position")
    keys = list(frame[list(columns)].astype({name: str for name in columns[:3]}).itertuples(index=False, name=None))
    assert keys == sorted(keys)


def test_filters_and_columns_narrow_what_is_read(run_dir: Path) -> None:
    table = read_samples(run_dir, ["token_id", "arm"], arms=["on"], configs=["topk50"], prompt_ids=["story", "code"])
    assert table.column_names == ["token_id", "arm"]
    assert table.num_rows == 2 * 8 * NUM_POSITIONS
    assert set(table.column("arm").to_pylist()) == {"on"}
    with pytest.raises(UnknownName, match="tokens"):
        read_samples(run_dir, ["tokens"])
    with pytest.raises(MissingSamples, match=r"arms \['biased'\]"):
        read_samples(run_dir, arms=["biased"])


def slot_counts(generations: list[Generation]) -> dict[int, tuple[int, int, int]]:
    """Slot -> (offered, reached, accepted), counted token by token."""
    counts: dict[int, list[int]] = {}
    for generation in generations:
        rounds: dict[int, int] = {}
        for origin, slot, step, num_draft in zip(
            generation.origins, generation.slots, generation.steps, generation.num_drafts, strict=True
        ):
            if num_draft:
                rounds[int(step)] = int(num_draft)
            if origin in ("accepted", "recovered"):
                entry = counts.setdefault(int(slot), [0, 0, 0])
                entry[1] += 1
                entry[2] += origin == "accepted"
        for num_draft in rounds.values():
            for slot in range(num_draft):
                counts.setdefault(slot, [0, 0, 0])[0] += 1
    return {slot: (offered, reached, accepted) for slot, (offered, reached, accepted) in counts.items()}


def test_acceptance_by_slot_agrees_with_counting_token_by_token(run_dir: Path) -> None:
    facts = acceptance_by_slot(read_samples(run_dir)).to_pylist()
    expected = slot_counts([spec_generation(seed) for seed in range(8)] * 2)
    for config in ("topp95", "topk50"):
        counted = {
            row["slot"]: (row["offered"], row["reached"], row["accepted"]) for row in facts if row["config"] == config
        }
        assert counted == expected
    assert {row["arm"] for row in facts} == {"on"}, "the plain arm has no slots"


def test_acceptance_by_slot_sees_another_acceptance() -> None:
    low, high = (
        acceptance_rate_at_slot_0([spec_generation(seed, accept=accept) for seed in range(64)]) for accept in (0.3, 0.9)
    )
    assert low < 0.4
    assert high > 0.8


def acceptance_rate_at_slot_0(generations: list[Generation]) -> float:
    _, reached, accepted = slot_counts(generations)[0]
    return accepted / reached


def test_acceptance_by_arm_sums_up_and_leaves_rates_of_plain_arms_empty(run_dir: Path) -> None:
    facts = {(row["arm"], row["config"]): row for row in acceptance_by_arm(read_samples(run_dir)).to_pylist()}
    plain = facts["off", "topp95"]
    assert plain["num_tokens"] == plain["plain"] == 2 * 8 * NUM_POSITIONS
    assert plain["num_rounds"] == 0
    assert plain["acceptance_rate"] is None
    assert plain["mean_accepted"] is None
    spec, by_slot = facts["on", "topp95"], slot_counts([spec_generation(seed) for seed in range(8)] * 2)
    accepted, reached = (sum(counts[index] for counts in by_slot.values()) for index in (2, 1))
    assert spec["accepted"] == accepted
    assert spec["num_rounds"] == by_slot[0][0]
    assert spec["acceptance_rate"] == accepted / reached
    assert spec["mean_accepted"] == accepted / by_slot[0][0]
    assert sum(spec[origin] for origin in ("accepted", "recovered", "bonus", "plain")) == spec["num_tokens"]


def test_facts_do_not_depend_on_the_order_of_rows_or_files(run_dir: Path) -> None:
    table = read_samples(run_dir)
    shuffled = table.take(np.random.default_rng(0).permutation(table.num_rows))
    assert acceptance_by_slot(shuffled).equals(acceptance_by_slot(table))
    assert acceptance_by_arm(shuffled).equals(acceptance_by_arm(table))


def test_positions_after_the_end_of_a_text_are_no_tokens_of_the_acceptance_tables(tmp_path: Path) -> None:
    generations = [cut_short(spec_generation(seed), 5 + seed) for seed in range(4)]
    write_shard(tmp_path, KEY, generations, NUM_POSITIONS)
    samples = read_samples(tmp_path)
    assert samples.num_rows == 4 * NUM_POSITIONS
    counted = {
        row["slot"]: (row["offered"], row["reached"], row["accepted"])
        for row in acceptance_by_slot(samples).to_pylist()
    }
    assert counted == slot_counts(generations)
    (arm,) = acceptance_by_arm(samples).to_pylist()
    assert arm["num_tokens"] == 5 + 6 + 7 + 8
    assert sum(arm[origin] for origin in ("accepted", "recovered", "bonus", "plain")) == arm["num_tokens"]


def test_plain_only_samples_have_no_slots(tmp_path: Path) -> None:
    key = replace(KEY, arm="off")
    write_shard(tmp_path, key, [plain_generation(seed) for seed in range(4)], NUM_POSITIONS)
    assert acceptance_by_slot(read_samples(tmp_path)).num_rows == 0


def test_a_shard_with_an_unknown_column_is_refused_by_the_reader(tmp_path: Path) -> None:
    path = write_shard(tmp_path, KEY, generations_of(KEY), NUM_POSITIONS)
    table = pq.read_table(path, partitioning=None)
    pq.write_table(table.append_column("extra", pa.array([0] * table.num_rows)), path)
    with pytest.raises(InvalidShard, match="unknown columns: extra"):
        read_samples(tmp_path)
