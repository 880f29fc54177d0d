"""Time per output token with and without speculation: by load, and where greedy and sampled requests share a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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

_MIN_REQUESTS = 16
_WAVES = 4
_MIXED_REQUESTS = 8


def bench_tpot(
    options: EngineOptions,
    *,
    random_model: str | None = None,
    concurrency: Sequence[int] = (1, 8, 16),
    max_tokens: int = 128,
    on_progress: Tell | None = None,
) -> Measured:
    """Time per output token at so many requests in flight, spec-off and spec-on, greedy and at T .8 top_p .95.

    Four times as many requests as run at once, at least 16, go into one call; a finished one makes room for the next.
    Each is served once unmeasured, so that graphs are captured, and then measured: see `latency.tpot_s`. Percentiles
    are over requests. `speedup` is the median of spec-off over this one. `options.max_batch` is not looked at.
    """
    _check(max_tokens, *concurrency)
    tell = on_progress or (lambda line: None)
    rows, described = [], {}
    for count in concurrency:
        engine = open_engine(dataclasses.replace(options, max_batch=count), random_model, on_message=tell)
        described = dict(engine.describe())
        for params in (GREEDY, SAMPLED):
            requests = requests_for(engine, [params] * max(_MIN_REQUESTS, _WAVES * count), max_tokens=max_tokens)
            off_p50 = None
            for speculative in (False, True):
                what = f"c{count}, {NAMES[params]}, spec-{'on' if speculative else 'off'}"
                tell(what)
                served = _warm(engine, requests, speculative)
                columns = tpot_columns(served.tpot_s())
                off_p50 = off_p50 or columns["tpot_p50_ms"]
                rows.append(
                    {
                        "concurrency": count,
                        "sampling": NAMES[params],
                        "spec": "on" if speculative else "off",
                        **columns,
                        "tokens_per_s": served.tokens_per_s,
                        "accepted_per_round": accepted_per_round(served.generations),
                        "draft_len": described["draft_len"] if speculative else 0,
                        "speedup": off_p50 / columns["tpot_p50_ms"],
                    }
                )
    return Measured(what=_what(options, described, max_tokens=max_tokens), table=tuple(rows))


def bench_mixed(
    options: EngineOptions,
    *,
    random_model: str | None = None,
    max_tokens: int = 256,
    repeats: int = 3,
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
    rows = []
    for speculative in (False, True):
        for batch, laws in batches.items():
            requests = requests_for(engine, laws, max_tokens=max_tokens)
            tell(f"{batch}, spec-{'on' if speculative else 'off'}")
            runs = [_warm(engine, requests, speculative)]
            runs += [serve(engine, requests, speculative=speculative) for _ in range(repeats - 1)]
            rows += [_mixed_row(batch, law, laws, runs, speculative) for law in dict.fromkeys(laws)]
    return Measured(
        what=_what(options, engine.describe(), max_tokens=max_tokens, repeats=repeats), table=tuple(_compared(rows))
    )


def _mixed_row(
    batch: str, law: SamplingParams, laws: Sequence[SamplingParams], runs: Sequence[Served], speculative: bool
) -> dict[str, Any]:
    kind = [index for index, each in enumerate(laws) if each == law]
    return {
        "batch": batch,
        "requests": NAMES[law],
        "spec": "on" if speculative else "off",
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


def _warm(engine: DecoderEngine, requests: Sequence[Request], speculative: bool) -> Served:
    """The second of two equal calls: the first has met every shape of the second."""
    serve(engine, requests, speculative=speculative)
    return serve(engine, requests, speculative=speculative)


def _what(options: EngineOptions, described: Any, **more: Any) -> dict[str, Any]:
    return {**describe_device(options.device), "asked": asdict(options), "subject": dict(described), **more}


def _check(max_tokens: int, *counts: int) -> None:
    if max_tokens < 2:
        raise InvalidSetting("max_tokens", max_tokens, "must be at least 2 to have a time per output token")
    for count in counts:
        if count < 1:
            raise InvalidSetting("count", count, "must be at least 1")
