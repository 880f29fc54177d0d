"""Where the time of a speculative round goes: by stage on the device, waits for the host, and what the drafts give.

A round that is laid out on the device (see `equivtest.decoder.rounds`) costs a fixed time, whatever is accepted, and a
plain step another: speculation pays once a round's accepted drafts are worth the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from equivtest.bench.device_clock import Call, replay_of, time_back_to_back
from equivtest.bench.latency import Served, accepted_per_round, serve
from equivtest.bench.measured import Measured, describe_device
from equivtest.bench.subject import GREEDY, NAMES, SAMPLED, open_engine, requests_for
from equivtest.decoder.draft_length import acceptance_by_slot
from equivtest.decoder.executor import Executor
from equivtest.decoder.prefill import PromptPool, cache_for
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.rounds import DeviceRounds, Round
from equivtest.engines.base import EngineOptions
from equivtest.engines.decoder import require_device
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import SpecScratch
from equivtest.kernels.registry import get_backend, resolve_auto
from equivtest.records import SPEC, Generation, Request

Row = dict[str, Any]

DRAFT_LENS = (1, 2, 3, 5, 7)
TIME_COLUMNS = (
    "plain_ms", "draft_ms", "verify_ms", "accept_ms", "rest_ms", "round_ms", "host_round_ms", "gap_ms",
)  # fmt: skip
PAY_COLUMNS = ("accepted", "by_slot", "break_even", "token_ms", "best")
_TEXTS = {GREEDY: 16, SAMPLED: 64}
"""The least number of each law: greedy answers to one prompt are the same, drawn ones tell more of `accepted`."""


def bench_rounds(
    options: EngineOptions,
    *,
    concurrency: Sequence[int] = (1, 8, 16),
    draft_lens: Sequence[int] = DRAFT_LENS,
    max_tokens: int = 256,
    on_progress: Callable[[str], None] | None = None,
) -> Measured:
    """One row for every number of requests at once, law (greedy, T .8 top_p .95) and draft length that the drafter has.

    At least 16 greedy and 64 drawn texts of `max_tokens` answer the built-in prompts; device times are of the first of
    them, from their middle on. See `profile` for the columns. `options.drafter`, `draft_len` and `max_batch` are not
    looked at.

    Raises InvalidSetting for kernels that need the host in every round, and what `DecoderEngine.open` does.
    """
    _require_rounds(options)
    least = 4 * (max(draft_lens) + 1)
    if min(*concurrency, *draft_lens) < 1 or max_tokens < least:
        requirement = f"the first two must be at least 1 and the third {least}, four rounds of a text"
        raise InvalidSetting("concurrency, draft_lens, max_tokens", (concurrency, draft_lens, max_tokens), requirement)
    tell = on_progress or (lambda line: None)
    asked = dataclasses.replace(options, drafter="dflash", draft_len=max(draft_lens), max_batch=max(concurrency))
    engine = open_engine(asked, on_message=tell)
    executor = engine.executor
    rounds = DeviceRounds.of(executor.model, executor.backend, executor.drafter, options.acceptance)
    assert rounds is not None  # on kernels that were looked at
    assert rounds.drafter is not None  # of dflash
    longest = rounds.drafter.num_drafts
    lens = [length for length in draft_lens if length <= longest]
    if not lens:
        raise InvalidSetting("draft_lens", draft_lens, f"must be at most {longest}, the drafts of the drafter's block")
    table: list[Row] = []
    for count, params in itertools.product(concurrency, (GREEDY, SAMPLED)):
        tell(f"c{count}, {NAMES[params]}, drafts {', '.join(map(str, lens))} of at most {longest}")
        requests = requests_for(engine, [params] * (-(-_TEXTS[params] // count) * count), max_tokens=max_tokens)
        keys = {"concurrency": count, "sampling": NAMES[params]}
        table += [keys | row for row in profile(executor, rounds, requests, count, lens)]
    subject = {"asked": asdict(asked), "subject": dict(engine.describe()), "max_tokens": max_tokens}
    return Measured(what={**describe_device(options.device), **subject}, table=tuple(table))


def profile(
    executor: Executor, rounds: DeviceRounds, requests: Sequence[Request], concurrency: int, draft_lens: Sequence[int]
) -> list[Row]:
    """One row a draft length. requests: of one law and max_tokens, whole calls of `concurrency` of them.

    Device times, each of a graph of its own that is replayed back to back: `draft_ms`, `verify_ms` and `accept_ms` of
    these stages by themselves, `round_ms` of whole rounds, `plain_ms` of rounds of no drafts; `rest_ms` is what the
    stages leave of a round, layout and commit. A graph of less than its own launch, some 10 us, is told as that.
    `host_round_ms` is the executor's round by the host's clock, the median of rounds in which all requests of a call
    run, and `gap_ms` what it has more than the device needs. `accepted` drafts a round, and `by_slot` the share of
    those reached. `break_even`: accepted drafts at which a round is worth its plain steps. `token_ms`: device time of a
    request's token; `best` has the least.
    """
    calls = [requests[start : start + concurrency] for start in range(0, len(requests), concurrency)]
    plain = serve(executor, calls[0], speculative=False).generations
    clock = _Clock(executor, rounds, [_midway(*each) for each in zip(calls[0], plain, strict=True)], max(draft_lens))
    plain_ms = clock.plain_ms()
    rows = []
    for width in draft_lens:
        executor.offer_at_most(width)
        serve(executor, calls[0], speculative=True)  # has met every shape of the others
        served = [serve(executor, call, speculative=True) for call in calls]
        texts = [text for one in served for text in one.generations]
        row = figures(plain_ms, clock.round_ms(width), _host_round_ms(served), accepted_per_round(texts))
        slots = acceptance_by_slot(texts, width, prior=0.0)
        rows.append({"draft_len": width, **row, "by_slot": [round(float(rate), 4) for rate in slots]})
    return with_best(rows)


def figures(plain_ms: float, device_ms: Mapping[str, float], host_round_ms: float, accepted: float) -> Row:
    """What follows from a row's measurements. device_ms: of the stages and of the round."""
    round_ms = device_ms["round_ms"]
    return {
        "plain_ms": plain_ms,
        **device_ms,
        "rest_ms": round_ms - device_ms["draft_ms"] - device_ms["verify_ms"] - device_ms["accept_ms"],
        "host_round_ms": host_round_ms,
        "gap_ms": host_round_ms - round_ms,
        "accepted": accepted,
        "break_even": round_ms / plain_ms - 1,
        "token_ms": round_ms / (1 + accepted),
    }


