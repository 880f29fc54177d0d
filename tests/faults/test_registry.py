"""Faults by name, those of other packages included."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from equivtest.errors import InvalidSetting, UnknownName
from equivtest.faults import Fault, catalogue, get_fault, known_faults, load_faults, registry
from tests.decoder.scenarios import CONFIGS, requests_for, texts
from tests.faults.planted import executor

MODULE = """
from equivtest.faults import Fault

def gremlin():
    return Fault(name="gremlin", stage="accept", description="a gremlin", wrap=lambda stages: stages)

imp = Fault(name="imp", stage="commit", description="an imp", wrap=lambda stages: stages)
FAULTS = (gremlin, imp)
wrong = ("imp",)
copies = [imp, imp]

class Box:
    held = [imp]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable module `my_faults`; what is written to `entry_points.txt` is what its package declares."""
    (tmp_path / "my_faults.py").write_text(MODULE, "utf-8")
    (tmp_path / "broken_faults.py").write_text("1 / 0", "utf-8")
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield info / "entry_points.txt"
    for name in ("my_faults", "broken_faults"):
        sys.modules.pop(name, None)


def declare(entry_points: Path, value: str) -> None:
    entry_points.write_text(f"[equivtest.faults]\nmine = {value}\n", "utf-8")


def test_faults_are_known_by_name() -> None:
    names = known_faults()
    assert names == tuple(fault.name for fault in catalogue())
    assert {"inflated_acceptance", "reused_coin", "stale_q", "runs_past_end"} <= set(names)
    assert isinstance(get_fault("inflated_acceptance", epsilon=0.05), Fault)
    assert "0.05" in get_fault("inflated_acceptance", epsilon=0.05).description


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown fault 'gremlin'; known: .*inflated_acceptance.*stale_q"):
        get_fault("gremlin")


def test_a_parameter_that_a_fault_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"parameters of stale_q.*'epsilon'"):
        get_fault("stale_q", epsilon=0.1)


@pytest.mark.parametrize(
    ("value", "names"),
    [("my_faults", ["gremlin", "imp"]), ("my_faults:FAULTS", ["gremlin", "imp"]), ("my_faults:imp", ["imp"]),
     ("my_faults:gremlin", ["gremlin"]), ("my_faults:Box.held", ["imp"])],
)  # fmt: skip
def test_a_package_brings_faults_through_an_entry_point(package: Path, value: str, names: list[str]) -> None:
    before = known_faults()
    declare(package, value)
    assert known_faults() == (*before, *names)
    assert get_fault(names[0]).name == names[0]
    assert [fault.name for fault in load_faults(value)] == names
    with pytest.raises(UnknownName, match=names[0]):
        get_fault("nobody")
    with pytest.raises(InvalidSetting, match="parameters of"):
        get_fault(names[0], epsilon=0.1)


def test_extra_faults_come_last(package: Path) -> None:
    declare(package, "my_faults:gremlin")
    assert [fault.name for fault in catalogue(extra=load_faults("my_faults:imp"))][-2:] == ["gremlin", "imp"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("broken_faults", "ZeroDivisionError"),
        ("no_such_module", "ModuleNotFoundError"),
        ("my_faults:nothing", "AttributeError"),
        ("my_faults:wrong", "TypeError"),
        ("my_faults:Box", "must be faults or functions that return one"),
        ("os", "AttributeError.*FAULTS"),
    ],
)
def test_an_entry_point_that_brings_no_faults_is_named(package: Path, value: str, problem: str) -> None:
    """Names of this package are found nevertheless: they are not looked up in foreign code."""
    declare(package, value)
    with pytest.raises(InvalidSetting, match=f"faults from = 'mine'.*{problem}"):
        catalogue()
    with pytest.raises(InvalidSetting, match="mine"):
        get_fault("nobody")
    assert get_fault("reused_coin").name == "reused_coin"
    with pytest.raises(InvalidSetting, match=f"faults from = '{value}'"):
        load_faults(value)


def test_two_faults_of_one_name_are_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="'imp': is the name of two faults"):
        catalogue(extra=load_faults("my_faults:copies"))
    declare(package, "my_faults:imp")
    with pytest.raises(InvalidSetting, match="'imp'"):
        catalogue(extra=load_faults("my_faults:imp"))
    package.unlink()
    stolen = dataclasses.replace(get_fault("stale_q"), description="another one")
    with pytest.raises(InvalidSetting, match="'stale_q'"):
        catalogue(extra=[stolen])
    monkeypatch.setattr(registry, "_MODULES", (*registry._MODULES, registry.streams))
    with pytest.raises(InvalidSetting, match="'reused_coin'"):
        catalogue()


def test_a_foreign_fault_is_planted_like_any_other(package: Path) -> None:
    declare(package, "my_faults")
    requests = requests_for([(1, 2, 3)], CONFIGS["topp95"], max_tokens=4)
    planted = executor("early_exit").generate(requests, speculative=True, fault=get_fault("gremlin"))
    assert texts(planted) == texts(executor("early_exit").generate(requests, speculative=True))
