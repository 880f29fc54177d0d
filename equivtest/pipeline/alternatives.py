"""Which law did the tokens follow instead? Holds samples that do not follow their law against the laws of decoders that
leave something out, or read another row.

It needs the engine's scorer, and few samples: a decoder that ignores its temperature differs on every token.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.scorer import Law, Reading
from equivtest.engines.base import Engine
from equivtest.errors import InsufficientSamples
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Protocol
from equivtest.records import Evidence, LawColumns, Origin, SamplingParams
from equivtest.samples.reader import read_samples
from equivtest.stats.alternatives import likelihood_gain

NUM_TOKENS = 2048
"""Tokens of a config that are looked at."""

_COLUMNS = ("token_id", "draft_token_id", "slot", "num_draft")


class _Samples(NamedTuple):
    finished: FinishedSamples
    slot: npt.NDArray[np.int64]
    num_draft: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]


def alternatives_of(params: SamplingParams, max_draft: int) -> Iterator[tuple[str, Law]]:
    """The law itself, then what a decoder may have followed instead, as far as it is another law for these parameters;
    the narrowest name first. The verdict room has the words for the names."""
    yield "the law", Law(params)
    twists: dict[str, dict[str, object]] = {
        "raw": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        "no_temperature": {"temperature": 1.0},
        "no_top_k": {"top_k": 0},
        "no_top_p": {"top_p": 1.0},
        "no_min_p": {"min_p": 0.0},
        "greedy": {"temperature": 0.0},
        "no_penalties": _NO_PENALTIES,
        "no_repetition_penalty": {"repetition_penalty": 1.0},
        "no_frequency_penalty": {"frequency_penalty": 0.0},
        "no_presence_penalty": {"presence_penalty": 0.0},
        "no_logit_bias": {"logit_bias": ()},
        "no_min_tokens": {"min_tokens": 0},
        "min_tokens_long": {"min_tokens": params.min_tokens + bool(params.min_tokens)},
        "min_tokens_short": {"min_tokens": max(0, params.min_tokens - 1)},
        "no_processing": _NO_PENALTIES | {"logit_bias": (), "min_tokens": 0},
    }
    seen = {params}
    for name, changes in twists.items():
        twisted = dataclasses.replace(params, **changes)  # type: ignore[arg-type]
        if twisted not in seen and not (params.greedy and name in ("raw", "no_temperature")):
            seen.add(twisted)
            yield name, Law(twisted)
    yield "logits_as_probs", Law(params, Reading(softmax=False))
    yield "row_before", Law(params, Reading(row=-1))
    yield "row_after", Law(params, Reading(row=1))
    if params.penalised:
        for lag in range(1, max_draft + 1):
            yield f"stale_history_{lag}", Law(params, Reading(history_lag=lag))


_NO_PENALTIES: dict[str, object] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def alternative_evidence(
    folder: Path, protocol: Protocol, config: str, arm: str, engine: Engine
) -> tuple[Evidence, ...]:
    """How well each alternative explains the tokens of `arm`: lines of `stats.alternatives`, the law itself first, for
    rows with a draft, bonus rows and plain rows, as far as there are enough. Empty for an engine without a law."""
    scorer = engine.scorer()
    if scorer is None:
        return ()
    prompts = {prompt.id: engine.encode_prompt(prompt.conversation) for prompt in protocol.prompts}
    parts = [_read(folder, protocol, config, arm, prompt_id, token_ids) for prompt_id, token_ids in prompts.items()]
    slot, num_draft, ended = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("slot", "num_draft", "ended")
    )
    kinds = {
        "draft": (slot >= 0) & (slot < num_draft) & ~ended,
        "bonus": (num_draft > 0) & (slot == num_draft) & ~ended,
        "plain": (num_draft == 0) & ~ended,
    }

    names, laws = zip(*alternatives_of(CONFIGS[config], int(num_draft.max(initial=0))), strict=True)
    by_part = [scorer.score_as(part.finished, laws) for part in parts]
    every = [_joined(of_law) for of_law in zip(*by_part, strict=True)]
    vocab_size = int(engine.describe()["vocab_size"])
    own = every[0]
    stale: list[tuple[npt.NDArray[np.bool_], LawColumns]] = []
    lines: list[Evidence] = []

    def add(name: str, columns: LawColumns) -> None:
        for rows, chosen in kinds.items():
            with contextlib.suppress(InsufficientSamples):
                lines.append(
                    likelihood_gain(
                        name,
                        rows,
                        p_law=own.p_token[chosen],
                        p_token=columns.p_token[chosen],
                        entropy=columns.entropy[chosen],
                        var_surprisal=columns.var_surprisal[chosen],
                        off_support=columns.support_violation[chosen],
                        vocab_size=vocab_size,
                    )
                )

    for name, law, columns in zip(names, laws, every, strict=True):
        lag, row = law.reading.history_lag, law.reading.row
        if lag:
            stale.append((slot == lag, columns))
        elif row:
            # A block has no row before its first one, and none after its last.
            add(name, _replaced(own, [(slot > 0 if row < 0 else (slot >= 0) & (slot < num_draft), columns)]))
        else:
            add(name, columns)
    if stale:
        # What was committed before the round is all the history there is: at slot j it lacks the newest j tokens.
        add("stale_history", _replaced(own, stale))
    return tuple(lines)


def _joined(parts: Sequence[LawColumns]) -> LawColumns:
    names = [field.name for field in dataclasses.fields(LawColumns)]
    return LawColumns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _replaced(law: LawColumns, parts: Sequence[tuple[npt.NDArray[np.bool_], LawColumns]]) -> LawColumns:
    """The law, but for the tokens that each part names, where it is the part's."""
    columns = {field.name: getattr(law, field.name).copy() for field in dataclasses.fields(LawColumns)}
    for chosen, part in parts:
        for name, values in columns.items():
            values[chosen] = getattr(part, name)[chosen]
    return LawColumns(**columns)


def _read(
    folder: Path, protocol: Protocol, config: str, arm: str, prompt_id: str, prompt_token_ids: tuple[int, ...]
) -> _Samples:
    """The first samples of one prompt."""
    a_seed = len(protocol.prompts) * protocol.num_positions
    num_seeds = min(protocol.num_seeds, max(2, NUM_TOKENS // a_seed))
    table = read_samples(folder, (*_COLUMNS, "origin"), arms=[arm], configs=[config], prompt_ids=[prompt_id])
    shape = (-1, protocol.num_positions)
    grid = {name: table.column(name).fill_null(-1).to_numpy().reshape(shape)[:num_seeds] for name in _COLUMNS}
    ended = pc.equal(table.column("origin").cast(pa.string()), str(Origin.ENDED)).to_numpy().reshape(shape)[:num_seeds]
    return _Samples(
        finished=FinishedSamples(
            prompt_token_ids=prompt_token_ids,
            params=CONFIGS[config],
            token_ids=grid["token_id"],
            draft_token_ids=grid["draft_token_id"],
            slots=grid["slot"],
            stream_keys=np.array([protocol.stream_key(arm, config, prompt_id, seed) for seed in range(num_seeds)]),
        ),
        slot=grid["slot"].astype(np.int64),
        num_draft=grid["num_draft"].astype(np.int64),
        ended=ended,
    )
