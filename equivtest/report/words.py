"""Numbers and verdicts as text: every renderer uses these, so a number reads the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from equivtest.records import Word

MARKS: Mapping[Word, str] = {Word.EQUIVALENT: "✓", Word.DIFFERENT: "✗", Word.INCONCLUSIVE: "?", Word.INVALID: "!"}
"""A sign beside each verdict's word; never instead of it."""

NO_MERGE_MARK = "○"
"""In place of the sign of a pass that carries no merge."""

REJECTED_MARK = "▲"
"""Marks a rejected cell, beside its colour."""

_SMALLEST_P = 1e-300
"""A smaller p-value is written as below this: near the end of the floats it has no digits left, and 0 is none."""

NOTHING = "-"
"""Shown where a test does not define a value."""


def control_text(passed: bool | None) -> str:
    """What became of a control, with a sign beside the word."""
    return {True: "✓ passed", False: "✗ failed", None: "? not decided"}[passed]


def p_text(p_value: float | None) -> str:
    """A p-value or q-value for reading: `0.0312`, `2.1e-07`, `1`, `< 1e-300`; `-` for none."""
    if p_value is None or pd.isna(p_value):
        return NOTHING
    if p_value >= 0.001:
        return f"{p_value:.3g}"
    return f"{p_value:.1e}" if p_value >= _SMALLEST_P else f"< {_SMALLEST_P:.0e}"


def p_short(p_value: float) -> str:
    """A p-value in a few characters, for a small table cell: `.35`, `.004`, `2e-7`, `1`, `e-12`, `<e-300`."""
    if p_value >= 0.995:
        return "1"
    if p_value >= 0.095:
        return f"{p_value:.2f}"[1:]
    if p_value >= 0.00095:
        return f"{p_value:.3f}"[1:]
    if p_value < _SMALLEST_P:
        return f"<{_SMALLEST_P:.0e}".replace("1e", "e")
    mantissa, _, exponent = f"{p_value:.0e}".partition("e-")
    return f"{mantissa}e-{int(exponent)}" if int(exponent) < 10 else f"e-{int(exponent)}"


def excess_short(excess: float) -> str:
    """An excess of TV in at most four characters, for a small table cell: `.12`, `-.03`, `0`."""
    text = f"{excess:.2f}".replace("0.", ".", 1)
    return "0" if text in (".00", "-.00") else text


def mark(word: Word, *, gates: bool) -> str:
    """The sign of a verdict. `gates`: whether a run of this size may decide a merge."""
    return MARKS[word] if gates or word is not Word.EQUIVALENT else NO_MERGE_MARK


def verdict_text(word: Word, *, gates: bool) -> str:
    """The verdict, and that it carries no merge where it does not."""
    return str(word) if gates or word is not Word.EQUIVALENT else f"{word}, gates nothing"


def merge_text(word: Word, *, gates: bool) -> str:
    """Whether the change may merge. `gates`: whether a run of this size may say so."""
    if word is Word.EQUIVALENT:
        return "May merge." if gates else "No merge on this: a run of this size sees gross faults only."
    return {
        Word.DIFFERENT: "Do not merge.",
        Word.INCONCLUSIVE: "Do not merge yet: the question is open.",
        Word.INVALID: "Do not merge: this run proves nothing, neither way.",
    }[word]


def number_text(value: object) -> str:
    """A number with at most four significant digits, grouped when large; other things as they are; `-` for nothing."""
    if value is None or value is pd.NA or (isinstance(value, float) and pd.isna(value)):
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def interval_text(ends: tuple[object, object]) -> str:
    """An interval's two ends: `-0.002 to 0.006`; `-` when the test has none."""
    low, high = map(number_text, ends)
    return NOTHING if low == high == NOTHING else f"{low} to {high}"


def share_text(share: float | None) -> str:
    """A share as a percentage: `61.3 %`."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def tokens_text(count: int | None) -> str:
    """A number of tokens in at most four characters: `512`, `8k`, `66k`; nothing for none."""
    if count is None:
        return ""
    return str(count) if count < 1000 else f"{count / 1000:.0f}k"


def plural(count: int, noun: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def power_of_ten(exponent: int) -> str:
    """A tick of a logarithmic axis: `1`, `0.1`, `0.01`, `1e-3`."""
    return f"{10.0**exponent:g}" if exponent > -3 else f"1e{exponent}"
