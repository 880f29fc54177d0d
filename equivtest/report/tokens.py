"""The tokens that the page shows: what each cell drew, and some samples as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from equivtest.records import Arm, Origin

ORIGIN_LETTERS: Mapping[Origin, str] = {
    Origin.ACCEPTED: "a",
    Origin.RECOVERED: "r",
    Origin.BONUS: "b",
    Origin.PLAIN: "p",
    Origin.UNKNOWN: "u",
}
"""How the page's data name an origin; a token of origin `ended` is none and is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCounts:
    """How often each arm put out the tokens of one cell."""

    token_ids: tuple[int, ...]
    """The most frequent ones, those of any arm."""
    counts: Mapping[Arm, tuple[int, ...]]
    """For each arm with samples, its counts of `token_ids` and, last, of all other tokens together."""
    num_others: int
    """Distinct tokens among those others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """One sample as far as it is text."""

    arm: Arm
    config: str
    prompt_id: str
    seed: int
    token_ids: tuple[int, ...]
    origins: str
    """A letter of ORIGIN_LETTERS for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTokens:
    """All of it; empty for a run without samples."""

    cells: Mapping[tuple[str, str, int], CellCounts] = field(default_factory=dict)
    """By config, prompt and position."""
    intervals: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """For each number of samples of a cell, the 95 % interval of a token's probability by its count."""
    samples: Sequence[ShownSample] = ()
    prompts: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Role and content of each message of a prompt."""
    token_texts: Mapping[int, str] = field(default_factory=dict)
    """What each token stands for; a token without a text is shown by its id."""

    def to_json(self) -> dict[str, Any]:
        """The same for the page's script, short: tokens are indices into one list, an arm without samples is null."""
        used = {id_ for cell in self.cells.values() for id_ in cell.token_ids}
        used |= {id_ for sample in self.samples for id_ in sample.token_ids}
        ids = sorted(used)
        index = {id_: place for place, id_ in enumerate(ids)}
        cells: dict[str, dict[str, dict[int, Any]]] = {}
        for (config, prompt_id, position), cell in self.cells.items():
            cells.setdefault(config, {}).setdefault(prompt_id, {})[position] = [
                [index[id_] for id_ in cell.token_ids],
                [list(cell.counts[arm]) if arm in cell.counts else None for arm in Arm],
                cell.num_others,
            ]
        samples: dict[str, dict[str, dict[str, list[Any]]]] = {}
        for sample in self.samples:
            of_prompt = samples.setdefault(sample.config, {}).setdefault(sample.prompt_id, {})
            of_prompt.setdefault(sample.arm.value, []).append(
                [sample.seed, [index[id_] for id_ in sample.token_ids], sample.origins]
            )
        return {
            "arms": [arm.value for arm in Arm],
            "ids": ids,
            "texts": [self.token_texts.get(id_) for id_ in ids],
            "cells": cells,
            "intervals": {
                count: [[round(end, 4) for end in ends] for ends in table] for count, table in self.intervals.items()
            },
            "samples": samples,
            "prompts": {prompt_id: list(map(list, messages)) for prompt_id, messages in self.prompts.items()},
        }
