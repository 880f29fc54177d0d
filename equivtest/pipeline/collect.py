"""Collects samples: generates what is not on disk yet, one batch at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from equivtest.engines.base import Engine
from equivtest.faults import Fault, get_fault
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.progress import Listener
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Batch, Protocol
from equivtest.records import Arm, Request
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
            write_shard(run_dir, shard, generations[first : first + shard.num_seeds])
            first += shard.num_seeds
        manifest = manifest.add_time(arm, seconds, num_tokens)
        manifest.write(run_dir)
    listener.finish()
    return manifest
