"""From the samples on disk to the tokens that the page shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from equivtest.errors import MissingSamples
from equivtest.pipeline.texts import kept_token_texts
from equivtest.protocol.plan import Protocol
from equivtest.records import Arm, Origin
from equivtest.report.tokens import ORIGIN_LETTERS, CellCounts, ShownSample, ShownTokens
from equivtest.samples.reader import read_arm_tokens, read_samples
from equivtest.stats.bands import binomial_intervals

NUM_TOKENS = 12
"""Tokens of a cell that are shown by name."""
NUM_SAMPLES = 12
"""Samples of an arm and prompt that are shown as text."""
_READ_ARMS = (Arm.OFF, Arm.ON)
"""Arms whose samples are shown as text."""

Tokens = npt.NDArray[np.int32]


def shown_tokens(run_dir: Path, protocol: Protocol) -> ShownTokens:
    """Counts of every cell, intervals, the first samples and the texts. What is not on disk is left out."""
    cells = dict(_cells(run_dir, protocol))
    sizes = {sum(counts) for cell in cells.values() for counts in cell.counts.values()}
    return ShownTokens(
        cells=cells,
        intervals={size: list(zip(*map(np.ndarray.tolist, binomial_intervals(size)), strict=True)) for size in sizes},
        samples=tuple(_samples(run_dir, protocol)),
        prompts={prompt.id: prompt.messages for prompt in protocol.prompts},
        token_texts=kept_token_texts(run_dir),
    )


def _cells(run_dir: Path, protocol: Protocol) -> Iterator[tuple[tuple[str, str, int], CellCounts]]:
    for config in protocol.configs:
        for prompt in protocol.prompts:
            grids = _grids(run_dir, protocol, config, prompt.id)
            if grids:
                for position in range(protocol.num_positions):
                    columns = {arm: grid[:, position] for arm, grid in grids.items()}
                    yield (config, prompt.id, position), _counts(columns)


def _grids(run_dir: Path, protocol: Protocol, config: str, prompt_id: str) -> dict[Arm, Tokens]:
    """Token ids [num_seeds, num_positions] of every arm whose rows are all there."""
    grids = {}
    for arm in Arm:
        try:
            grids[arm] = read_arm_tokens(
                run_dir,
                arm=arm,
                config=config,
                prompt_id=prompt_id,
                seeds=range(protocol.num_seeds),
                num_positions=protocol.num_positions,
            )
        except MissingSamples:
            continue  # the verdict says so
    return grids


def _counts(columns: Mapping[Arm, Tokens]) -> CellCounts:
    ids, codes = np.unique(np.concatenate(list(columns.values())), return_inverse=True)
    parts = np.split(codes, np.cumsum([len(column) for column in columns.values()])[:-1])
    counts = np.stack([np.bincount(part, minlength=len(ids)) for part in parts])
    order = np.argsort(-counts.max(axis=0), kind="stable")
    first, others = order[:NUM_TOKENS], order[NUM_TOKENS:]
    return CellCounts(
        token_ids=tuple(ids[first].tolist()),
        counts={arm: (*row[first].tolist(), int(row[others].sum())) for arm, row in zip(columns, counts, strict=True)},
        num_others=len(others),
    )


def _samples(run_dir: Path, protocol: Protocol) -> Iterator[ShownSample]:
    for config in protocol.configs:
        for prompt in protocol.prompts:
            for arm in _READ_ARMS:
                yield from _first_samples(run_dir, arm, config, prompt.id)


def _first_samples(run_dir: Path, arm: Arm, config: str, prompt_id: str) -> Iterator[ShownSample]:
    try:
        rows = read_samples(
            run_dir, ["seed", "token_id", "origin"], arms=[arm], configs=[config], prompt_ids=[prompt_id]
        )
    except MissingSamples:
        return
    rows = rows.filter(pc.less(rows["seed"], NUM_SAMPLES))
    for seed, own in rows.to_pandas().groupby("seed"):
        own = own[own["origin"] != Origin.ENDED]
        yield ShownSample(
            arm=arm,
            config=config,
            prompt_id=prompt_id,
            seed=int(seed),
            token_ids=tuple(own["token_id"].tolist()),
            origins="".join(ORIGIN_LETTERS[Origin(origin)] for origin in own["origin"]),
        )
