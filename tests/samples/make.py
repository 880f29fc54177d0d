"""Small, well-formed samples for the tests of this folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from equivtest.records import SPEC, Generation, Origin, Route, ShardKey

KEY = ShardKey(arm="on", config="topp95", prompt_id="story", seed_start=4, seed_stop=8)
NUM_POSITIONS = 16
MAX_DRAFT = 3


def spec_generation(seed: int, *, num_positions: int = NUM_POSITIONS, accept: float = 0.6) -> Generation:
    """A speculative generation with rounds of 1 to MAX_DRAFT drafts and some plain steps."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, Origin, int, int, int, int]] = []
    step = 0
    while len(rows) < num_positions:
        num_draft = int(rng.integers(0, MAX_DRAFT + 1))
        if num_draft == 0:
            rows.append((int(rng.integers(50)), Origin.PLAIN, -1, -1, step, 0))
        for slot in range(num_draft):
            draft = int(rng.integers(50))
            if rng.random() > accept:
                rows.append((draft + 1, Origin.RECOVERED, slot, draft, step, num_draft))
                break
            rows.append((draft, Origin.ACCEPTED, slot, draft, step, num_draft))
        else:
            if num_draft:
                rows.append((int(rng.integers(50)), Origin.BONUS, num_draft, -1, step, num_draft))
        step += 1
    return _generation(rows[:num_positions], SPEC)


def plain_generation(seed: int, *, num_positions: int = NUM_POSITIONS, reason: str = "arm off") -> Generation:
    """A generation that never speculates."""
    rng = np.random.default_rng(seed)
    rows = [(int(rng.integers(50)), Origin.PLAIN, -1, -1, step, 0) for step in range(num_positions)]
    return _generation(rows, Route(False, reason))


def cut_short(generation: Generation, num_tokens: int) -> Generation:
    """The generation as if its last token had stopped it."""
    names = ("token_ids", "origins", "slots", "draft_token_ids", "steps", "batch_rows", "num_drafts")
    return dataclasses.replace(generation, **{name: getattr(generation, name)[:num_tokens] for name in names})


def generations_of(key: ShardKey, num_positions: int = NUM_POSITIONS) -> list[Generation]:
    """One generation for each seed of the key."""
    make = plain_generation if key.arm == "off" else spec_generation
    return [make(seed, num_positions=num_positions) for seed in range(key.seed_start, key.seed_stop)]


def _generation(rows: Sequence[tuple[int, Origin, int, int, int, int]], route: Route) -> Generation:
    tokens, origins, slots, drafts, steps, num_drafts = zip(*rows, strict=True)
    return Generation(
        token_ids=np.array(tokens, dtype=np.int32),
        origins=tuple(origins),
        slots=np.array(slots, dtype=np.int8),
        draft_token_ids=np.array(drafts, dtype=np.int32),
        steps=np.array(steps, dtype=np.int32),
        batch_rows=np.full(len(rows), 3, dtype=np.int32),
        num_drafts=np.array(num_drafts, dtype=np.int8),
        route=route,
    )
