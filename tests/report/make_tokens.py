"""Synthetic tokens of a run, and texts that a page must not take for anything but text."""

from __future__ import annotations

import numpy as np

from equivtest.records import Arm
from equivtest.report.tokens import CellCounts, ShownSample, ShownTokens
from equivtest.stats.bands import binomial_intervals

SCRIPT = "<script>window.harmed = true</script>"
HOSTILE_TEXTS = {
    1: SCRIPT,
    2: "</script><script>window.harmed = true</script>",
    3: "<img src=x onerror='window.harmed = true'>",
    4: "<!--<script>",
    5: "' onmouseover='window.harmed = true",
    6: " \n\t",
    7: "\x00\x1b\u202e\u200b",
    8: "]]>&lt;b&gt;",
}
NUM_SEEDS = 64
_TOKENS = (*HOSTILE_TEXTS, 9, 10)


def shown_tokens(
    configs: tuple[str, ...], prompt_ids: tuple[str, ...], num_positions: int, *, seed: int = 3
) -> ShownTokens:
    """Every cell has ten tokens, among them all the hostile ones; 9 has a plain text and 10 has none."""
    rng = np.random.default_rng(seed)
    places = [(c, p, position) for c in configs for p in prompt_ids for position in range(num_positions)]
    low, high = binomial_intervals(NUM_SEEDS)
    return ShownTokens(
        cells={
            place: CellCounts(
                token_ids=_TOKENS,
                counts={
                    arm: tuple(rng.multinomial(NUM_SEEDS, np.ones(len(_TOKENS) + 1) / (len(_TOKENS) + 1)).tolist())
                    for arm in Arm
                },
                num_others=3,
            )
            for place in places
        },
        intervals={NUM_SEEDS: list(zip(low.tolist(), high.tolist(), strict=True))},
        samples=[
            ShownSample(
                arm=arm,
                config=config,
                prompt_id=prompt_id,
                seed=number,
                token_ids=_TOKENS,
                origins="p" * 10 if arm is Arm.OFF else "aarabrauab",
            )
            for config in configs
            for prompt_id in prompt_ids
            for arm in (Arm.OFF, Arm.ON)
            for number in range(2)
        ],
        prompts={prompt_id: [("user", SCRIPT)] for prompt_id in prompt_ids},
        token_texts={**HOSTILE_TEXTS, 9: "plain"},
    )
