"""Reading the samples of a run: whole tables, token arrays of one cell family, and the facts of acceptance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from equivtest.errors import InvalidSetting, InvalidShard, MissingSamples, UnknownName
from equivtest.records import ShardKey
from equivtest.samples.codes import sorted_codes
from equivtest.samples.keys import find_shards, shard_path
from equivtest.samples.schema import SAMPLES_SCHEMA
from equivtest.samples.validate import read_keyed_table


def read_samples(
    run_dir: Path,
    columns: Sequence[str] | None = None,
    *,
    arms: Collection[str] | None = None,
    configs: Collection[str] | None = None,
    prompt_ids: Collection[str] | None = None,
) -> pa.Table:
    """Every sample row of a run, sorted by (arm, config, prompt_id, seed, position); None takes everything.

    String columns are dictionary-encoded with one dictionary each, so `.to_pandas()` gives categories.
    Raises UnknownName for a column, MissingSamples when no shard matches, InvalidShard for one that is damaged
    or holds the samples of another key than its path names.
    """
    if columns is not None:
        for name in columns:
            if name not in SAMPLES_SCHEMA.names:
                raise UnknownName(kind="samples column", name=name, known=SAMPLES_SCHEMA.names)
    keys = find_shards(run_dir, arms=arms, configs=configs, prompt_ids=prompt_ids)
    if not keys:
        asked = {"arms": arms, "configs": configs, "prompt_ids": prompt_ids}
        filters = "".join(f", {name} {sorted(values)}" for name, values in asked.items() if values is not None)
        raise MissingSamples(missing=f"no samples in {run_dir}{filters}", remedy="collect them first")
    tables = [read_keyed_table(shard_path(run_dir, key), key, columns) for key in keys]
    return pa.concat_tables(tables).unify_dictionaries()


def read_arm_tokens(
    run_dir: Path, *, arm: str, config: str, prompt_id: str, seeds: range, num_positions: int
) -> npt.NDArray[np.int32]:
    """Token ids [len(seeds), num_positions] of one arm at one (config, prompt), rows in the order of `seeds`.

    Seeds outside the range that its shards also hold are left out. Raises MissingSamples when a row lacks, InvalidShard
    when a shard is damaged, holds a token twice, or holds the samples of another key than its path names.
    """
    if seeds.step != 1 or not seeds or num_positions < 1:
        raise InvalidSetting(
            setting="seeds, num_positions",
            value=(seeds, num_positions),
            requirement="must be consecutive seeds and at least 1",
        )
    tokens = np.full(len(seeds) * num_positions, -1, dtype=np.int32)
    for key in find_shards(run_dir, arms=[arm], configs=[config], prompt_ids=[prompt_id]):
        if key.seed_stop > seeds.start and key.seed_start < seeds.stop:
            _place_tokens(tokens, shard_path(run_dir, key), key, seeds, num_positions)
    lacking = tokens == -1
    if lacking.any():
        seed, position = divmod(int(np.argmax(lacking)), num_positions)
        raise MissingSamples(
            missing=f"{int(lacking.sum())} of {len(tokens)} tokens of arm {arm}, config {config}, prompt {prompt_id}, "
            f"first at seed {seeds[seed]}, position {position}",
            remedy="continue the run with --resume",
        )
    return tokens.reshape(len(seeds), num_positions)


def _place_tokens(tokens: npt.NDArray[np.int32], path: Path, key: ShardKey, seeds: range, num_positions: int) -> None:
    """Write one shard's tokens to their places in the flat array `tokens`, in place."""
    table = read_keyed_table(path, key, ["seed", "position", "token_id"])
    seed, position, token = (table.column(name).to_numpy() for name in table.column_names)
    inside = (seed >= seeds.start) & (seed < seeds.stop) & (position >= 0) & (position < num_positions)
    place = (seed[inside].astype(np.int64) - seeds.start) * num_positions + position[inside]
    if (tokens[place] != -1).any() or len(np.unique(place)) < len(place):
        raise InvalidShard(path, f"seeds {key.seed_start}..{key.seed_stop - 1} hold a token that is there already")
    tokens[place] = token[inside]


_ACCEPTANCE_COLUMNS = ("arm", "config", "origin", "slot", "num_draft")


