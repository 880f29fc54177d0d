"""Everything a report shows, as plain records and tables. Renderers only show it; nothing is computed from samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import pandas as pd

from equivtest.errors import InvalidSetting
from equivtest.records import Arm, Comparison, Word
from equivtest.report.tokens import ShownTokens

COMPARISON_EXPECTS: Mapping[Comparison, str] = {
    Comparison.OFF_ON: "agree?",
    Comparison.ON_ON_NULL: "agree",
    Comparison.OFF_BIASED: "differ",
}
"""What each comparison is expected to do, in a word; the first is the question."""

COMPARISON_ROLES: Mapping[Comparison, str] = {
    Comparison.OFF_ON: "the test",
    Comparison.ON_ON_NULL: "A/A control: should agree",
    Comparison.OFF_BIASED: "planted fault: should differ",
}

CELL_COLUMNS = (
    "comparison",
    "config",
    "prompt_id",
    "position",
    "num_a",
    "num_b",
    "num_bins",
    "statistic",
    "df",
    "p_value",
    "q_value",
    "rejected",
    "tv",
    "tv_null_mean",
    "tv_null_q975",
    "tv_excess",
)
EVIDENCE_COLUMNS = (
    "family",
    "name",
    "stratum",
    "statistic",
    "df",
    "p_value",
    "adjusted_p",
    "estimate",
    "ci_low",
    "ci_high",
    "margin",
    "num_tokens",
    "method",
)
ACCEPTANCE_COLUMNS = ("arm", "config", "slot", "reached", "accepted")
EXPECTED_COLUMNS = ("arm", "config", "slot", "expected", "low", "high")
PIT_COLUMNS = ("config", "arm", "order", "bin", "count", "expected", "low", "high")
QUANTILE_COLUMNS = ("comparison", "expected", "observed", "low", "high")
POWER_COLUMNS = ("config", "test", "bias", "power")

FRAMES: Mapping[str, tuple[str, ...]] = {
    "cells": CELL_COLUMNS,
    "evidence": EVIDENCE_COLUMNS,
    "acceptance": ACCEPTANCE_COLUMNS,
    "expected": EXPECTED_COLUMNS,
    "pit": PIT_COLUMNS,
    "quantiles": QUANTILE_COLUMNS,
    "power": POWER_COLUMNS,
}
"""Every table of a report, by its field, and the columns that it must have."""

_ONE_OF: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("cells", "comparison"): tuple(Comparison),
    ("quantiles", "comparison"): tuple(Comparison),
    ("expected", "arm"): tuple(Arm),
    ("pit", "arm"): tuple(Arm),
    ("pit", "order"): ("rank", "vocab"),
    ("power", "test"): ("law", "neyman_pearson"),
}
"""Columns that hold one of a few words."""

MAY_BE_EMPTY = frozenset({"df", "adjusted_p", "estimate", "ci_low", "ci_high", "margin"})
"""Columns in which a test that does not define the value leaves it empty."""


def _empty(columns: tuple[str, ...]) -> pd.DataFrame:
    return pd.DataFrame(columns=list(columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """One control: something that must come out in a known way, or the run says nothing."""

    name: str
    """What people call it, for instance "A/A"."""
    comparison: str
    """What was compared, for instance "on vs on_null"."""
    expected: str
    """What had to come out."""
    outcome: str
    """What came out."""
    num_rejected: int
    """Tests rejected."""
    num_cells: int
    """Tests made: cells, and what other families look at."""
    passed: bool | None
    """None where it was not run, is undecided or had nothing to act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """One sampling configuration of the run."""

    name: str
    params: str
    """Its sampling parameters as text."""
    routed: str
    """`spec`, or `plain: reason`."""
    acceptance_rate: float | None
    """Accepted drafts over drafts reached in the arm on; None when nothing speculated."""
    mean_accepted: float | None
    """Accepted drafts per round in the arm on; None when nothing speculated."""
    tokens_per_arm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpeed:
    """What generating an arm took."""

    arm: str
    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """The input of every renderer. Equal data give equal bytes in every output."""

    run_id: str
    title: str
    word: Word
    """The verdict."""
    headline: str
    """The verdict in one sentence with its numbers."""
    reasons: tuple[str, ...]
    """Why, one line each."""
    next_steps: tuple[str, ...]
    """What to do or run next, one line each; a line that starts with "equivtest " is a command."""
    gate_of_record: str
    """The literal reading of the protocol of record, in one line."""
    exit_code: int
    controls: tuple[ControlResult, ...]
    configs: tuple[ConfigFacts, ...]
    cells: pd.DataFrame
    """CELL_COLUMNS, one row a cell and comparison."""
    evidence: pd.DataFrame
    """EVIDENCE_COLUMNS, the fields of `records.Evidence`."""
    acceptance: pd.DataFrame
    """ACCEPTANCE_COLUMNS, what became of the drafts at each slot."""
    manifest: Mapping[str, object]
    """Provenance; `command`, if there, reproduces the run. Values may be text, numbers, lists and mappings of them."""
    diagnosis: tuple[str, ...] = ()
    """What is wrong and where to look, a sentence each; empty when nothing is, or nothing more can be said."""
    stages: tuple[str, ...] = ()
    """The stage of the decoder that each sentence of the diagnosis points to."""
    gates: bool = True
    """Whether a run of this size may decide a merge."""
    speed: tuple[ArmSpeed, ...] = ()
    """What generating took, by arm."""
    expected: pd.DataFrame = field(default_factory=partial(_empty, EXPECTED_COLUMNS))
    """EXPECTED_COLUMNS, the share of the drafts at a slot that the law accepts, with its 95 % band in a run of this
    size; empty without a law or where drafts are sampled."""
    shown: ShownTokens = field(default_factory=ShownTokens)
    """The tokens themselves, as far as the page shows them."""
    pit: pd.DataFrame = field(default_factory=partial(_empty, PIT_COLUMNS))
    """PIT_COLUMNS, the histogram of an arm's probability integral transforms in an order of the vocabulary (`rank` or
    `vocab`): bins 0..19, with the count of a uniform law and a pointwise 95 % band; empty without a law."""
    quantiles: pd.DataFrame = field(default_factory=partial(_empty, QUANTILE_COLUMNS))
    """QUANTILE_COLUMNS, the sorted p-values of a comparison's cells against uniform quantiles, with a pointwise 95 %
    band."""
    power: pd.DataFrame = field(default_factory=partial(_empty, POWER_COLUMNS))
    """POWER_COLUMNS, with what probability this run sees a bias: the family `law`, and the limit `neyman_pearson`."""

    def __post_init__(self) -> None:
        listed = {config.name for config in self.configs}
        for name, columns in FRAMES.items():
            frame = getattr(self, name)
            _check_frame(name, frame, columns)
            for column in columns:
                allowed = _ONE_OF.get((name, column))
                if allowed:
                    _check_words(f"{name}.{column}", frame[column], allowed, f"must be one of {', '.join(allowed)}")
            if "config" in columns and name != "acceptance":
                _check_words(f"{name}.config", frame["config"], listed, "must be listed in configs")

    def cells_of(self, comparison: Comparison, config: str | None = None) -> pd.DataFrame:
        """The cells of one comparison, of one configuration or of all, in the order given."""
        chosen = self.cells["comparison"] == comparison
        if config is not None:
            chosen &= self.cells["config"] == config
        return self.cells.loc[chosen]

    def comparisons(self, config: str | None = None) -> tuple[Comparison, ...]:
        """The comparisons that have cells, in the order of Comparison."""
        return tuple(name for name in Comparison if len(self.cells_of(name, config)))

    def prompt_ids(self, config: str) -> tuple[str, ...]:
        """The prompts of a configuration in the order in which they first appear."""
        return tuple(dict.fromkeys(self.cells.loc[self.cells["config"] == config, "prompt_id"]))


def _check_frame(name: str, frame: pd.DataFrame, columns: tuple[str, ...]) -> None:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise InvalidSetting(
            setting=f"ReportData.{name}", value=list(frame.columns), requirement=f"lacks {', '.join(missing)}"
        )
    for column in columns:
        if column not in MAY_BE_EMPTY and frame[column].isna().any():
            raise InvalidSetting(
                setting=f"ReportData.{name}.{column}", value=None, requirement="must not be empty or NaN"
            )


def _check_words(column: str, values: pd.Series[str], allowed: Collection[str], requirement: str) -> None:
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise InvalidSetting(setting=f"ReportData.{column}", value=unknown[0], requirement=requirement)
