"""What a fault is: a wrapper around one stage of a correct decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from equivtest.decoder.stages import Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One deliberate error. Calling it gives the faulty stages; the decoder itself knows nothing of faults."""

    name: str
    stage: str
    """The stage it wraps: propose, forward, verify, accept or commit."""
    description: str
    """What is wrong, as a person would report it."""
    wrap: Callable[[Stages], Stages]

    def __call__(self, stages: Stages) -> Stages:
        return self.wrap(stages)
