"""How samples are judged: what a run, a report and a comparison can be told about it."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.errors import InvalidSetting
from equivtest.protocol.budgets import BUDGETS, get_budget
from equivtest.stats.law import LawMargins
from equivtest.stats.marginal import Dependence, Statistic

LEVEL = 0.05
"""False discovery rate of the protocol of record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions:
    """How samples are judged. Part of the manifest, so that a report can be recomputed as it was asked for."""

    statistic: Statistic = "chi2"
    exact: bool = False
    dependence: Dependence = "bh"
    num_permutations: int | None = None
    confirm: bool = True
    law: bool = True
    """Hold every token against the target's law."""
    bias_margin: float | None = None
    """None takes the budget's."""
    pit_margin: float | None = None
    """None takes the budget's."""

    def __post_init__(self) -> None:
        if self.num_permutations is not None and not self.by_permutation:
            raise InvalidSetting("num_permutations", self.num_permutations, "goes with --exact or --statistic max_z")
        for name in ("bias_margin", "pit_margin"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise InvalidSetting(name, value, "must be between 0 and 1")

    @property
    def by_permutation(self) -> bool:
        """Whether p-values come from label permutations."""
        return self.exact or self.statistic == "max_z"

    def margins(self, budget: str) -> LawMargins:
        """What an interval must lie inside of, at a budget."""
        default = get_budget(budget) if budget in BUDGETS else get_budget("gate")
        return LawMargins(
            bias=default.bias_margin if self.bias_margin is None else self.bias_margin,
            pit=default.pit_margin if self.pit_margin is None else self.pit_margin,
        )
