"""Scores collected samples: computes the law columns that are not on disk yet, one shard at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.engines.base import Engine
from equivtest.errors import InvalidSetting
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.progress import Listener
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Batch, Protocol
from equivtest.records import ShardKey
from equivtest.samples.keys import shard_path
from equivtest.samples.law import law_shard_is_done, write_law_shard
from equivtest.samples.validate import read_keyed_table


def score(
    run_dir: Path,
    protocol: Protocol,
    manifest: Manifest,
    engine: Engine,
    batches: Iterable[Batch],
    listener: Listener,
    label: str,
) -> Manifest:
    """Make the law file of every shard of `batches` valid on disk. Returns the manifest with the time spent added.

    Raises InvalidShard when samples are absent or damaged, InvalidSetting for an engine whose law cannot be reached.
    """
    scorer = engine.scorer()
    if scorer is None:
        raise InvalidSetting("engine", engine.describe().get("engine"), "has no law to hold tokens against")
    shards = [key for batch in batches for key in batch]
    listener.start(label, protocol.num_positions * sum(key.num_seeds for key in shards))
    prompts = {prompt.id: engine.encode_prompt(prompt.conversation) for prompt in protocol.prompts}
    for key in shards:
        if law_shard_is_done(run_dir, key, protocol.num_positions):
            listener.skip(key.num_seeds * protocol.num_positions)
            continue
        started = time.perf_counter()
        samples = _finished_samples(run_dir, protocol, key, prompts[key.prompt_id])
        write_law_shard(run_dir, key, samples.token_ids, scorer.score(samples, on_tokens=listener.advance))
        manifest = manifest.add_score_time(key.arm, time.perf_counter() - started)
        manifest.write(run_dir)
    listener.finish()
    return manifest


def _finished_samples(
    run_dir: Path, protocol: Protocol, key: ShardKey, prompt_token_ids: tuple[int, ...]
) -> FinishedSamples:
    table = read_keyed_table(shard_path(run_dir, key), key, ["token_id", "draft_token_id", "slot"])
    shape = (key.num_seeds, protocol.num_positions)
    token_ids, draft_token_ids, slots = (column.fill_null(-1).to_numpy().reshape(shape) for column in table.columns)
    seeds = range(key.seed_start, key.seed_stop)
    return FinishedSamples(
        prompt_token_ids=prompt_token_ids,
        params=CONFIGS[key.config],
        token_ids=token_ids,
        draft_token_ids=draft_token_ids,
        slots=slots,
        stream_keys=np.array([protocol.stream_key(key.arm, key.config, key.prompt_id, seed) for seed in seeds]),
    )
