"""From samples on disk to a verdict: reads parquet, calls the statistics, asks the verdict room; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from equivtest.errors import InvalidSetting, MissingSamples, StatisticsError
from equivtest.protocol.budgets import get_budget
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.plan import Protocol
from equivtest.records import Arm, Comparison, Evidence
from equivtest.rng import stream_key
from equivtest.samples.reader import acceptance_by_arm, acceptance_by_slot, read_arm_tokens, read_samples
from equivtest.stats.marginal import Dependence, MarginalResult, Statistic, choose_permutations, marginal_family
from equivtest.verdict.decide import decide
from equivtest.verdict.facts import ConfigFacts, Confirmation, RunFacts
from equivtest.verdict.findings import Cell, confirmation, flagged_cells, flagged_strata, marginal_finding
from equivtest.verdict.verdict import Verdict

LEVEL = 0.05
"""False discovery rate of the protocol of record."""

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisOptions:
    """How samples are judged. Part of the manifest, so that a report can be recomputed as it was asked for."""

    statistic: Statistic = "chi2"
    exact: bool = False
    dependence: Dependence = "bh"
    num_permutations: int | None = None
    confirm: bool = True

    def __post_init__(self) -> None:
        if self.num_permutations is not None and not self.by_permutation:
            raise InvalidSetting("num_permutations", self.num_permutations, "goes with --exact or --statistic max_z")

    @property
    def by_permutation(self) -> bool:
        """Whether p-values come from label permutations."""
        return self.exact or self.statistic == "max_z"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """Everything the statistics and the verdict said about one run."""

    verdict: Verdict
    configs: tuple[ConfigFacts, ...]
    cells: pd.DataFrame
    """One row per comparison and cell, columns of report.data.CELL_COLUMNS."""
    evidence: tuple[Evidence, ...]
    acceptance: pd.DataFrame
    """Per arm, config and slot: drafts offered, reached and accepted."""
    speed: pd.DataFrame
    """Per arm and config: acceptance_rate and mean_accepted, empty where nothing speculated."""
    unconfirmed: Mapping[tuple[Arm, Arm], frozenset[tuple[str, str]]]
    """Arms and (config, prompt_id) strata whose flags still lack fresh seeds."""


def analyse(run_dir: Path, protocol: Protocol, options: AnalysisOptions) -> Analysis:
    """Judge the samples of a run folder. Missing rows make the verdict invalid; damaged files raise InvalidShard."""
    samples = read_samples(run_dir, ("arm", "config", "seed", "position", "origin", "slot", "num_draft", "route"))
    samples = samples.filter(pa.compute.less(samples["seed"], protocol.num_seeds))
    by_slot = acceptance_by_slot(samples).to_pandas()
    configs = tuple(_config_facts(protocol, config, samples, by_slot) for config in protocol.configs)
    findings, frames, evidence, refusals = [], [], [], []
    unconfirmed: dict[tuple[Arm, Arm], frozenset[tuple[str, str]]] = {}
    for comparison in Comparison:
        try:
            cells, first, second = _read_cells(run_dir, protocol, comparison)
        except MissingSamples:
            continue  # the verdict room counts the rows and says which are missing
        try:
            result = judge_cells(comparison, first, second, options, protocol.run_seed)
        except StatisticsError as refused:
            refusals.append(f"{comparison.words}: {refused}")
            continue
        confirmed, strata = None, flagged_strata(result, cells)
        if strata and options.confirm and comparison is not Comparison.OFF_BIASED:
            confirmed = _confirm(run_dir, protocol, comparison, flagged_cells(result, cells), options)
            if confirmed is None:
                unconfirmed[comparison.arms] = strata
        findings.append(marginal_finding(comparison, result, cells, confirmed))
        frames.append(cells_frame(comparison, cells, result))
        evidence.append(result.evidence(comparison.words))
    return Analysis(
        verdict=decide(run_facts(protocol, configs, options, refusals), findings),
        configs=configs,
        cells=pd.concat(frames, ignore_index=True) if frames else cells_frame(Comparison.OFF_ON, [], None),
        evidence=tuple(evidence),
        acceptance=by_slot,
        speed=acceptance_by_arm(samples).to_pandas(),
        unconfirmed=unconfirmed,
    )


def check_resolution(options: AnalysisOptions, protocol: Protocol) -> None:
    """Raise ResolutionTooCoarse now for what the analysis would refuse after everything was collected."""
    if options.by_permutation:
        num_cells = len(protocol.configs) * len(protocol.prompts) * protocol.num_positions
        choose_permutations(options.num_permutations, num_cells, LEVEL, options.dependence)


def judge_cells(
    comparison: Comparison,
    first: Sequence[npt.NDArray[np.integer]],
    second: Sequence[npt.NDArray[np.integer]],
    options: AnalysisOptions,
    run_seed: int,
) -> MarginalResult:
    """The marginal family on one comparison, its permutations seeded by the run and the comparison."""
    return marginal_family(
        first,
        second,
        statistic=options.statistic,
        exact=options.exact,
        q=LEVEL,
        dependence=options.dependence,
        num_permutations=options.num_permutations,
        rng=_generator(run_seed, "marginal", comparison),
    )


def run_facts(
    protocol: Protocol, configs: tuple[ConfigFacts, ...], options: AnalysisOptions, refusals: Sequence[str]
) -> RunFacts:
    return RunFacts(
        configs=configs,
        planted_fault=f"acceptance bias of {protocol.epsilon:.2f}",
        confirm=options.confirm,
        caveats=tuple(filter(None, (get_budget(protocol.budget).caveat,))),
        refusals=tuple(refusals),
    )


def cells_frame(comparison: Comparison, cells: Sequence[Cell], result: MarginalResult | None) -> pd.DataFrame:
    """One row per cell, in their order."""
    columns: dict[str, object] = {
        "comparison": [str(comparison)] * len(cells),
        "config": [config for config, _, _ in cells],
        "prompt_id": [prompt_id for _, prompt_id, _ in cells],
        "position": [position for _, _, position in cells],
    }
    for column, field in (
        ("num_a", "num_off"), ("num_b", "num_on"), ("num_bins", "num_bins"), ("statistic", "statistic"), ("df", "df"),
        ("p_value", "p_value"), ("q_value", "q_value"), ("rejected", "rejected"), ("tv", "tv"),
        ("tv_null_mean", "tv_null_mean"), ("tv_null_q975", "tv_null_q975"), ("tv_excess", "tv_excess"),
    ):  # fmt: skip
        columns[column] = getattr(result, field) if result is not None else []
    return pd.DataFrame(columns)


def _config_facts(protocol: Protocol, config: str, samples: pa.Table, by_slot: pd.DataFrame) -> ConfigFacts:
    own = samples.filter(pa.compute.equal(samples["config"], config))
    found = own.group_by("arm").aggregate([("seed", "count")]).to_pandas().set_index("arm")["seed_count"]
    first_tokens = own.filter(
        pa.compute.and_(pa.compute.equal(own["position"], 0), pa.compute.equal(own["arm"], str(Arm.ON)))
    )
    routes = first_tokens["route"].cast(pa.string()).to_pandas().value_counts()
    plain = {str(route): int(count) for route, count in routes.items() if str(route).startswith("plain")}
    drafts = by_slot[(by_slot["arm"] == Arm.ON) & (by_slot["config"] == config)]
    rows = len(protocol.prompts) * protocol.num_seeds * protocol.num_positions
    return ConfigFacts(
        config=config,
        rows_expected={arm: rows for arm in Arm},
        rows_found={arm: int(found.get(str(arm), 0)) for arm in Arm},
        greedy=CONFIGS[config].greedy,
        num_samples=len(first_tokens),
        num_spec_samples=len(first_tokens) - sum(plain.values()),
        num_drafted=int(drafts["reached"].sum()),
        num_accepted=int(drafts["accepted"].sum()),
        plain_reasons={route.removeprefix("plain: "): count for route, count in plain.items()},
    )


def _read_cells(
    run_dir: Path, protocol: Protocol, comparison: Comparison
) -> tuple[list[Cell], list[Tokens], list[Tokens]]:
    """The cells of stage 1 with their tokens in both arms."""
    seeds = range(protocol.num_seeds)
    cells: list[Cell] = []
    columns: tuple[list[Tokens], list[Tokens]] = ([], [])
    for config in protocol.configs:
        for prompt in protocol.prompts:
            cells += [(config, prompt.id, position) for position in range(protocol.num_positions)]
            for arm, column in zip(comparison.arms, columns, strict=True):
                column += _tokens(run_dir, protocol, arm, config, prompt.id, seeds)
    return cells, *columns


def _confirm(
    run_dir: Path, protocol: Protocol, comparison: Comparison, cells: Sequence[Cell], options: AnalysisOptions
) -> Confirmation | None:
    """Stage 2 on the flagged cells, or None while its fresh seeds are not all there."""
    seeds = range(*protocol.confirmation_seeds)
    columns: tuple[list[Tokens], list[Tokens]] = ([], [])
    try:
        for arm, column in zip(comparison.arms, columns, strict=True):
            by_prompt = {
                (config, prompt_id): list(_tokens(run_dir, protocol, arm, config, prompt_id, seeds))
                for config, prompt_id in dict.fromkeys((config, prompt_id) for config, prompt_id, _ in cells)
            }
            column += [by_prompt[config, prompt_id][position] for config, prompt_id, position in cells]
    except MissingSamples:
        return None
    return confirmation(
        *columns,
        cells,
        statistic=options.statistic,
        exact=options.exact,
        rng=_generator(protocol.run_seed, "confirmation", comparison),
    )


def _tokens(run_dir: Path, protocol: Protocol, arm: Arm, config: str, prompt_id: str, seeds: range) -> Iterator[Tokens]:
    """One array [num_seeds] per position."""
    tokens = read_arm_tokens(
        run_dir, arm=arm, config=config, prompt_id=prompt_id, seeds=seeds, num_positions=protocol.num_positions
    )
    return iter(np.ascontiguousarray(tokens.T))


def _generator(*name: object) -> np.random.Generator:
    return np.random.default_rng(stream_key(*name) % 2**63)
