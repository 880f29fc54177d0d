"""What an engine of others is asked before anything is collected: whether its texts are samples at all."""

from __future__ import annotations

from collections.abc import Callable

from equivtest.engines.base import Messages
from equivtest.records import Request, SamplingParams

PROBE_CHAT: Messages = ({"role": "user", "content": "Tell me a story about the sea."},)
_FLAT = SamplingParams(temperature=2.0)
"""A law so flat that two texts of a few words are never the same by chance."""
_NUM_TOKENS = 24


def probe_request(prompt_token_ids: tuple[int, ...], seed: int) -> Request:
    """A short text of a flat law."""
    return Request(
        prompt_token_ids=prompt_token_ids,
        params=_FLAT,
        stream_key=seed,
        max_tokens=_NUM_TOKENS,
        label=f"a first question with seed {seed}",
    )


def repeats_seeds(sample: Callable[[int], tuple[int, ...]]) -> bool | None:
    """Whether a seed gives the same text again; None where every seed does, so that texts are no samples."""
    one, again, *others = (sample(seed) for seed in (1, 1, 2, 3))
    return None if all(other == one for other in others) else again == one
