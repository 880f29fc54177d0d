"""The evidence of one arm and config, and which of its lines are flagged and not explained yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from equivtest.errors import InvalidSetting
from equivtest.records import Evidence, Origin
from equivtest.stats.law_counts import support_by_origin

ALL = ("*",)
"""Patterns of a rule that explains everything."""

SHAPE = ("rank", "vocab", "rows")
"""Moved by every fault that moves many tokens one way: `rows` as well, whose products then have a mean above 0."""

CLEAR = 4.0
"""z beyond which a line is clear by itself."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The evidence of one arm and config by name, and the flagged names that are not explained yet."""

    by_name: dict[str, Evidence]
    open: frozenset[str]
    by_batch: bool = False
    """Texts change with the batch that they are decoded in."""
    alternatives: tuple[Evidence, ...] = ()

    @property
    def laws_vary(self) -> bool:
        """Whether any law holds more than one token; not under greedy decoding."""
        return any(name.startswith("surprisal_") for name in self.by_name)

    @property
    def reports_its_law(self) -> bool:
        """The decoder reports the right log-probabilities: the laws it draws from are right, and what it does with
        them is wrong."""
        return "logprobs" in self.by_name and "logprobs" not in self.open

    @property
    def clean(self) -> str:
        """`; bonus and plain tokens follow the law`, as far as it was tested and holds."""
        tested = [kind for kind in ("bonus", "plain") if f"surprisal_{kind}" in self.by_name]
        kinds = [kind for kind in tested if f"surprisal_{kind}" not in self.open]
        return f"; {' and '.join(kinds)} tokens follow the law" if kinds else ""

    def z(self, name: str) -> float:
        """0 where the line is not there."""
        return self.by_name[name].statistic if name in self.by_name else 0.0

    def estimate(self, name: str) -> float:
        return (self.by_name[name].estimate or 0.0) if name in self.by_name else 0.0

    def matching(self, *patterns: str) -> list[str]:
        """Open names."""
        return sorted(name for name in self.open if any(fnmatch(name, pattern) for pattern in patterns))

    def size(self, name: str, unit: str = "", sign: bool = False) -> str:
        """`0.021 (95 % CI 0.017 to 0.025)`."""
        line = self.by_name[name]
        turn = 1.0 if sign or self.estimate(name) >= 0 else -1.0
        low, high = sorted(turn * (end or 0.0) for end in (line.ci_low, line.ci_high))
        return f"{turn * self.estimate(name):{'+' if sign else ''}.3f}{unit} (95 % CI {low:.3f} to {high:.3f})"

    def excludes_zero(self, name: str) -> bool:
        line = self.by_name[name]
        return line.ci_low is not None and line.ci_high is not None and not line.ci_low <= 0 <= line.ci_high

    def off_support(self) -> dict[Origin, int]:
        """How many tokens of which origin no law holds, whether or not that is explained already."""
        return support_by_origin(self.by_name["support"]) if "support" in self.by_name else {}


Said = tuple[str, str, Sequence[str]]
"""The stage, a sentence, and patterns of the names that it explains."""
Rule = Callable[[Lines], Said | None]


def lines_of(evidence: Iterable[Evidence], alpha: float) -> Lines:
    """Lines by name; flagged are those whose adjusted p-value (the p-value where there is none) is below alpha.

    Raises InvalidSetting where a name comes twice.
    """
    by_name: dict[str, Evidence] = {}
    for line in evidence:
        if line.name in by_name:
            raise InvalidSetting("evidence to diagnose", line.name, "must hold each test once")
        by_name[line.name] = line
    levels = {n: e.p_value if e.adjusted_p is None else e.adjusted_p for n, e in by_name.items()}
    return Lines(by_name, frozenset(name for name, level in levels.items() if level < alpha))
