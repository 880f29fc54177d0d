"""What a decoder must do the same every time: replay under a seed, greedy text with speculation as without, drafts that
are drawn from the law they name. Generates, compares, and says what differed as evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from equivtest.decoder.draft_audit import DraftAudit
from equivtest.engines.base import Engine, StagesWrap
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Protocol
from equivtest.records import Evidence, Generation, Request
from equivtest.stats.identity import DRAFT_RATE, TEXT_RATE, same

_Decode = Callable[..., list[Generation]]

_NUM_REPLAYED = 24
"""Seeded requests, over all prompts in turn."""
_NUM_ALONE = 3
"""Of them, how many are decoded again in a batch of their own."""
_SMALL_BATCH = 4


def identity_evidence(
    engine: Engine,
    protocol: Protocol,
    config: str,
    fault: StagesWrap | None = None,
    *,
    replay: bool = True,
    greedy: bool = True,
) -> tuple[Evidence, ...]:
    """The checks on one config; lines `replay`, `greedy` and, where drafts are sampled and can be audited, `drafts`.

    fault: wraps the stages of the speculative decoder; plain decoding, which greedy text is compared with, stays as it
    is. replay, greedy: whether the engine's capabilities promise what these two check.
    """
    prompts = [engine.encode_prompt(prompt.conversation) for prompt in protocol.prompts]
    audit, can_audit = DraftAudit(), engine.capabilities.takes_faults

    def wrapped(stages: Any) -> Any:
        return audit(stages if fault is None else fault(stages))

    def decode(requests: Sequence[Request], *, speculative: bool = True) -> list[Generation]:
        return engine.generate(requests, speculative=speculative, fault=wrapped if speculative and can_audit else None)

    lines: list[Evidence] = []
    if replay:
        lines.append(_replay(decode, protocol, config, prompts))
    if greedy:
        lines.append(_greedy(decode, protocol, config, prompts))
    if audit.num_drafts:
        lines.append(
            same(
                "drafts",
                config,
                num_changed=audit.num_changed,
                num_compared=audit.num_drafts,
                num_tokens=audit.num_drafts,
                rate=DRAFT_RATE,
                method="sampled drafts drawn again from the law that they were handed on with, with their own coins",
            )
        )
    return tuple(lines)


def _replay(decode: _Decode, protocol: Protocol, config: str, prompts: Sequence[tuple[int, ...]]) -> Evidence:
    requests = [
        Request(
            prompt_token_ids=prompts[index % len(prompts)],
            params=CONFIGS[config],
            stream_key=0,
            max_tokens=protocol.num_positions,
            seed=index,
        )
        for index in range(_NUM_REPLAYED)
    ]
    first = decode(requests)
    again: dict[int, list[Generation]] = {index: [] for index in range(len(requests))}
    backwards = list(range(len(requests)))[::-1]
    groups = [backwards]  # the batch in another order
    groups += [backwards[start : start + _SMALL_BATCH] for start in range(0, len(backwards), _SMALL_BATCH)]
    groups += [[index] for index in range(_NUM_ALONE)]
    for group in groups:
        for index, generation in zip(group, decode([requests[index] for index in group]), strict=True):
            again[index].append(generation)
    changed = sum(any(not _equal(first[index], other) for other in others) for index, others in again.items())
    return same(
        "replay",
        config,
        num_changed=changed,
        num_compared=len(requests),
        num_tokens=sum(len(generation.token_ids) for generation in first),
        rate=TEXT_RATE,
        method=f"texts of seeded requests, decoded again in another order, in batches of {_SMALL_BATCH} and alone",
    )


def _greedy(decode: _Decode, protocol: Protocol, config: str, prompts: Sequence[tuple[int, ...]]) -> Evidence:
    params = dataclasses.replace(CONFIGS[config], temperature=0.0)
    requests = [
        Request(prompt_token_ids=prompt, params=params, stream_key=index, max_tokens=2 * protocol.num_positions)
        for index, prompt in enumerate(prompts)
    ]
    plain, speculative = decode(requests, speculative=False), decode(requests)
    return same(
        "greedy",
        config,
        num_changed=sum(not _equal(one, other) for one, other in zip(plain, speculative, strict=True)),
        num_compared=len(requests),
        num_tokens=sum(len(generation.token_ids) for generation in speculative),
        rate=TEXT_RATE,
        method="greedy texts with speculation against those without",
    )


def _equal(one: Generation, other: Generation) -> bool:
    return np.array_equal(one.token_ids, other.token_ids)
