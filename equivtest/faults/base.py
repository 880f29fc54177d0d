"""What a fault is: a wrapper around one stage of a correct decoder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from equivtest.decoder.stages import Stages
from equivtest.errors import InvalidSetting
from equivtest.records import Family as Family
from equivtest.records import Nature as Nature

STAGES = (*(field.name for field in dataclasses.fields(Stages)), "streams", "none")
"""What a fault may be in: a stage, the random streams, or nothing at all."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a fault needs to show itself."""

    config: str = "topp95"
    """Sampling configuration."""
    drafter: str = "early_exit"
    """early_exit and ngram propose sure drafts; sampled_exit and model sample them from a law q."""
    acceptance: str = "chain"
    draft_len: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One deliberate error. Calling it gives the faulty stages; the decoder itself knows nothing of faults."""

    name: str
    stage: str
    """Where the error is: propose, forward, process, verify, accept, report or commit; `streams` for the coins."""
    description: str
    """What is wrong, as a person would report it."""
    wrap: Callable[[Stages], Stages]
    nature: Nature = Nature.FAULT
    kind: str = ""
    """Group of the catalogue."""
    ids: tuple[int, ...] = ()
    """Numbers of the public faults that it stands for."""
    reports: tuple[str, ...] = ()
    """Where they were reported: "vllm#9834"."""
    setting: Setting = field(default_factory=Setting)
    expected: frozenset[Family] = frozenset()
    """What found it at the gate budget, when that was last measured on the small model."""
    subtle: bool = False
    """Too small for a smoke budget: only a matrix of the gate's size must find it."""
    source_sha256: str = ""
    """Of the module that it was loaded from; empty for this package's, whose own hash a run records."""
    changes_law: bool = True
    """Whether tokens come from another law; if not, only replay or reports are wrong."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):  # it names a folder
            raise InvalidSetting("fault name", self.name, "must be letters, digits, '_', '-' and '.', a letter first")
        if self.stage not in STAGES:
            raise InvalidSetting(f"stage of fault {self.name}", self.stage, f"must be one of {', '.join(STAGES)}")
        if not isinstance(self.nature, Nature):
            raise InvalidSetting(f"nature of fault {self.name}", self.nature, "must be a Nature")

    def __call__(self, stages: Stages) -> Stages:
        return self.wrap(stages)
