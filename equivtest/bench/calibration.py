"""How often a correct decoder is stopped: the level of every test and of the whole gate over thousands of A/A runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from scipy.stats import binomtest

from equivtest.bench.families import FAMILIES, LEVELS
from equivtest.bench.gate_runs import PLANTED, PROTOCOL, gate_run
from equivtest.bench.replications import OnProgress, Tally, replicate
from equivtest.records import Word

Kind = Literal["exact", "upper"]

SIMULTANEOUS = 0.99
"""Probability with which the intervals of a table of correct tests hold all their levels together."""

GATE_CONFIDENCE = 0.95

FAULT = 0.05
"""Acceptance bias of the faulty decoder that the gate must stop."""

_FAULTY_SHARE = 10
"""One faulty run for so many correct ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How often one test rejected a correct decoder at one nominal level."""

    family: str
    test: str
    nominal: float
    kind: Kind
    """exact: the interval must hold the nominal level. upper: it must not lie above it."""
    rejected: int
    replications: int
    """Those in which the test could be made."""
    ci_low: float
    ci_high: float
    """Exact interval (Clopper & Pearson 1934) at a confidence that makes all intervals of the table hold together with
    probability 99 % (Bonferroni)."""

    @property
    def rate(self) -> float:
        return self.rejected / self.replications

    @property
    def ok(self) -> bool:
        return self.ci_low <= self.nominal and (self.kind == "upper" or self.nominal <= self.ci_high)

    def row(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self) | {"rate": self.rate, "ok": self.ok}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """In how many gate runs something happened."""

    decoder: str
    """"correct" or "faulty"."""
    what: str
    count: int
    runs: int
    ci_low: float
    ci_high: float
    """Exact 95 % interval."""

    @property
    def rate(self) -> float:
        return self.count / self.runs

    def row(self) -> dict[str, Any]:
        """JSON-safe."""
        return asdict(self) | {"rate": self.rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The whole table."""

    replications: int
    seed: int
    levels: tuple[Level, ...]
    gate: tuple[Share, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row a test: its rate at each nominal level, with a mark where that is outside its interval."""
        by_test: dict[tuple[str, str], list[Level]] = {}
        for level in self.levels:
            by_test.setdefault((level.family, level.test), []).append(level)
        return [
            {"family": family, "test": test, "kind": own[0].kind}
            | {f"at {level.nominal:g}": f"{level.rate:.4f}{'' if level.ok else ' !'}" for level in own}
            | {"runs": own[0].replications}
            for (family, test), own in by_test.items()
        ]

    @property
    def failures(self) -> tuple[Level, ...]:
        """Levels outside their intervals."""
        return tuple(level for level in self.levels if not level.ok)

    def settings(self) -> dict[str, Any]:
        """How it was computed."""
        return {
            "replications": self.replications,
            "seed": self.seed,
            "simultaneous_confidence": SIMULTANEOUS,
            "gate_confidence": GATE_CONFIDENCE,
            "protocols": {name: family.protocol for name, family in FAMILIES.items()} | {"gate": PROTOCOL},
            "faulty_decoder": f"acceptance bias of {FAULT:g}; arm biased has {PLANTED:g} more than arm on",
        }


def calibrate(*, replications: int, seed: int, workers: int | None, on_progress: OnProgress) -> Calibration:
    """Every family over `replications` A/A runs, and the gate over as many runs of a correct decoder and a tenth as
    many of a faulty one. The table depends on replications and seed alone. Raises InvalidSetting."""
    return Calibration(
        replications=replications,
        seed=seed,
        levels=family_levels(replications=replications, seed=seed, workers=workers, on_progress=on_progress),
        gate=gate_shares(replications=replications, seed=seed, workers=workers, on_progress=on_progress),
    )


def family_levels(
    names: Sequence[str] = tuple(FAMILIES),
    *,
    replications: int,
    seed: int,
    workers: int | None,
    on_progress: OnProgress,
) -> tuple[Level, ...]:
    """The level of every test of the named families. Raises InvalidSetting."""
    counted = {
        name: replicate(
            name,
            FAMILIES[name].replicate,
            replications=replications,
            seed=seed,
            workers=workers,
            on_progress=on_progress,
        )
        for name in names
    }
    num_intervals = len(LEVELS) * sum(map(len, counted.values()))
    confidence = 1 - (1 - SIMULTANEOUS) / num_intervals
    return tuple(
        _level(name, test, nominal, int(rejected), tally.asked, confidence)
        for name, tallies in counted.items()
        for test, tally in tallies.items()
        for nominal, rejected in zip(LEVELS, tally.yes, strict=True)
    )


def gate_shares(*, replications: int, seed: int, workers: int | None, on_progress: OnProgress) -> tuple[Share, ...]:
    """What became of gate runs of a correct decoder and of a faulty one. Raises InvalidSetting."""
    shares: list[Share] = []
    for decoder, epsilon, runs in (
        ("correct", 0.0, replications),
        ("faulty", FAULT, max(1, replications // _FAULTY_SHARE)),
    ):
        tallies = replicate(
            f"gate, {decoder} decoder",
            partial(gate_run, epsilon),
            replications=runs,
            seed=seed,
            workers=workers,
            on_progress=on_progress,
        )
        shares += [_share(decoder, what, tallies[name]) for name, what in _GATE_QUESTIONS.items()]
    return tuple(shares)


_GATE_QUESTIONS = {
    "flagged": "flagged in stage 1, by any family",
    "stopped": "stopped: a flag stood on fresh seeds",
    "literal": "gate of record: stage 1 of the marginal family",
    "marginal": "marginal family with confirmation",
    **{str(word): f"verdict {word}" for word in Word},
}
"""Answers of a gate run, in words."""


def _level(family: str, test: str, nominal: float, rejected: int, replications: int, confidence: float) -> Level:
    interval = binomtest(rejected, replications).proportion_ci(confidence)
    return Level(
        family=family,
        test=test,
        nominal=nominal,
        kind="upper" if test in FAMILIES[family].upper else "exact",
        rejected=rejected,
        replications=replications,
        ci_low=float(interval.low),
        ci_high=float(interval.high),
    )


def _share(decoder: str, what: str, tally: Tally) -> Share:
    count = int(tally.yes[0])
    interval = binomtest(count, tally.asked).proportion_ci(GATE_CONFIDENCE)
    return Share(
        decoder=decoder,
        what=what,
        count=count,
        runs=tally.asked,
        ci_low=float(interval.low),
        ci_high=float(interval.high),
    )
