"""What the coarse gate says: scores of a benchmark with speculation on and off, against a margin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting
from equivtest.records import EXIT_CODES, Word
from equivtest.stats.paired_scores import PairedDifference, SeedInterval, overlap, paired_difference, seed_interval
from equivtest.verdict.words import p_text


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseVerdict:
    """The answer, with both readings."""

    word: Word
    headline: str
    off: SeedInterval
    on: SeedInterval
    overlap: bool
    """The usual reading: the intervals of the two arms overlap. It decides nothing."""
    difference: PairedDifference
    """On minus off; decides."""
    margin: float

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]


def decide_coarse(off: npt.NDArray[np.float64], on: npt.NDArray[np.float64], margin: float) -> CoarseVerdict:
    """Different where the interval of the difference leaves out 0, equivalent where it lies within +-margin.

    off, on: scores [num_items, num_seeds]. A correct decoder is called different in 5 % of runs: nothing is confirmed
    on fresh seeds here. An interval that leaves out 0 within the margin is different all the same. Raises as
    `paired_difference` does, and InvalidSetting for a margin out of range.
    """
    if not 0 < margin < 1:
        raise InvalidSetting("margin", margin, "must be between 0 and 1")
    arms = seed_interval(off), seed_interval(on)
    difference = paired_difference(off, on)
    said = (
        f"on scores {difference.estimate:+.4f} against off, 95 % interval "
        f"{difference.ci_low:+.4f} to {difference.ci_high:+.4f}"
    )
    if difference.ci_low > 0 or difference.ci_high < 0:
        word, headline = Word.DIFFERENT, f"{said}, which leaves out 0 (p {p_text(difference.p_value)})"
    elif -margin < difference.ci_low and difference.ci_high < margin:
        word, headline = Word.EQUIVALENT, f"{said}, within the margin of {margin:g}"
    else:
        items = difference.items_for_margin(margin)
        word, headline = Word.INCONCLUSIVE, f"{said}, beyond the margin of {margin:g}; about {items:,} items settle it"
    return CoarseVerdict(
        word=word,
        headline=headline,
        off=arms[0],
        on=arms[1],
        overlap=overlap(*arms),
        difference=difference,
        margin=margin,
    )
