"""Writes what was found: verdict.json, the tables, the page, the summary and the JUnit file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pandas as pd

from equivtest.files import write_whole
from equivtest.pipeline.analyse import Analysis
from equivtest.pipeline.manifest import VERDICT_FILE, Manifest
from equivtest.pipeline.next_command import next_command
from equivtest.pipeline.shown_tokens import shown_tokens
from equivtest.protocol.budgets import BUDGETS
from equivtest.protocol.configs import CONFIGS, describe_params
from equivtest.protocol.plan import Protocol
from equivtest.records import Arm, Evidence
from equivtest.report.data import EVIDENCE_COLUMNS, ArmSpeed, ConfigFacts, ControlResult, ReportData
from equivtest.report.html import write_html
from equivtest.report.junit import write_junit
from equivtest.report.summary import write_summary
from equivtest.report.tables import write_cells, write_columns, write_controls, write_evidence
from equivtest.report.tokens import ShownTokens
from equivtest.samples.export import samples_with_law
from equivtest.samples.shards import write_table
from equivtest.verdict.verdict import Verdict


def publish(run_dir: Path, protocol: Protocol, analysis: Analysis) -> ReportData:
    """Write every file of the report into the run folder, beside its manifest, and return what they show."""
    data = report_data(Manifest.read(run_dir), protocol, analysis, shown_tokens(run_dir, protocol))
    write_cells(data, run_dir / "cells.parquet")
    write_evidence(data, run_dir / "evidence.parquet")
    write_whole(run_dir / VERDICT_FILE, json.dumps(analysis.verdict.to_dict(), indent=2) + "\n")
    write_html(data, run_dir / "report.html")
    write_summary(data, run_dir / "summary.md")
    write_junit(data, run_dir / "junit.xml")
    return data


def publish_tables(run_dir: Path, data: ReportData) -> Path:
    """Write cells, evidence, controls and samples into one folder for analysts, with columns.md; returns the folder."""
    folder = run_dir / "parquet"
    write_cells(data, folder / "cells.parquet")
    write_evidence(data, folder / "evidence.parquet")
    write_controls(data, folder / "controls.parquet")
    write_table(folder / "samples.parquet", samples_with_law(run_dir))
    write_columns(folder)
    return folder


def report_data(manifest: Manifest, protocol: Protocol, analysis: Analysis, shown: ShownTokens) -> ReportData:
    """The view of a run that every renderer shows."""
    verdict = analysis.verdict
    return ReportData(
        run_id=manifest.run_id,
        title=f"{', '.join(protocol.configs)}: {manifest.subject['model']}, {manifest.subject['drafter']} drafter",
        word=verdict.word,
        headline=verdict.headline,
        reasons=verdict.reasons,
        next_steps=(*verdict.next_steps, *_next_commands(manifest, protocol, verdict)),
        gate_of_record=verdict.gate_of_record.line,
        exit_code=verdict.exit_code,
        controls=_controls(verdict),
        configs=tuple(_config(protocol, analysis, facts.config) for facts in analysis.configs),
        cells=analysis.cells,
        evidence=evidence_frame(analysis.evidence),
        acceptance=analysis.acceptance,
        diagnosis=verdict.diagnosis,
        stages=analysis.stages,
        gates=not (protocol.budget in BUDGETS and BUDGETS[protocol.budget].caveat),
        speed=tuple(
            ArmSpeed(arm=arm, num_tokens=manifest.arm_tokens[arm], seconds=seconds)
            for arm, seconds in manifest.arm_seconds.items()
            if seconds > 0 and manifest.arm_tokens.get(arm)
        ),
        expected=analysis.expected,
        shown=shown,
        pit=analysis.pit,
        quantiles=analysis.quantiles,
        power=analysis.power,
        manifest={**dataclasses.asdict(manifest), **_scoring_cost(manifest)},
    )


def _scoring_cost(manifest: Manifest) -> dict[str, str]:
    """What holding the tokens against the law took, beside what collecting the same samples took."""
    scored = [arm for arm in manifest.score_seconds if manifest.arm_seconds.get(arm)]
    if not scored:
        return {}
    spent, collecting = (
        sum(seconds[arm] for arm in scored) for seconds in (manifest.score_seconds, manifest.arm_seconds)
    )
    return {"scoring_cost": f"{spent:,.0f} s, {spent / collecting:.0%} of the time of collecting the same samples"}


def _next_commands(manifest: Manifest, protocol: Protocol, verdict: Verdict) -> tuple[str, ...]:
    command = next_command(manifest.command, verdict.word, budget=protocol.budget, subject=manifest.subject)
    return () if command is None else (command,)


def evidence_frame(evidence: tuple[Evidence, ...]) -> pd.DataFrame:
    return pd.DataFrame([dataclasses.asdict(line) for line in evidence], columns=list(EVIDENCE_COLUMNS))


def _controls(verdict: Verdict) -> tuple[ControlResult, ...]:
    expected = {"A/A": "agrees", "planted fault": "differs", "reference law": "follows"}
    return tuple(
        ControlResult(
            name=control.name,
            comparison=control.subject,
            expected=expected[control.name],
            outcome=control.line,
            num_rejected=control.num_rejected,
            num_cells=control.num_tests,
            passed=control.passed,
        )
        for control in verdict.controls
    )


def _config(protocol: Protocol, analysis: Analysis, config: str) -> ConfigFacts:
    facts = next(facts for facts in analysis.configs if facts.config == config)
    rows = analysis.speed[(analysis.speed["arm"] == Arm.ON) & (analysis.speed["config"] == config)]
    speed = rows.iloc[0] if len(rows) else None
    routed = "spec"
    if facts.plain_reasons:
        whole = "plain" if not facts.num_spec_samples else "partly plain"
        routed = f"{whole}: {'; '.join(facts.plain_reasons)}"
    return ConfigFacts(
        name=config,
        params=describe_params(CONFIGS[config]),
        routed=routed,
        acceptance_rate=_number(speed, "acceptance_rate"),
        mean_accepted=_number(speed, "mean_accepted"),
        tokens_per_arm=len(protocol.prompts) * protocol.num_seeds * protocol.num_positions,
    )


def _number(row: pd.Series[float] | None, column: str) -> float | None:
    return None if row is None or pd.isna(row[column]) else float(row[column])
