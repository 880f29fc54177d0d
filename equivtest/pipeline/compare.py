"""Two files of samples from anywhere, judged without a law; the controls are made from the recordings themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from equivtest.errors import InsufficientSamples, InvalidSetting, MissingSamples, UsageError
from equivtest.pipeline.analysis_options import AnalysisOptions
from equivtest.pipeline.families import generator, joint_results, judge_cells
from equivtest.pipeline.frames import cells_frame
from equivtest.pipeline.manifest import FILE_NAME
from equivtest.protocol.plan import likeliest_token_words
from equivtest.records import Arm, Comparison
from equivtest.samples.planted import plant_likeliest
from equivtest.samples.recorded import CellFamily, RecordedSamples, read_recorded
from equivtest.verdict.decide import decide
from equivtest.verdict.facts import ConfigFacts, Finding, RunFacts
from equivtest.verdict.findings import Cell, marginal_finding
from equivtest.verdict.joint_findings import joint_finding
from equivtest.verdict.verdict import Verdict

Tokens = npt.NDArray[np.int32]
Grids = Mapping[CellFamily, Tokens]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparisonResult:
    """The verdict on two recordings and the cells behind it."""

    verdict: Verdict
    cells: pd.DataFrame


def compare(on: Path, off: Path, options: AnalysisOptions, *, epsilon: float, run_seed: int = 0) -> ComparisonResult:
    """Judge recordings of two arms; there are no fresh seeds, so a flag counts at once.

    The controls come from the recordings: A/A compares the first half of `on`'s seeds with the second; the planted
    fault is `plant_likeliest` of size `epsilon`.
    Raises UsageError when the files hold no common prompts or different ones, and what `read_recorded` raises.
    """
    if not 0 < epsilon <= 1:
        raise InvalidSetting("epsilon", epsilon, "must be above 0 and at most 1")
    for path in (on, off):
        if (path / FILE_NAME).is_file():
            message = f"{path} is a run folder; give one arm of it, such as {path / 'samples' / 'arm=on'}"
            raise UsageError(message)
    off_samples, on_samples = read_recorded(off), read_recorded(on)
    off_tokens, on_tokens = off_samples.tokens, on_samples.tokens
    if off_tokens.keys() == on_tokens.keys() and all(
        np.array_equal(off_tokens[family], on_tokens[family]) for family in off_tokens
    ):
        message = f"{on} and {off} hold the very same samples; record the two arms with seeds of their own"
        raise UsageError(message)
    if off_tokens.keys() != on_tokens.keys():
        only = sorted(" / ".join(family) for family in off_tokens.keys() ^ on_tokens.keys())
        message = f"{on} and {off} hold different prompts or configs; in one only: {', '.join(only[:5])}"
        raise UsageError(message)
    for path, tokens, fewest in ((off, off_tokens, 2), (on, on_tokens, 4)):  # A/A needs two seeds in each half of on
        family, grid = min(tokens.items(), key=lambda item: len(item[1]))
        if len(grid) < fewest:
            raise InsufficientSamples(f"{' / '.join(family)} of {path}", len(grid), fewest)
    off_tokens, on_tokens = _filled_up(off_samples, on_tokens), _filled_up(on_samples, off_tokens)
    cells = _cells(on, off, off_tokens, on_tokens)
    rng = generator(run_seed, "compare")
    pairs: dict[Comparison, tuple[Grids, Grids]] = {
        Comparison.OFF_ON: (off_tokens, on_tokens),
        Comparison.ON_ON_NULL: (
            {family: grid[: len(grid) // 2] for family, grid in on_tokens.items()},
            {family: grid[len(grid) // 2 :] for family, grid in on_tokens.items()},
        ),
        Comparison.OFF_BIASED: (
            off_tokens,
            {family: plant_likeliest(grid, epsilon, rng) for family, grid in on_tokens.items()},
        ),
    }
    findings: list[Finding] = []
    frames: list[pd.DataFrame] = []
    for comparison, (first, second) in pairs.items():
        result = judge_cells(comparison, _columns(first), _columns(second), options, run_seed)
        findings.append(marginal_finding(comparison, result, cells))
        joint = joint_results(first, second, partial(generator, run_seed, "joint", comparison))
        findings.append(joint_finding(comparison, joint))
        frames.append(cells_frame(comparison, cells, result))
    facts = RunFacts(
        configs=tuple(_facts(config, off_tokens, on_tokens) for config in dict.fromkeys(f.config for f in on_tokens)),
        planted_fault=likeliest_token_words(epsilon),
        confirm=False,
        from_files=True,
    )
    return ComparisonResult(verdict=decide(facts, findings), cells=pd.concat(frames, ignore_index=True))


def _facts(config: str, off_tokens: Grids, on_tokens: Grids) -> ConfigFacts:
    def num_rows(tokens: Grids) -> int:
        return sum(grid.size for family, grid in tokens.items() if family.config == config)

    rows = {Arm.OFF: num_rows(off_tokens), Arm.ON: num_rows(on_tokens)}
    num_samples = sum(len(grid) for family, grid in on_tokens.items() if family.config == config)
    return ConfigFacts(
        config=config, rows_expected=rows, rows_found=rows, recorded=True, num_samples=num_samples,
        num_spec_samples=num_samples, num_drafted=0, num_accepted=0, plain_reasons={},
    )  # fmt: skip


def _cells(on: Path, off: Path, off_tokens: Grids, on_tokens: Grids) -> list[Cell]:
    cells: list[Cell] = []
    for family, tokens in off_tokens.items():
        if tokens.shape[1] != on_tokens[family].shape[1]:
            lengths = f"{tokens.shape[1]} positions in {off} and {on_tokens[family].shape[1]} in {on}"
            missing = f"{' / '.join(family)} has {lengths}"
            raise MissingSamples(missing, "record the same number of tokens in both")
        cells += [(family.config, family.prompt_id, position) for position in range(tokens.shape[1])]
    return cells


def _filled_up(samples: RecordedSamples, other: Grids) -> Grids:
    """With as many positions as the other arm has, in families whose texts end early: the last token is repeated."""
    tokens: dict[CellFamily, Tokens] = {}
    for family, grid in samples.tokens.items():
        missing = other[family].shape[1] - grid.shape[1] if family in samples.ended_early else 0
        tokens[family] = np.pad(grid, ((0, 0), (0, max(missing, 0))), mode="edge")
    return tokens


def _columns(tokens: Grids) -> list[Tokens]:
    """One array [num_seeds] per cell, in the order of `_cells`."""
    return [column for grid in tokens.values() for column in np.ascontiguousarray(grid.T)]
