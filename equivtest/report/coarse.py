"""The coarse gate on one page: both readings of a benchmark's scores, and what they could have seen."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from equivtest.files import write_whole
from equivtest.records import EXIT_CODES, Arm, Word
from equivtest.report import words
from equivtest.report.summary import escape, table
from equivtest.report.terminal import plain_table, verdict_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmScores:
    """One arm of the benchmark."""

    arm: Arm
    mean: float
    ci_low: float
    ci_high: float
    """The 95 % interval that its seeds give."""
    scores: tuple[tuple[float, ...], ...]
    """[num_seeds][num_items]."""

    @property
    def by_seed(self) -> str:
        return ", ".join(f"{sum(own) / len(own):.3f}" for own in self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoarseResult:
    """What the coarse gate found."""

    word: Word
    headline: str
    task: str
    metric: str
    num_items: int
    temperature: float
    planted: str
    """The fault in arm on, in words; empty for none."""
    arms: tuple[ArmScores, ArmScores]
    overlap: bool
    """Whether the arms' intervals overlap: the usual reading."""
    estimate: float
    """On minus off, with its interval, paired by item and clustered by item: the reading that decides."""
    ci_low: float
    ci_high: float
    p_value: float
    margin: float
    visible: float
    """The difference that is seen with 90 % power."""
    provenance: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.word]

    @property
    def lines(self) -> tuple[str, ...]:
        """Both readings and what they could have seen."""
        return (
            *([f"planted in arm on: {self.planted}"] if self.planted else []),
            f"usual reading: the arms' 95 % intervals {'overlap' if self.overlap else 'DO NOT overlap'}",
            f"paired by item: on minus off {self.estimate:+.4f}, 95 % interval "
            f"{self.ci_low:+.4f} to {self.ci_high:+.4f}, p {words.p_text(self.p_value)}",
            f"a difference of {self.visible:.4f} would have been seen with 90 % power",
        )


def coarse_screen(result: CoarseResult) -> RenderableType:
    """For a terminal; the last line is the verdict."""
    scores = plain_table("arm", "score", "95 % over seeds", "seeds")
    for arm in result.arms:
        scores.add_row(str(arm.arm), f"{arm.mean:.4f}", f"{arm.ci_low:.4f} to {arm.ci_high:.4f}", arm.by_seed)
    title = f"{result.task}, {result.metric}: {words.plural(result.num_items, 'item')}, T {result.temperature:g}"
    lines = [Text(f"- {line}") for line in result.lines]
    return Group(Text(title, style="bold"), scores, Text(), *lines, Text(result.headline, style="bold"),
                 verdict_text(result.word))  # fmt: skip


def write_coarse(result: CoarseResult, folder: Path) -> None:
    """lm-eval.json, from which everything can be computed again, and lm-eval.md."""
    write_whole(folder / "lm-eval.json", json.dumps(as_json(result)) + "\n")
    write_whole(folder / "lm-eval.md", "\n".join(_page(result)))


def as_json(result: CoarseResult) -> dict[str, Any]:
    """The result for programs; scores are `[num_seeds][num_items]` by arm."""
    fields = ("headline", "task", "metric", "num_items", "temperature", "planted", "overlap", "estimate", "ci_low",
              "ci_high", "p_value", "margin", "visible")  # fmt: skip
    arms = {
        str(one.arm): {"mean": one.mean, "ci_low": one.ci_low, "ci_high": one.ci_high, "scores": one.scores}
        for one in result.arms
    }
    own = {name: getattr(result, name) for name in fields}
    head = {"verdict": str(result.word), "exit_code": result.exit_code}
    return {**head, **own, "arms": arms, "provenance": dict(result.provenance)}


def _page(result: CoarseResult) -> Iterator[str]:
    yield f"## {words.MARKS[result.word]} {result.word.upper()}: {escape(result.task)}, spec-off against spec-on"
    yield ""
    yield f"**{escape(result.headline)}**"
    yield ""
    yield from (f"- {escape(line)}" for line in result.lines)
    yield f"- {words.plural(result.num_items, 'item')}, {escape(result.metric)}, temperature {result.temperature:g}"
    yield ""
    yield from table(
        ("Arm", "Score", "95 % over seeds", "Seeds"),
        [(str(a.arm), f"{a.mean:.4f}", f"{a.ci_low:.4f} to {a.ci_high:.4f}", a.by_seed) for a in result.arms],
    )
    yield f"Command: `{result.provenance['command']}`"
    yield ""
