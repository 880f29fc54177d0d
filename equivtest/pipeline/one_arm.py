"""Collects and scores one arm in a folder of its own, as studies of many decoders do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from equivtest.engines.base import Engine
from equivtest.faults import Fault
from equivtest.pipeline.manifest import FILE_NAME, Status, new_manifest, resumed, written
from equivtest.pipeline.progress import Listener
from equivtest.protocol.plan import Batch, Protocol
from equivtest.records import Arm, ShardKey
from equivtest.samples.reader import read_arm_tokens


def gather(
    folder: Path,
    protocol: Protocol,
    engine: Engine,
    batches: Sequence[Batch],
    listener: Listener,
    name: str,
    *,
    fault: Fault | None = None,
    scored: bool = True,
) -> None:
    """Make the samples of `batches`, and their law columns where `scored`, valid under `folder`.

    fault: of arm biased. Continues what the folder holds; raises RunMismatch where that is of other code or settings.
    """
    # Torch loads only when something is really collected.
    from equivtest.pipeline.collect import collect
    from equivtest.pipeline.score import score

    # A folder of its samples is not continued after a fault has changed.
    fields = ("name", "setting", "source_sha256")
    options = {} if fault is None else {field: str(getattr(fault, field)) for field in fields}
    manifest = new_manifest(protocol, engine, options)
    manifest = (resumed if (folder / FILE_NAME).exists() else written)(folder, manifest)
    manifest = collect(folder, protocol, manifest, engine, batches, listener, f"collecting {name}", planted=fault)
    if scored:
        manifest = score(folder, protocol, manifest, engine, batches, listener, f"scoring {name}")
    manifest.with_status(Status.COMPLETE).write(folder)


def shards_of(protocol: Protocol, arm: Arm, config: str, run: int = 0) -> Batch:
    """The samples of one run: one shard a prompt. Run k has the seeds after those of run k - 1."""
    return tuple(
        ShardKey(
            arm=arm,
            config=config,
            prompt_id=prompt.id,
            seed_start=run * protocol.num_seeds,
            seed_stop=(run + 1) * protocol.num_seeds,
        )
        for prompt in protocol.prompts
    )


def token_grids(folder: Path, protocol: Protocol, arm: Arm, config: str, run: int = 0) -> list[npt.NDArray[np.int32]]:
    """Token ids [num_seeds, num_positions] of the samples of one run, one array a prompt. Raises MissingSamples."""
    return [
        read_arm_tokens(
            folder,
            arm=arm,
            config=config,
            prompt_id=prompt.id,
            seeds=range(run * protocol.num_seeds, (run + 1) * protocol.num_seeds),
            num_positions=protocol.num_positions,
        )
        for prompt in protocol.prompts
    ]


def large_batches(shards: Iterable[ShardKey], batch_samples: int) -> Iterator[Batch]:
    """Shards of one arm, many at once and configs apart: a study asks for its samples' law, not for their bytes."""
    batch: list[ShardKey] = []
    for shard in shards:
        full = sum(key.num_seeds for key in batch) + shard.num_seeds > batch_samples
        if batch and (full or batch[0].config != shard.config):
            yield tuple(batch)
            batch = []
        batch.append(shard)
    if batch:
        yield tuple(batch)
