"""From the marginal family's numbers to a finding, and the decision which of its flags stand on fresh seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting
from equivtest.records import Comparison
from equivtest.stats.marginal import MarginalResult, Statistic, marginal_family
from equivtest.verdict.facts import ROLES, Confirmation, Extreme, Finding, Flag, Place

Cell = tuple[str, str, int]
"""(config, prompt_id, position), in the order of the arrays that were tested."""

CONFIRMATION_ALPHA = 0.01
"""Family-wise level of stage 2."""


def flagged_cells(result: MarginalResult, cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The rejected cells, in their own order: what stage 2 tests."""
    _check_length(result, cells)
    return tuple(cells[index] for index in np.flatnonzero(result.rejected).tolist())


def flagged_strata(result: MarginalResult, cells: Sequence[Cell]) -> frozenset[tuple[str, str]]:
    """The (config, prompt_id) pairs with a rejected cell: what stage 2 collects fresh seeds for."""
    return frozenset((config, prompt_id) for config, prompt_id, _ in flagged_cells(result, cells))


def confirmation(
    first: Sequence[npt.NDArray[np.integer]],
    second: Sequence[npt.NDArray[np.integer]],
    cells: Sequence[Cell],
    *,
    alpha: float = CONFIRMATION_ALPHA,
    statistic: Statistic = "chi2",
    exact: bool = False,
    rng: np.random.Generator,
) -> Confirmation:
    """Test flagged cells again on fresh seeds only: the same test a cell, Bonferroni at alpha.

    first, second: token ids of the two arms' fresh samples, one integer array [n] for each of `cells`.
    Raises what `marginal_family` raises.
    """
    result = marginal_family(first, second, statistic=statistic, exact=exact, q=alpha, dependence="bonferroni", rng=rng)
    return Confirmation(
        alpha=alpha,
        num_samples=int(min(result.num_off.min(), result.num_on.min())),
        tested=tuple(Place(*cell) for cell in cells),
        confirmed=_flags(result, cells),
        smallest_p=float(result.q_value.min()),
    )


def marginal_finding(
    comparison: Comparison,
    result: MarginalResult,
    cells: Sequence[Cell],
    confirmation: Confirmation | None = None,
) -> Finding:
    """What the marginal family found on one comparison; `cells` names the result's cells in order."""
    flagged = _flags(result, cells)
    largest, excess = int(result.tv.argmax()), int(result.tv_excess.argmax())
    return Finding(
        family="marginal",
        role=ROLES[comparison],
        subject=comparison.words,
        unit="cells",
        num_tests=dict(Counter(config for config, _, _ in cells)),
        flagged=flagged,
        smallest_p=float(result.q_value.min()),
        level=result.q,
        method=result.method,
        extremes=tuple(
            Extreme(
                name=name,
                value=float(result.tv[index]),
                by_chance=float(result.tv_null_mean[index]),
                place=Place(*cells[index]),
            )
            for name, index in (
                ("largest total variation distance", largest),
                ("largest excess over its null mean", excess),
            )
        ),
        confirmation=confirmation,
    )


def _flags(result: MarginalResult, cells: Sequence[Cell]) -> tuple[Flag, ...]:
    _check_length(result, cells)
    flags = (
        Flag(
            place=Place(*cells[index]),
            p_value=float(result.q_value[index]),
            effect=float(result.tv[index]),
            effect_by_chance=float(result.tv_null_mean[index]),
            words=f"total variation distance {result.tv[index]:.2f} where {result.tv_null_mean[index]:.2f} is usual",
        )
        for index in np.flatnonzero(result.rejected).tolist()
    )
    # Adjusted p-values tie; the excess then says which cell to look at first.
    return tuple(sorted(flags, key=lambda flag: (flag.p_value, flag.effect_by_chance - flag.effect)))


def _check_length(result: MarginalResult, cells: Sequence[Cell]) -> None:
    if len(cells) != result.num_cells:
        raise InvalidSetting("cells", len(cells), f"must name each of the {result.num_cells} tested cells")
