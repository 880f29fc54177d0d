"""What a verdict is made from: plain records that hold what was run and what the statistics found.

A family of tests enters a verdict as one `Finding` a subject; the rules know what a finding is for, not families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from equivtest.records import Arm, Comparison


class Role(StrEnum):
    """What a finding is for."""

    TEST = "test"
    """Does speculative decoding sample from the right law? A flag that stands means that it does not."""
    A_A = "a_a"
    """Does it agree with itself under other seeds? If not, the samples cannot be trusted."""
    TEETH = "teeth"
    """Is a planted fault seen? It must be."""
    REFERENCE = "reference"
    """Does plain decoding follow the law that the others are held against? If not, that law is the wrong one."""


ROLES: Mapping[Comparison, Role] = {
    Comparison.OFF_ON: Role.TEST,
    Comparison.ON_ON_NULL: Role.A_A,
    Comparison.OFF_BIASED: Role.TEETH,
}
"""What two arms are compared for."""

LAW_ROLES: Mapping[Arm, Role] = {Arm.OFF: Role.REFERENCE, Arm.ON: Role.TEST, Arm.BIASED: Role.TEETH}
"""What an arm is held against the target's law for. `on_null` repeats `on` and has no vote."""


class Place(NamedTuple):
    """Where a test was made: a config, or one prompt of it, or one position of that prompt (a cell); and which test,
    where there are several."""

    config: str
    prompt_id: str | None = None
    position: int | None = None
    test: str | None = None

    def __str__(self) -> str:
        position = None if self.position is None else f"position {self.position}"
        parts = [self.config, self.prompt_id, position, self.test]
        return " / ".join(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """What was collected for one config."""

    config: str
    rows_expected: Mapping[Arm, int]
    """Rows of stage 1 that the protocol asks for, by arm."""
    rows_found: Mapping[Arm, int]
    """Rows of stage 1 on disk, by arm."""
    greedy: bool = False
    recorded: bool = False
    """Samples do not say how their tokens came about: that the on arm speculated is taken on trust."""
    num_samples: int
    """Samples of arm on."""
    num_spec_samples: int
    """Samples of arm on that were routed to the speculative path."""
    num_drafted: int
    """Draft tokens that the on arm judged: offered, and not behind a rejection."""
    num_accepted: int
    """Draft tokens that the on arm kept."""
    plain_reasons: Mapping[str, int]
    """Why samples of arm on went plain: reason to number of samples."""

    @property
    def speculated(self) -> bool:
        """Whether the on arm really decoded speculatively: a draft was offered at least once."""
        return self.recorded or self.num_drafted > 0

    @property
    def must_show_teeth(self) -> bool:
        """Whether a planted acceptance bias can and must show here.

        Not where no draft was offered or every draft was accepted (there is nothing to inflate), and not under greedy
        decoding, whose constant cells are a test of identity rather than of a law.
        """
        return not self.greedy and (self.recorded or self.num_accepted < self.num_drafted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One test that rejected."""

    place: Place
    p_value: float
    """Adjusted for every test it was made with."""
    effect: float
    """Size, in the test's own measure."""
    effect_by_chance: float
    """What the same measure shows on average when nothing is wrong."""
    words: str
    """The size for people: "total variation distance 0.31 where 0.17 is usual"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """The largest value of a measure, whether or not it was flagged."""

    name: str
    value: float
    by_chance: float
    """What the same measure shows there on average when nothing is wrong."""
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Stage 2: the flagged tests again, on fresh seeds."""

    alpha: float
    """Family-wise level over the tests of this stage."""
    num_samples: int
    """Fresh samples an arm."""
    tested: tuple[Place, ...]
    confirmed: tuple[Flag, ...]
    """The tests that rejected again; p-values adjusted over `tested`."""
    smallest_p: float
    """Smallest adjusted p-value over `tested`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % interval that must lie inside its margin before a run is called equivalent."""

    place: Place
    estimate: float
    low: float
    high: float
    margin: float
    num_seeds: int
    """Seeds behind it."""

    @property
    def inside(self) -> bool:
        return -self.margin < self.low and self.high < self.margin

    @property
    def seeds_needed(self) -> int | None:
        """Seeds with which an interval would lie inside, its width falling with their root; None where all of it lies
        outside. About the same estimate; where that is outside itself, about the value of the interval nearest 0, and
        so for a distance, which is above 0 by chance alone."""
        nearest = max(self.low, -self.high, 0.0)
        inside = abs(self.estimate) < self.margin and self.place.test not in DISTANCES
        centre = abs(self.estimate) if inside else nearest
        if centre >= self.margin:
            return None
        width = max(abs(self.high), abs(self.low)) - centre
        return math.ceil(self.num_seeds * (width / (self.margin - centre)) ** 2)


DISTANCES = frozenset({"rank", "vocab"})
"""Tests whose estimate is a distance: at least 0, and above it by chance alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One family of tests on one subject."""

    family: str
    """marginal, joint or law."""
    role: Role
    subject: str
    """What was tested: "off vs on", or "on against the target's law"."""
    unit: str
    """What one test is made on, in the plural: "cells"."""
    num_tests: Mapping[str, int]
    """Tests made, by config."""
    flagged: tuple[Flag, ...]
    """What stage 1 rejected, most significant first."""
    smallest_p: float
    """Smallest adjusted p-value of stage 1."""
    level: float
    """Level of stage 1."""
    method: str
    """How p-values were computed and adjusted, in one phrase."""
    extremes: tuple[Extreme, ...] = ()
    at_once: bool = False
    """Whether its flags are valid at whatever time they are looked at, and so count without fresh seeds."""
    confirmation: Confirmation | None = None
    """Stage 2, where it was made."""

    @property
    def num_all(self) -> int:
        return sum(self.num_tests.values())

    def flags_in(self, config: str) -> int:
        """Number of flags of stage 1 in one config."""
        return sum(flag.place.config == config for flag in self.flagged)

    def standing_flags(self, confirm: bool) -> tuple[Flag, ...]:
        """The flags that count: those of stage 2 where it was made and is asked for, else those of stage 1."""
        return self.flagged if self.confirmation is None or not confirm else self.confirmation.confirmed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What was run, and how it is to be judged."""

    configs: tuple[ConfigFacts, ...]
    """What was collected; empty only where not even that is known."""
    planted_fault: str
    """The fault of the biased arm, in words: "acceptance bias of 0.10"."""
    comparisons: tuple[Comparison, ...] = tuple(Comparison)
    """What the run was meant to compare. Two files of samples have no controls: only off vs on."""
    diagnosis: tuple[str, ...] = ()
    """What the pattern of the evidence points to, one sentence each; told where a difference stands."""
    unsettled: tuple[str, ...] = ()
    """What should have been measured and could not be, for too little data; one line each."""
    confirm: bool = True
    """Whether a flag of stage 1 must be confirmed on fresh seeds before it counts."""
    from_files: bool = False
    """Whether these are two files of samples, so that no option of a run made them."""
    caveats: tuple[str, ...] = ()
    """What a reader must know about what such a run can show, whatever it found; one line each."""
    refusals: tuple[str, ...] = ()
    """Messages of the statistics errors that kept an analysis from being made."""
