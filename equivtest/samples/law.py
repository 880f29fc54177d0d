"""The law columns of a shard of samples, in a file of their own under the same key: `law/` beside `samples/`.

The rows are those of the samples file, in its order, and repeat its token ids: law columns of other samples than those
on disk do not validate, and are computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from equivtest.errors import InvalidShard, MissingSamples, UnknownName
from equivtest.records import LawColumns, ShardKey
from equivtest.samples.keys import find_shards, shard_path
from equivtest.samples.schema import SAMPLES_SCHEMA
from equivtest.samples.shards import constant_column, write_table
from equivtest.samples.validate import key_problems, read_keyed_table, read_shard_table

_LOG = logging.getLogger(__name__)

LAW_SCHEMA_VERSION = 1
LAW_VERSION_KEY = b"equivtest.law.version"

_KEYS = ("arm", "config", "prompt_id", "seed", "position", "token_id")
_DRAFT = ("p_draft", "q_token", "q_mean", "q_variance")

LAW_COLUMN_DOCS: Mapping[str, str] = MappingProxyType(
    {
        "p_token": "probability of the token under the target's filtered law at its prefix",
        "p_draft": "probability of the draft token under that law; null where no draft was offered",
        "q_token": "probability of the token under the law the draft was drawn from; 1 or 0 for a greedy drafter",
        "q_mean": "mean of that law's probabilities over the target's law; p_draft for a greedy drafter",
        "q_variance": "their variance over the target's law",
        "pit_rank": "randomised probability integral transform with tokens in descending probability, ties together",
        "pit_vocab": "randomised probability integral transform with tokens in vocabulary order",
        "surprisal": "-ln p_token, nats; null where p_token is 0",
        "entropy": "mean surprisal of the law, nats",
        "var_surprisal": "variance of the surprisal under the law, squared nats",
        "support_violation": "the law does not hold the token, beyond the tolerance at a filter's cut",
    }
)
"""What each law column holds, in the order of the file, after the key columns of the samples file and token_id."""

LAW_NULLABLE = frozenset({*_DRAFT, "surprisal"})

LAW_SCHEMA = pa.schema(
    [
        *(SAMPLES_SCHEMA.field(name) for name in _KEYS),
        *(
            pa.field(
                name,
                pa.bool_() if name == "support_violation" else pa.float32(),
                nullable=name in LAW_NULLABLE,
                metadata={"description": description},
            )
            for name, description in LAW_COLUMN_DOCS.items()
        ),
    ],
    metadata={LAW_VERSION_KEY: str(LAW_SCHEMA_VERSION).encode()},
)
"""The arrow schema of every law file."""


def write_law_shard(run_dir: Path, key: ShardKey, token_ids: npt.NDArray[np.integer], law: LawColumns) -> Path:
    """Write the law columns of seeds `seed_start..seed_stop-1` and return the path of the file.

    token_ids: [num_seeds, num_positions], the tokens that were scored. Validated before anything is written, and whole
    or not there at all under its name. Raises InvalidShard.
    """
    path = shard_path(run_dir, key, kind="law")
    if law.p_token.shape != token_ids.shape or len(token_ids) != key.num_seeds:
        shapes = f"{token_ids.shape} tokens, {law.p_token.shape} law columns"
        raise InvalidShard(path, f"{shapes} for {key.num_seeds} seeds")
    num_seeds, num_positions = token_ids.shape
    num_rows = num_seeds * num_positions
    p_token, no_draft = law.p_token.ravel(), ~law.has_draft.ravel()
    impossible = p_token == 0
    columns: dict[str, pa.Array | npt.NDArray[np.generic]] = {
        **{name: constant_column(getattr(key, name), num_rows) for name in ("arm", "config", "prompt_id")},
        "seed": np.repeat(np.arange(key.seed_start, key.seed_stop), num_positions),
        "position": np.tile(np.arange(num_positions), num_seeds),
        "token_id": token_ids.ravel(),
        **{name: pa.array(getattr(law, name).ravel(), mask=no_draft) for name in _DRAFT},
        "surprisal": pa.array(-np.log(np.where(impossible, 1.0, p_token)), mask=impossible),
    }
    arrays = [
        pa.array(columns[name] if name in columns else getattr(law, name).ravel()).cast(LAW_SCHEMA.field(name).type)
        for name in LAW_SCHEMA.names
    ]
    table = pa.Table.from_arrays(arrays, schema=LAW_SCHEMA)
    for problem in _problems(table, key, num_positions):
        raise InvalidShard(path, problem)
    write_table(path, table)
    return path


def validate_law_shard(run_dir: Path, key: ShardKey, num_positions: int) -> None:
    """Raise InvalidShard unless the law file of `key` is whole and of the very tokens in its samples file."""
    path, samples_path = shard_path(run_dir, key, kind="law"), shard_path(run_dir, key)
    table = read_shard_table(path, schema=LAW_SCHEMA)
    for problem in _problems(table, key, num_positions):
        raise InvalidShard(path, problem)
    samples = read_shard_table(samples_path, ["token_id"])
    if not table.column("token_id").equals(samples.column("token_id")):
        raise InvalidShard(path, f"scores other tokens than {samples_path} holds")


def law_shard_is_done(run_dir: Path, key: ShardKey, num_positions: int) -> bool:
    """Whether the law file exists and validates. An invalid one is reported by a log warning and counts as not done."""
    if not shard_path(run_dir, key, kind="law").exists():
        return False
    try:
        validate_law_shard(run_dir, key, num_positions)
    except InvalidShard as invalid:
        _LOG.warning("scoring again: %s", invalid)
        return False
    return True


def read_law(
    run_dir: Path,
    columns: Sequence[str] | None = None,
    *,
    arms: Collection[str] | None = None,
    configs: Collection[str] | None = None,
    prompt_ids: Collection[str] | None = None,
) -> pa.Table:
    """Law rows of a run, sorted by (arm, config, prompt_id, seed, position): row for row those of `read_samples`.

    Raises UnknownName for a column, MissingSamples when no file matches, InvalidShard for one that is damaged or
    holds the rows of another key than its path names.
    """
    for name in columns or ():
        if name not in LAW_SCHEMA.names:
            raise UnknownName(kind="law column", name=name, known=LAW_SCHEMA.names)
    keys = find_shards(run_dir, arms=arms, configs=configs, prompt_ids=prompt_ids, kind="law")
    if not keys:
        raise MissingSamples(missing=f"no law columns in {run_dir} for what was asked", remedy="score the run first")
    tables = [read_keyed_table(shard_path(run_dir, key, kind="law"), key, columns, schema=LAW_SCHEMA) for key in keys]
    return pa.concat_tables(tables).unify_dictionaries()


def _problems(table: pa.Table, key: ShardKey, num_positions: int) -> Iterator[str]:
    yield from key_problems(table, key, num_positions, LAW_NULLABLE)
    for name in LAW_COLUMN_DOCS:
        if name == "support_violation":
            continue
        column = table.column(name)
        high = np.inf if name in ("surprisal", "entropy", "var_surprisal") else 1.0
        values = pc.drop_null(column).to_numpy()
        wrong = ~((values >= 0) & (values <= high) & np.isfinite(values))
        if wrong.any():
            yield f"{name} {values[np.argmax(wrong)]} is not a finite number in 0..{high:g}"
    has_draft = table.column("p_draft").is_valid()
    for name in _DRAFT:
        if not table.column(name).is_valid().equals(has_draft):
            yield f"{name} and p_draft are null in different rows"
