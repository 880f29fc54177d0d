"""Thousands of replications over the cores of a machine; what comes out depends on the seed alone."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting
from equivtest.rng import stream_key

Outcome = npt.NDArray[np.bool_]
"""[k] what one replication said of one thing: k yes or no answers."""
Replicate = Callable[[np.random.Generator], Mapping[str, Outcome]]
"""One replication: the outcome of everything that it could ask. Picklable."""
OnProgress = Callable[[str, int, int], None]
"""What runs, replications done, replications to do."""

_CHUNK = 20
"""Replications handed to a process at a time."""


@dataclass(slots=True)
class Tally:
    """How often each answer was yes."""

    asked: int
    """Replications that could ask."""
    yes: npt.NDArray[np.int64]
    """[k]"""


def replicate(
    name: str, one: Replicate, *, replications: int, seed: int, workers: int | None, on_progress: OnProgress
) -> dict[str, Tally]:
    """Run `one` with the streams 0..replications-1 of (seed, name) and count its answers.

    workers: processes, by default one a core; 1 stays in this one. The counts do not depend on it.
    Raises InvalidSetting.
    """
    workers = os.cpu_count() or 1 if workers is None else workers
    for setting, value in (("replications", replications), ("workers", workers)):
        if value < 1:
            raise InvalidSetting(setting, value, "must be at least 1")
    chunks = [range(start, min(start + _CHUNK, replications)) for start in range(0, replications, _CHUNK)]
    tallies: dict[str, Tally] = {}
    done = 0
    for chunk, counted in zip(chunks, _each(partial(_count, name, one, seed), chunks, workers), strict=True):
        for key, tally in counted.items():
            _add(tallies, key, tally.asked, tally.yes)
        done += len(chunk)
        on_progress(name, done, replications)
    return tallies


def _each(count: Callable[[range], dict[str, Tally]], chunks: list[range], workers: int) -> Iterator[dict[str, Tally]]:
    if workers == 1:
        yield from map(count, chunks)
        return
    # Not fork: this process may hold threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(count, chunks)


def _count(name: str, one: Replicate, seed: int, chunk: range) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    for index in chunk:
        rng = np.random.default_rng(stream_key(seed, name, index) % 2**64)
        for key, outcome in one(rng).items():
            _add(tallies, key, 1, outcome.astype(np.int64))
    return tallies


def _add(tallies: dict[str, Tally], key: str, asked: int, yes: npt.NDArray[np.int64]) -> None:
    tally = tallies.setdefault(key, Tally(0, np.zeros_like(yes)))
    tally.asked += asked
    tally.yes += yes
