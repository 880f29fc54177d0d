"""What bias a protocol can see, in closed form from the law columns of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equivtest.engines.base import EngineOptions as EngineOptions
from equivtest.errors import InsufficientSamples, InvalidSetting, MissingSamples, StatisticsError
from equivtest.pipeline.law_input import read_scored_tokens
from equivtest.pipeline.manifest import (
    Manifest,
)
from equivtest.protocol.budgets import BUDGETS
from equivtest.protocol.plan import Protocol
from equivtest.records import Arm
from equivtest.stats.law import law_family
from equivtest.stats.law_martingale import has_certain_drafts
from equivtest.stats.power import Pilot, bias_test_seeds, law_power, pilot
from equivtest.verdict.law_findings import LAW_LEVEL

TARGET_POWER = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """The bias test of one config at one number of seeds."""

    config: str
    budget: str
    """Name of the budget with so many seeds; "this run" for the run's own."""
    num_seeds: int
    alpha: float
    """Level of one test: the family's, shared by its tests as Holm's first step shares it."""
    power: float
    smallest_bias: float
    """Acceptance bias found with that power."""
    ratio: float
    """Samples that the bias test needs for it, in units of what the best test needs (Neyman-Pearson)."""
    bias: float | None
    """The bias that was asked about."""
    seeds_for_bias: float | None
    """Seeds with which it is found with that power."""


def closed_form_record(
    run_dir: Path, *, bias: float | None = None, power: float = TARGET_POWER, alpha: float = LAW_LEVEL
) -> dict[str, Any]:
    """`closed_form` as JSON-safe content, with a summary for people."""
    rows = closed_form(run_dir, bias=bias, power=power, alpha=alpha)
    summary = [
        f"{row.config}, {row.num_seeds:,} seeds ({row.budget}): an acceptance bias of {row.smallest_bias:.4f} is found "
        f"with {power:.0%} power, with {row.ratio:.2f} times the samples of the best test there is"
        for row in rows
    ]
    if bias is not None:
        needed = {row.config: row.seeds_for_bias or 0.0 for row in rows}
        summary += [f"{config}: a bias of {bias:g} needs {seeds:,.0f} seeds" for config, seeds in needed.items()]
    return {"summary": summary, "rows": [dataclasses.asdict(row) for row in rows]}


def closed_form(
    run_dir: Path, *, bias: float | None = None, power: float = TARGET_POWER, alpha: float = LAW_LEVEL
) -> tuple[ClosedForm, ...]:
    """From the draft probabilities of arm on, for the run's own seeds and those of every budget.

    Prompts and positions stay those of the run. Raises MissingSamples without law columns, InvalidSetting for drafts of
    a sampled drafter, whose power has no closed form here.
    """
    manifest = Manifest.read(run_dir)
    if not manifest.options.get("law"):
        raise MissingSamples(f"law columns of {run_dir}", "run without --no-law")
    protocol = manifest.judged_protocol
    pilots = {config: _pilot(run_dir, protocol, config) for config in protocol.configs}
    # The verdict adjusts over the tests of all configs.
    level = alpha / sum(num_tests for _, num_tests in pilots.values())
    sizes = {"this run": protocol.num_seeds} | {name: budget.num_seeds for name, budget in BUDGETS.items()}
    rows = []
    for config, (own, _) in pilots.items():
        for name, num_seeds in sizes.items():
            if own is None:
                break
            try:
                found = law_power(own, seeds=num_seeds, power=power, alpha=level)
            except StatisticsError:
                continue  # so few seeds find nothing
            rows.append(
                ClosedForm(
                    config=config,
                    budget=name,
                    num_seeds=num_seeds,
                    alpha=level,
                    power=power,
                    smallest_bias=found.smallest_bias,
                    ratio=found.ratio,
                    bias=bias,
                    seeds_for_bias=None if bias is None else bias_test_seeds(own, bias, power=power, alpha=level),
                )
            )
    if not rows:
        raise InsufficientSamples(f"power of {run_dir} (drafts with an open outcome)", 0, 1)
    return tuple(rows)


def _pilot(run_dir: Path, protocol: Protocol, config: str) -> tuple[Pilot | None, int]:
    """And the number of tests of the law family there. None where no draft was open, as under greedy decoding."""
    batches = [batch for batch in protocol.batches() if (batch[0].arm, batch[0].config) == (Arm.ON, config)]
    tokens = read_scored_tokens(run_dir, batches, protocol.num_positions)
    p_draft = tokens.q_mean[tokens.has_draft]
    if not has_certain_drafts(tokens):
        raise InvalidSetting("drafter", "sampled drafts", "has no closed form; use --simulate")
    num_tests = len(law_family(tokens, f"on / {config}").evidence)
    open_drafts = (p_draft > 0) & (p_draft < 1)
    return pilot(p_draft, protocol.num_seeds) if open_drafts.any() else None, num_tests
