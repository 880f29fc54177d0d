"""How much to run: a budget fixes prompts, positions, seeds and the planted fault that it must be able to see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equivtest.errors import UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Size of a run."""

    name: str
    num_prompts: int
    """The first so many prompts of the set."""
    num_positions: int
    """Generated tokens per sample."""
    num_seeds: int
    """Samples per arm, config and prompt."""
    epsilon: float
    """Default acceptance bias of the biased arm. A budget plants a fault of the size that it claims to find: a smoke
    run sees gross faults only, and its teeth say so."""
    bias_margin: float = 0.01
    """How far the acceptance bias's interval may reach for a run to be called equivalent: what its seeds can settle."""
    pit_margin: float = 0.02
    """The same for the distance of the transforms' distribution from the uniform one."""
    caveat: str = ""
    """What a run of this budget cannot show; printed with its verdict."""


BUDGETS: Mapping[str, Budget] = {
    budget.name: budget
    for budget in (
        Budget(
            name="smoke",
            num_prompts=2,
            num_positions=16,
            num_seeds=64,
            epsilon=0.5,
            bias_margin=0.1,
            pit_margin=0.1,
            caveat="a smoke run sees gross faults only and gates nothing: use --budget gate before a merge",
        ),
        Budget(name="gate", num_prompts=8, num_positions=32, num_seeds=256, epsilon=0.1),
        Budget(name="audit", num_prompts=8, num_positions=32, num_seeds=1024, epsilon=0.1),
    )
}


def is_smaller(name: str, than: str) -> bool:
    """Whether a budget shows less than another; one that is none of BUDGETS, which go up in size, shows least."""
    sizes = list(BUDGETS)
    return name not in sizes or sizes.index(name) < sizes.index(than)


def get_budget(name: str) -> Budget:
    """The budget of that name. Raises UnknownName."""
    if name not in BUDGETS:
        raise UnknownName("budget", name, BUDGETS)
    return BUDGETS[name]
