"""From the samples and law files of a run to what the law family takes. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from equivtest.errors import InvalidSetting, InvalidShard, MissingSamples
from equivtest.pipeline.manifest import Manifest
from equivtest.protocol.plan import Batch
from equivtest.records import Origin, ShardKey
from equivtest.samples.keys import shard_path
from equivtest.samples.law import LAW_SCHEMA
from equivtest.samples.validate import read_keyed_table
from equivtest.stats.logprobs import BFLOAT16, FLOAT32, LogprobTolerance
from equivtest.stats.scored import ORIGIN_CODES, ScoredTokens

_SAMPLE_COLUMNS = ("seed", "position", "token_id", "slot", "num_draft", "step", "batch_row")
_LAW_COLUMNS = ("p_token", "pit_rank", "pit_vocab", "entropy", "var_surprisal")
_DRAFT_COLUMNS = ("q_token", "q_mean", "q_variance")


def read_scored_tokens(run_dir: Path, batches: Iterable[Batch], num_positions: int) -> ScoredTokens:
    """Every token of the batches, in their order. A batch is one `generate` call, a group one (arm, config, prompt).

    Positions after the end of a text are left out where the law ends there as well. Where it goes on the first of them
    stays in: an end of text of probability 0, against the law's support.

    Raises MissingSamples for no batch, InvalidShard when a file is absent, damaged or not of the same tokens.
    """
    parts: list[dict[str, npt.NDArray[np.generic]]] = []
    groups: dict[tuple[str, str, str], int] = {}
    for batch_index, batch in enumerate(batches):
        for key in batch:
            group = groups.setdefault((key.arm, key.config, key.prompt_id), len(groups))
            part = _read_shard(run_dir, key, num_positions)
            ones = np.ones(len(part["position"]), np.int64)
            # Seeds are below 2**31, so group and seed make one number.
            sample = part.pop("seed").astype(np.int64) + (group << 32)
            parts.append(part | {"sample": sample, "batch": ones * batch_index, "group": ones * group})
    if not parts:
        raise MissingSamples("no batch to read", "ask for at least one")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if np.isnan(columns["logprob"]).all():
        del columns["logprob"]
    try:
        return ScoredTokens(**columns)
    except InvalidSetting as wrong:
        raise InvalidShard(run_dir / "law", f"{wrong}; delete the files and score again with --resume") from wrong


def logprob_tolerance(run_dir: Path) -> LogprobTolerance:
    """Of the precision that the run's manifest names; an engine that names none is held to float32."""
    return FLOAT32 if Manifest.read(run_dir).subject.get("dtype", "float32") == "float32" else BFLOAT16


def _read_shard(run_dir: Path, key: ShardKey, num_positions: int) -> dict[str, npt.NDArray[np.generic]]:
    samples = read_keyed_table(shard_path(run_dir, key), key, [*_SAMPLE_COLUMNS, "draft_token_id", "origin", "logprob"])
    law_path = shard_path(run_dir, key, kind="law")
    law = read_keyed_table(
        law_path,
        key,
        ["seed", "position", "token_id", *_LAW_COLUMNS, *_DRAFT_COLUMNS, "support_violation"],
        schema=LAW_SCHEMA,
    )
    if samples.num_rows != key.num_seeds * num_positions or any(
        not samples.column(name).equals(law.column(name)) for name in ("seed", "position", "token_id")
    ):
        raise MissingSamples(f"law columns of the samples of {law_path}", "score the run again")
    origin = pc.index_in(samples.column("origin").cast(pa.string()), value_set=pa.array([str(o) for o in Origin]))
    columns = {
        **{name: samples.column(name).to_numpy() for name in _SAMPLE_COLUMNS},
        **{name: law.column(name).to_numpy() for name in (*_LAW_COLUMNS, "support_violation")},
        **{name: pc.fill_null(law.column(name), 0.0).to_numpy() for name in _DRAFT_COLUMNS},
        "is_draft": pc.fill_null(
            pc.equal(samples.column("token_id"), samples.column("draft_token_id")), False
        ).to_numpy(),
        "origin": origin.to_numpy(),
        "logprob": _reported(samples.column("logprob")),
    }
    ended = columns["origin"] == ORIGIN_CODES[Origin.ENDED]
    wrong = ended & ~np.roll(ended, 1) & ~((columns["p_token"] == 1) & (columns["entropy"] == 0))
    columns["p_token"] = np.where(wrong, 0.0, columns["p_token"])
    columns["support_violation"] = columns["support_violation"] | wrong
    return {name: values[~ended | wrong] for name, values in columns.items()}


def _reported(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """NaN for null, -inf for what is no finite number."""
    values = pc.fill_null(column, 0.0).to_numpy().astype(np.float64)
    return np.where(column.is_null().to_numpy(), np.nan, np.where(np.isfinite(values), values, -np.inf))
