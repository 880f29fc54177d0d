"""Levels of every family and of the gate, on few replications; the committed table holds the many."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from equivtest.bench import families
from equivtest.bench.calibration import FAULT, Calibration, Level, family_levels
from equivtest.bench.families import FAMILIES, LEVELS, Family
from equivtest.bench.gate_runs import gate_run
from equivtest.bench.replications import Outcome, replicate
from equivtest.errors import InvalidSetting

NUM_REPLICATIONS = 120


def say_nothing(name: str, done: int, total: int) -> None:
    pass


def levels(*names: str, replications: int = NUM_REPLICATIONS, seed: int = 2) -> tuple[Level, ...]:
    return family_levels(names, replications=replications, seed=seed, workers=1, on_progress=say_nothing)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_correct_decoder_is_stopped_at_the_level(name: str) -> None:
    """120 runs a family: the intervals of each hold together with probability 99 %, so one of the eight fails at most
    once in 12 draws of the seed; a rate of .15 where .05 is nominal fails in over half, one of .2 in over 90 %."""
    of_family = levels(name)
    assert [level for level in of_family if not level.ok] == []
    assert {level.nominal for level in of_family} == set(LEVELS)
    assert all(level.replications >= 0.95 * NUM_REPLICATIONS for level in of_family)
    loosest = [level for level in of_family if level.nominal == max(LEVELS)]
    assert any(level.rejected for level in loosest)  # a family that never fires would have no level to speak of


def p_is_a_power(power: float, rng: np.random.Generator) -> dict[str, Outcome]:
    p_value = rng.random() ** power
    return {"test": np.array([p_value <= level for level in LEVELS])}


@pytest.mark.parametrize(
    ("power", "upper", "ok"), [(1.0, False, True), (1.3, False, False), (0.8, False, False), (0.8, True, True)]
)
def test_a_test_that_misses_its_level_is_found(
    power: float, upper: bool, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 runs: p-values uniform to the power 1.3 reject .0997 of runs at 5 %, to the power .8 they reject .0236;
    each is missed once in more than 10,000 draws. A bound is allowed the second."""
    family = Family(
        replicate=partial(p_is_a_power, power), upper=frozenset({"test"} if upper else ()), protocol="uniform"
    )
    monkeypatch.setattr("equivtest.bench.calibration.FAMILIES", {"planted": family})
    found = levels("planted", replications=2_000)
    table = Calibration(replications=2_000, seed=2, levels=found, gate=())
    assert (table.failures == ()) is ok
    marked = [rate for row in table.rows() for rate in row.values() if str(rate).endswith("!")]
    assert (marked == []) is ok


def test_a_faulty_decoder_is_not_stopped_at_the_level_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: with acceptance inflated by .1 the law family rejects in all of 20 runs at every level."""
    monkeypatch.setattr(families, "decode", partial(families.decode, epsilon=0.1))
    found = {level.nominal: level.rejected for level in levels("law", replications=20) if level.test == "any (Holm)"}
    assert found == dict.fromkeys(LEVELS, 20)


def share(epsilon: float, runs: int) -> dict[str, int]:
    tallies = replicate(
        "gate", partial(gate_run, epsilon), replications=runs, seed=3, workers=1, on_progress=say_nothing
    )
    return {name: int(tally.yes[0]) for name, tally in tallies.items()}


def test_a_correct_decoder_passes_the_whole_gate() -> None:
    """25 runs. One in 700 is stopped, so more than one is once in 1,600 draws."""
    found = share(0.0, 25)
    assert found["stopped"] <= 1
    assert found["equivalent"] >= 24
    assert found["flagged"] >= found["stopped"]


def test_a_faulty_decoder_is_different() -> None:
    """The twin: an acceptance bias of .05 in 10 runs of an eighth of the gate budget."""
    assert share(FAULT, 10)["different"] == 10


def test_counts_depend_on_the_seed_and_not_on_the_number_of_processes() -> None:
    def counts(seed: int, workers: int):
        tallies = replicate(
            "law", FAMILIES["law"].replicate, replications=50, seed=seed, workers=workers, on_progress=say_nothing
        )
        return {name: (tally.asked, tally.yes.tolist()) for name, tally in tallies.items()}

    assert counts(1, 1) == counts(1, 2) != counts(2, 1)


def test_progress_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    replicate(
        "uniform", partial(p_is_a_power, 1.0), replications=45, seed=1, workers=1,
        on_progress=lambda *line: told.append(line),
    )  # fmt: skip
    assert told == [("uniform", 20, 45), ("uniform", 40, 45), ("uniform", 45, 45)]


@pytest.mark.parametrize("wrong", [{"replications": 0}, {"workers": 0}], ids=str)
def test_nothing_to_replicate_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSetting):
        replicate(
            "x",
            partial(p_is_a_power, 1.0),
            **{"replications": 1, "workers": 1, **wrong},
            seed=1,
            on_progress=say_nothing,
        )
