"""What the battery says of a sampler."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from equivtest.records import EXIT_CODES, Evidence, Word

LEVEL = 1e-6
"""Probability with which a correct sampler is called different, over all tests together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong, in words."""

    stage: str
    """contract, accept, recover, bonus, count, coins, seeds or output."""
    what: str
    """What is wrong and by how much."""
    sure: str
    """How sure that is."""
    then: str
    """What to look at and to run next."""

    def __str__(self) -> str:
        return f"{self.stage}: {self.what}; {self.sure}. Next: {self.then}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerReport:
    """The outcome of `check_sampler`."""

    sampler: str
    form: str
    coins: str
    device: str
    budget: str
    seed: int
    findings: tuple[Finding, ...]
    evidence: tuple[Evidence, ...]
    """Every test, its p-value also adjusted for all of them (Holm 1979)."""
    num_laws: int
    num_rows: int
    """Rows that were judged."""
    num_drafts: int
    """Drafts that were judged."""
    smallest_bias: float | None
    """Excess of the acceptance probability that these decisions find with 90 % power, on dense drafts alone and on
    one-hot drafts alone; None where either has too few open decisions."""
    wall_s: float
    notes: tuple[str, ...] = ()
    """What was not tested, and why."""

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def word(self) -> Word:
        """Equivalent or different."""
        return Word.EQUIVALENT if self.passed else Word.DIFFERENT

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    def lines(self) -> list[str]:
        """For people: what was done, what was found, and what that means."""
        lines = [
            f"{self.sampler} as {self.form}, coins: {self.coins}, on {self.device}, budget {self.budget}, seed "
            f"{self.seed}: {self.num_rows:,} rows, {self.num_drafts:,} drafts judged on {self.num_laws} laws in "
            f"{self.wall_s:.1f} s",
            f"{len(self.evidence)} tests; a correct sampler fails them in at most {LEVEL:g} of runs, and "
            f"{self._sees()}",
            *(f"not tested: {note}" for note in self.notes),
            *(str(finding) for finding in self.findings),
        ]
        count = len(self.findings)
        verdict = f"{count} finding{'s' * (count > 1)}" if count else "no difference was found"
        return [*lines, f"{self.word.upper()}: {verdict}"]

    def _sees(self) -> str:
        if self.smallest_bias is None:
            return "no acceptance bias is measured: too few decisions are open"
        return f"an acceptance bias of {self.smallest_bias:.4f} is found in 90 % of runs"

    def to_dict(self) -> dict[str, Any]:
        """For programs: every field, the word and the exit code."""
        return {"word": str(self.word), "exit_code": self.exit_code, **dataclasses.asdict(self)}