def with_best(rows: Sequence[Row]) -> list[Row]:
    """Marks the row with the least time a token, the first of equals."""
    best = min(rows, key=lambda row: row["token_ms"])
    return [{**row, "best": row is best} for row in rows]


class _Clock:
    """Device time of steps and rounds of some requests that stand at the end of their prompts."""

    def __init__(self, executor: Executor, rounds: DeviceRounds, requests: Sequence[Request], widest: int) -> None:
        """Raises InvalidSetting for more than a round's graph holds."""
        model, batch, vocab_size = executor.model, len(requests), executor.model.config.vocab_size
        self._rounds, self._device, self._rows = rounds, model.device, np.arange(batch)
        self._table = RequestTable(requests, [SPEC] * batch, vocab_size=vocab_size, device=model.device)
        if not rounds.can_run(self._table, self._rows, width=widest, need_plain=np.zeros(batch, bool)):
            raise InvalidSetting("concurrency", batch, "is more than the graph of a round holds: take fewer")
        self._kv = cache_for(model, self._table, max_batch=batch, reuse=None, follower=rounds.drafter)
        pool = PromptPool(model, self._kv, self._table, self._rows, follower=rounds.drafter)
        self._sequences = pool.admit(self._rows)
        probs_dtype = executor.backend.capabilities.probs_dtype
        self._scratch = SpecScratch(batch, widest, vocab_size, model.device, probs_dtype)
        self._for_graph = model.device.type == "cuda"

    @torch.inference_mode()
    def plain_ms(self) -> float:
        """Of a round of no drafts."""
        return self._whole_ms(0)

    @torch.inference_mode()
    def round_ms(self, width: int) -> dict[str, float]:
        """Of the stages of a round and of the whole."""
        made = self._loaded(width)
        block_plan, text_plan = made.plans(for_graph=self._for_graph)
        places = made.lay_out()
        drafts = made.draft(places, block_plan)
        logits = made.verify(places, drafts, text_plan)
        stages: dict[str, Call] = {
            "draft_ms": lambda: made.draft(places, block_plan),
            "verify_ms": lambda: made.verify(places, drafts, text_plan),
            "accept_ms": lambda: made.accept(drafts, logits),
        }
        times = {name: self._ms(replay_of(stage, self._device.type), width) for name, stage in stages.items()}
        return times | {"round_ms": self._whole_ms(width)}

    def _whole_ms(self, width: int) -> float:
        """Of rounds as the executor launches them."""
        made = self._loaded(width)
        return self._ms(made.run, width, before=lambda: self._loaded(width))

    def _ms(self, call: Call, width: int, *, before: Call | None = None) -> float:
        """As many in a row, and one ahead of them, as put out no more than the texts have left."""
        calls = int(self._table.remaining.min()) // (width + 1) - 1
        return time_back_to_back(call, self._device.type, calls=calls, before=before) / 1e3

    def _loaded(self, width: int) -> Round:
        table, kv = self._table, self._kv
        kv.truncate(self._sequences, table.lengths - 1)
        state = table, self._rows, self._sequences, kv, self._scratch, table.params, table.stream_keys
        return self._rounds.loaded(*state, width=width)


def _midway(request: Request, text: Generation) -> Request:
    """What is left of a request when half its text is put out."""
    half = request.max_tokens // 2
    prompt = (*request.prompt_token_ids, *text.token_ids[:half].tolist())
    return dataclasses.replace(request, prompt_token_ids=prompt, max_tokens=request.max_tokens - half)


def _host_round_ms(served: Sequence[Served]) -> float:
    gaps = [np.diff(one.step_ends_s[: 1 + min(int(text.steps[-1]) for text in one.generations)]) for one in served]
    return 1e3 * float(np.median(np.concatenate(gaps)))


def _require_rounds(options: EngineOptions) -> None:
    """Before the model is fetched."""
    require_device(options.device)
    name = resolve_auto(options.device)[0] if options.kernels == "auto" else options.kernels
    if not DeviceRounds.served_by(get_backend(name)):
        needed = "needs the host in every round; only kernels cuda lay rounds out on the device: --device cuda"
        raise InvalidSetting("kernels", name, f"{needed} --kernels cuda")