def acceptance_by_slot(samples: pa.Table) -> pa.Table:
    """Columns arm, config, slot, offered, reached, accepted: what became of the drafts at each slot.

    `samples` needs the columns arm, config, origin, slot, num_draft (`read_samples`). Only tokens put out have rows:
    an accepted row at slot j is a draft reached and kept, a recovered row one reached and rejected; `offered` counts
    the rounds (a round that offers drafts has exactly one row at slot 0) with more than j drafts. A draft behind a
    rejection, or behind the end of the sample, is offered but not reached.
    """
    arms, configs, groups, slot, num_draft, origins = _acceptance_arrays(samples)
    accepted_row, recovered_row = origins == "accepted", origins == "recovered"
    num_slots = int(num_draft.max(initial=0))
    rows: dict[str, list[object]] = {"arm": [], "config": [], "slot": [], "offered": [], "reached": [], "accepted": []}
    for group, (arm, config) in enumerate(zip(arms, configs, strict=True)):
        here = groups == group
        drafts_per_round = num_draft[here & (slot == 0) & (accepted_row | recovered_row)]
        offered = (drafts_per_round[:, None] > np.arange(num_slots)).sum(axis=0)
        accepted = np.bincount(slot[here & accepted_row], minlength=num_slots)
        recovered = np.bincount(slot[here & recovered_row], minlength=num_slots)
        for index in range(num_slots):
            if offered[index]:
                values = (arm, config, index, offered[index], accepted[index] + recovered[index], accepted[index])
                for column, value in zip(rows.values(), values, strict=True):
                    column.append(value)
    types = [pa.string(), pa.string(), pa.int8(), pa.int64(), pa.int64(), pa.int64()]
    return pa.table({name: pa.array(rows[name], kind) for name, kind in zip(rows, types, strict=True)})


def acceptance_by_arm(samples: pa.Table) -> pa.Table:
    """Columns arm, config, num_tokens, num_rounds, accepted, recovered, bonus, plain, acceptance_rate, mean_accepted.

    `acceptance_rate` is accepted drafts over drafts reached, `mean_accepted` accepted drafts per round that offered
    any; both are null without such rounds. The last round of a sample may be cut off by its end, which lowers
    `mean_accepted` a little. Rows after the end of a text are no tokens. `samples` needs the columns that
    `acceptance_by_slot` needs.
    """
    arms, configs, groups, slot, num_draft, origins = _acceptance_arrays(samples)

    def count(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        return np.bincount(groups[rows], minlength=len(arms))

    by_origin = {origin: count(origins == origin) for origin in ("accepted", "recovered", "bonus", "plain")}
    rounds = count((slot == 0) & (num_draft > 0))
    accepted, reached = by_origin["accepted"], by_origin["accepted"] + by_origin["recovered"]
    return pa.table(
        {
            "arm": pa.array(arms, pa.string()),
            "config": pa.array(configs, pa.string()),
            "num_tokens": count(origins != "ended"),
            "num_rounds": rounds,
            **by_origin,
            "acceptance_rate": pa.array(accepted / np.maximum(reached, 1), mask=reached == 0),
            "mean_accepted": pa.array(accepted / np.maximum(rounds, 1), mask=rounds == 0),
        }
    )


def _acceptance_arrays(
    samples: pa.Table,
) -> tuple[
    list[str],
    list[str],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.int64],
    npt.NDArray[np.str_],
]:
    """Names of the (arm, config) groups, and per row: group index, slot, num_draft, origin."""
    samples = samples.select(_ACCEPTANCE_COLUMNS).combine_chunks().unify_dictionaries()
    (arm_codes, arm_names), (config_codes, config_names), (origin_codes, origin_names) = (
        sorted_codes(samples.column(name)) for name in ("arm", "config", "origin")
    )
    code, groups = np.unique(arm_codes * len(config_names) + config_codes, return_inverse=True)
    arms = [arm_names[index] for index in code // max(len(config_names), 1)]
    configs = [config_names[index] for index in code % max(len(config_names), 1)]
    slot, num_draft = (samples.column(name).to_numpy().astype(np.int64) for name in ("slot", "num_draft"))
    return arms, configs, groups, slot, num_draft, np.asarray(origin_names)[origin_codes]
