"""Time per output token with and without speculation: by load, and where greedy and sampled requests share a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from equivtest.bench.latency import Served, accepted_per_round, serve, tpot_columns
from equivtest.bench.measured import Measured, describe_device
from equivtest.bench.subject import GREEDY, NAMES, SAMPLED, open_engine, requests_for
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting
from equivtest.records import Request, SamplingParams

Tell = Callable[[str], None]
Calls = Mapping[tuple[str, ...], Sequence[Request]]

_MIN_REQUESTS = 16
_WAVES = 4
_MIXED_REQUESTS = 8
_REPEATS = 3
_OFF_ON = {"off": False, "on": True}


def bench_tpot(
    options: EngineOptions,
    *,
    random_model: str | None = None,
    concurrency: Sequence[int] = (1, 8, 16),
    max_tokens: int = 128,
    repeats: int = _REPEATS,
    on_progress: Tell | None = None,
) -> Measured:
    """Time per output token at so many requests in flight, spec-off and spec-on, greedy and at T .8 top_p .95.

    Four times as many requests as run at once, at least 16, go into one call; a finished one makes room for the next.
    Percentiles are over the requests of all repeats, see `latency.tpot_s` and `_in_turns`. `speedup` is the median of
    spec-off over this one. `options.max_batch` is not looked at.
    """
    _check(max_tokens, repeats, *concurrency)
    tell = on_progress or (lambda line: None)
    rows: list[dict[str, Any]] = []
    described: dict[str, Any] = {}
    for count in concurrency:
        engine = open_engine(dataclasses.replace(options, max_batch=count), random_model, on_message=tell)
        described = dict(engine.describe())
        num_requests = max(_MIN_REQUESTS, _WAVES * count)
        calls: Calls = {
            (f"c{count}", NAMES[params], spec): requests_for(engine, [params] * num_requests, max_tokens=max_tokens)
            for params in (GREEDY, SAMPLED)
            for spec in _OFF_ON
        }
        for (_, sampling, spec), runs in _in_turns(engine, calls, repeats, tell).items():
            columns = tpot_columns(np.concatenate([run.tpot_s() for run in runs]))
            off = columns if spec == "off" else rows[-1]
            rows.append(
                {
                    "concurrency": count,
                    "sampling": sampling,
                    "spec": spec,
                    **columns,
                    "tokens_per_s": float(np.median([run.tokens_per_s for run in runs])),
                    "accepted_per_round": accepted_per_round([each for run in runs for each in run.generations]),
                    "draft_len": described["draft_len"] if spec == "on" else 0,
                    "speedup": off["tpot_p50_ms"] / columns["tpot_p50_ms"],
                }
            )
    return Measured(what=_what(options, described, max_tokens=max_tokens, repeats=repeats), table=tuple(rows))


def bench_mixed(
    options: EngineOptions,
    *,
    random_model: str | None = None,
    max_tokens: int = 256,
    repeats: int = _REPEATS,
    on_progress: Tell | None = None,
) -> Measured:
    """Eight requests at once, four greedy and four sampled, against eight greedy ones; spec-on against spec-off.

    All eight start together and nothing takes the place of one that ends, so the batch is the stated mix from the first
    step to the first end. Percentiles are over the requests of one kind in all repeats. `against_alone` is the median
    over that of the all-greedy batch under the same speculation; `speedup` that of spec-off over spec-on.
    """
    _check(max_tokens, repeats)
    tell = on_progress or (lambda line: None)
    engine = open_engine(dataclasses.replace(options, max_batch=_MIXED_REQUESTS), random_model, on_message=tell)
    batches = {"8 greedy": [GREEDY] * _MIXED_REQUESTS, "4 greedy + 4 sampled": [GREEDY, SAMPLED] * 4}
    calls: Calls = {
        (batch, spec): requests_for(engine, laws, max_tokens=max_tokens)
        for spec in _OFF_ON
        for batch, laws in batches.items()
    }
    served = _in_turns(engine, calls, repeats, tell)
    rows = [
        _mixed_row(batch, law, batches[batch], runs, spec)
        for (batch, spec), runs in served.items()
        for law in dict.fromkeys(batches[batch])
    ]
    return Measured(
        what=_what(options, engine.describe(), max_tokens=max_tokens, repeats=repeats), table=tuple(_compared(rows))
    )


def _mixed_row(
    batch: str, law: SamplingParams, laws: Sequence[SamplingParams], runs: Sequence[Served], spec: str
) -> dict[str, Any]:
    kind = [index for index, each in enumerate(laws) if each == law]
    return {
        "batch": batch,
        "requests": NAMES[law],
        "spec": spec,
        **tpot_columns(np.concatenate([served.tpot_s()[kind] for served in runs])),
        "accepted_per_round": accepted_per_round([served.generations[i] for served in runs for i in kind]),
    }


def _compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row beside the same speculation on greedy requests alone, and beside the same requests without it."""
    p50 = {(row["batch"], row["requests"], row["spec"]): row["tpot_p50_ms"] for row in rows}
    alone = {spec: p50["8 greedy", NAMES[GREEDY], spec] for spec in ("off", "on")}
    return [
        row
        | {
            "against_alone": row["tpot_p50_ms"] / alone[row["spec"]],
            "speedup": p50[row["batch"], row["requests"], "off"] / row["tpot_p50_ms"],
        }
        for row in rows
    ]


def _in_turns(
    engine: DecoderEngine,
    calls: Calls,
    repeats: int,
    tell: Tell,
) -> dict[tuple[str, ...], list[Served]]:
    """Each call served `repeats` times, all taking turns: what the machine does meanwhile meets all of them alike.

    calls: by words that name them, of which the last is off or on, for speculation. All are served once unmeasured
    before, so that every shape of a step has been met.
    """
    served: dict[tuple[str, ...], list[Served]] = {key: [] for key in calls}
    for turn in range(repeats + 1):
        for key, requests in calls.items():
            *words, spec = key
            tell(", ".join([*words, f"spec-{spec}", f"{turn} of {repeats}" if turn else "unmeasured"]))
            run = serve(engine, requests, speculative=_OFF_ON[spec])
            if turn:
                served[key].append(run)
    return served


def _what(options: EngineOptions, described: Any, **more: Any) -> dict[str, Any]:
    return {**describe_device(options.device), "asked": asdict(options), "subject": dict(described), **more}


def _check(max_tokens: int, *counts: int) -> None:
    if max_tokens < 2:
        raise InvalidSetting("max_tokens", max_tokens, "must be at least 2 to have a time per output token")
    for count in counts:
        if count < 1:
            raise InvalidSetting("count", count, "must be at least 1")
