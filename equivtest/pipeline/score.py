"""Scores collected samples: computes the law columns that are not on disk yet, one shard at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from equivtest.decoder.scorer import FinishedSamples, Scorer
from equivtest.pipeline.progress import Listener
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Batch, Protocol
from equivtest.samples.keys import shard_path
from equivtest.samples.law import law_shard_is_done, write_law_shard
from equivtest.samples.validate import read_keyed_table


def score(
    run_dir: Path,
    protocol: Protocol,
    scorer: Scorer,
    prompts: Mapping[str, tuple[int, ...]],
    batches: Iterable[Batch],
    listener: Listener,
    label: str,
) -> float:
    """Make the law file of every shard of `batches` valid on disk. Returns the seconds spent scoring.

    prompts: token ids by prompt id, as they were decoded. Raises InvalidShard when samples are absent or damaged.
    """
    shards = [key for batch in batches for key in batch]
    listener.start(label, protocol.num_positions * sum(key.num_seeds for key in shards))
    seconds = 0.0
    for key in shards:
        shape = (key.num_seeds, protocol.num_positions)
        if law_shard_is_done(run_dir, key, protocol.num_positions):
            listener.skip(shape[0] * shape[1])
            continue
        table = read_keyed_table(shard_path(run_dir, key), key, ["token_id", "draft_token_id"])
        token_ids, draft_token_ids = (column.fill_null(-1).to_numpy().reshape(shape) for column in table.columns)
        samples = FinishedSamples(
            prompt_token_ids=prompts[key.prompt_id],
            params=CONFIGS[key.config],
            token_ids=token_ids,
            draft_token_ids=draft_token_ids,
            stream_keys=np.array(
                [
                    protocol.stream_key(key.arm, key.config, key.prompt_id, seed)
                    for seed in range(key.seed_start, key.seed_stop)
                ]
            ),
        )
        started = time.perf_counter()
        law = scorer.score(samples, on_tokens=listener.advance)
        seconds += time.perf_counter() - started
        write_law_shard(run_dir, key, token_ids, law)
    listener.finish()
    return seconds
