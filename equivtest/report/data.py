"""Everything a report shows, as plain records and tables. Renderers only show it; nothing is computed from samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from equivtest.errors import InvalidSetting
from equivtest.records import Comparison, Word

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

MAY_BE_EMPTY = frozenset({"df", "adjusted_p", "estimate", "ci_low", "ci_high", "margin"})
"""Columns in which a test that does not define the value leaves it empty."""


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
    """Cells rejected."""
    num_cells: int
    """Cells tested."""
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

    def __post_init__(self) -> None:
        for field, columns in (
            ("cells", CELL_COLUMNS),
            ("evidence", EVIDENCE_COLUMNS),
            ("acceptance", ACCEPTANCE_COLUMNS),
        ):
            _check_frame(field, getattr(self, field), columns)
        unknown = sorted(set(self.cells["comparison"]) - set(Comparison))
        if unknown:
            raise InvalidSetting(
                setting="ReportData.cells.comparison",
                value=unknown[0],
                requirement=f"must be one of {', '.join(Comparison)}",
            )
        unlisted = sorted(set(self.cells["config"]) - {config.name for config in self.configs})
        if unlisted:
            raise InvalidSetting(
                setting="ReportData.cells.config", value=unlisted[0], requirement="must be listed in configs"
            )

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


def _check_frame(field: str, frame: pd.DataFrame, columns: tuple[str, ...]) -> None:
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InvalidSetting(
            setting=f"ReportData.{field}", value=list(frame.columns), requirement=f"lacks {', '.join(missing)}"
        )
    for name in columns:
        if name not in MAY_BE_EMPTY and frame[name].isna().any():
            raise InvalidSetting(
                setting=f"ReportData.{field}.{name}", value=None, requirement="must not be empty or NaN"
            )
