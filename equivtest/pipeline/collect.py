"""Collects samples: generates what is not on disk yet, one batch at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from equivtest.engines.base import Engine
from equivtest.errors import ArmsToCome, InvalidShard
from equivtest.faults import Fault, get_fault
from equivtest.pipeline.families import generator
from equivtest.pipeline.manifest import Manifest
from equivtest.pipeline.progress import Listener
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import LIKELIEST_TOKEN, Batch, Protocol
from equivtest.records import SPEC, Arm, Generation, Origin, Request, ShardKey
from equivtest.samples.keys import shard_path
from equivtest.samples.planted import plant_likeliest
from equivtest.samples.shards import shard_is_done, write_shard
from equivtest.samples.validate import read_keyed_table


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

    Raises ArmsToCome, with all else on disk, for arms that are not there and that the engine cannot decode now.
    """
    batches = list(batches)
    listener.start(label, protocol.num_positions * sum(s.num_seeds for batch in batches for s in batch))
    prompts = {prompt.id: engine.encode_prompt(prompt.conversation) for prompt in protocol.prompts}
    in_recordings = planted is None and protocol.planted == LIKELIEST_TOKEN
    fault = None if in_recordings else planted or get_fault(protocol.planted, **protocol.planted_parameters)
    to_come: dict[Arm, None] = {}
    for batch in batches:
        num_tokens = protocol.num_positions * sum(shard.num_seeds for shard in batch)
        arm, speculative = Arm(batch[0].arm), batch[0].arm != Arm.OFF
        if all(shard_is_done(run_dir, shard, protocol.num_positions) for shard in batch):
            listener.skip(num_tokens)
            continue
        copied = in_recordings and arm is Arm.BIASED
        if (Arm.ON in to_come) if copied else not _decodes(engine, speculative=speculative):
            to_come[arm] = None
            continue
        started = time.perf_counter()
        if copied:
            generations = [one for shard in batch for one in _planted(run_dir, protocol, shard)]
            listener.skip(num_tokens)
        else:
            requests = [_request(protocol, shard, seed, prompts) for shard in batch for seed in _seeds(shard)]
            generations = engine.generate(
                requests,
                speculative=speculative,
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
        manifest = manifest.add_time(arm, seconds, made).with_notes(engine.notes())
        manifest.write(run_dir)
    listener.finish()
    if to_come:
        raise ArmsToCome(to_come, "without speculation" if Arm.OFF in to_come else "with speculation")
    return manifest


def _seeds(shard: ShardKey) -> range:
    return range(shard.seed_start, shard.seed_stop)


def _decodes(engine: Engine, *, speculative: bool) -> bool:
    can = engine.capabilities
    return can.decodes_speculatively if speculative else can.decodes_plain


def _request(protocol: Protocol, shard: ShardKey, seed: int, prompts: Mapping[str, tuple[int, ...]]) -> Request:
    return Request(
        prompt_token_ids=prompts[shard.prompt_id],
        params=CONFIGS[shard.config],
        stream_key=protocol.stream_key(shard.arm, shard.config, shard.prompt_id, seed),
        max_tokens=protocol.num_positions,
        logprobs="processed",
        label=f"arm {shard.arm}, config {shard.config}, prompt {shard.prompt_id}, seed {seed}",
    )


def _planted(run_dir: Path, protocol: Protocol, shard: ShardKey) -> list[Generation]:
    """The samples of arm on with the same seeds, biased."""
    key = dataclasses.replace(shard, arm=str(Arm.ON))
    column = read_keyed_table(shard_path(run_dir, key), key, ["token_id"]).column(0)
    grid = column.to_numpy().reshape(shard.num_seeds, protocol.num_positions)
    rng = generator(protocol.run_seed, "planted", shard.config, shard.prompt_id, shard.seed_start)
    num = protocol.num_positions
    return [
        Generation(
            token_ids=token_ids,
            origins=(Origin.UNKNOWN,) * num,
            slots=np.full(num, -1, np.int8),
            draft_token_ids=np.full(num, -1, np.int32),
            steps=np.arange(num, dtype=np.int32),
            batch_rows=np.zeros(num, np.int32),
            num_drafts=np.zeros(num, np.int8),
            route=SPEC,
        )
        for token_ids in plant_likeliest(grid, protocol.epsilon, rng)
    ]


def _require_whole(run_dir: Path, shard: ShardKey, generations: Sequence[Generation], num_positions: int) -> None:
    """Raise InvalidShard for a text that ended early where nothing ends a text."""
    params = CONFIGS[shard.config]
    if params.stop_token_ids or not params.ignore_eos:
        return
    for seed, generation in enumerate(generations, start=shard.seed_start):
        if len(generation.token_ids) < num_positions:
            problem = f"seed {seed} ended after {len(generation.token_ids)} of {num_positions} tokens"
            raise InvalidShard(shard_path(run_dir, shard), f"{problem}, and nothing ends a text of {shard.config}")
