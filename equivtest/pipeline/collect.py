"""Collects samples: generates what is not on disk yet, one batch at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from equivtest.engines.base import Engine
from equivtest.errors import InvalidShard
from equivtest.faults import Fault, get_fault
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.progress import Listener
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Batch, Protocol
from equivtest.records import Arm, Generation, Request, ShardKey
from equivtest.samples.keys import shard_path
from equivtest.samples.shards import shard_is_done, write_shard


def collect(
    run_dir: Path,
    protocol: Protocol,
    manifest: Manifest,
    engine: Engine,
    batches: Iterable[Batch],
    listener: Listener,
    label: str,
    planted: Fault | None = None,
) -> Manifest:
    """Make every shard of `batches` valid on disk. Returns the manifest with the time spent added.

    A batch is generated whole or not at all: if one of its shards is missing, all its samples are generated again, in
    the same batch shape, so that a resumed run gives the bytes that an uninterrupted one would have given.

    planted: the fault of the biased arm; by default the protocol's.
    """
    batches = list(batches)
    listener.start(label, protocol.num_positions * sum(s.num_seeds for batch in batches for s in batch))
    prompts = {prompt.id: engine.encode_prompt(prompt.conversation) for prompt in protocol.prompts}
    fault = planted or get_fault(protocol.planted, **protocol.planted_parameters)
    for batch in batches:
        num_tokens = protocol.num_positions * sum(shard.num_seeds for shard in batch)
        if all(shard_is_done(run_dir, shard, protocol.num_positions) for shard in batch):
            listener.skip(num_tokens)
            continue
        arm = Arm(batch[0].arm)
        requests = [
            Request(
                prompt_token_ids=prompts[shard.prompt_id],
                params=CONFIGS[shard.config],
                stream_key=protocol.stream_key(arm, shard.config, shard.prompt_id, seed),
                max_tokens=protocol.num_positions,
                logprobs="processed",
            )
            for shard in batch
            for seed in range(shard.seed_start, shard.seed_stop)
        ]
        started = time.perf_counter()
        generations = engine.generate(
            requests,
            speculative=arm is not Arm.OFF,
            fault=fault if arm is Arm.BIASED else None,
            on_tokens=listener.advance,
        )
        seconds = time.perf_counter() - started
        first = 0
        for shard in batch:
            own = generations[first : first + shard.num_seeds]
            _require_whole(run_dir, shard, own, protocol.num_positions)
            write_shard(run_dir, shard, own, protocol.num_positions)
            first += shard.num_seeds
        made = sum(len(generation.token_ids) for generation in generations)
        listener.skip(num_tokens - made)
        manifest = manifest.add_time(arm, seconds, made)
        manifest.write(run_dir)
    listener.finish()
    return manifest


def _require_whole(run_dir: Path, shard: ShardKey, generations: Sequence[Generation], num_positions: int) -> None:
    """Raise InvalidShard for a text that ended early where nothing ends a text."""
    params = CONFIGS[shard.config]
    if params.stop_token_ids or not params.ignore_eos:
        return
    for seed, generation in enumerate(generations, start=shard.seed_start):
        if len(generation.token_ids) < num_positions:
            problem = f"seed {seed} ended after {len(generation.token_ids)} of {num_positions} tokens"
            raise InvalidShard(shard_path(run_dir, shard), f"{problem}, and nothing ends a text of {shard.config}")
