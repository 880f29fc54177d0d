"""Synthetic report data of the shape of a gate run, one for each verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from equivtest.records import EXIT_CODES, Word
from equivtest.report.data import (
    CELL_COLUMNS,
    EVIDENCE_COLUMNS,
    EXPECTED_COLUMNS,
    ArmSpeed,
    ConfigFacts,
    ControlResult,
    ReportData,
)
from tests.report.make_law import diagnosis, joint_evidence, law_evidence, pit_histograms, power_curves, quantiles
from tests.report.make_tokens import shown_tokens

PROMPTS = ("story", "chat", "code", "mathematics", "translation", "summary", "list", "facts")


def cells(
    seed: int = 0,
    *,
    configs: tuple[str, ...] = ("topp95",),
    num_prompts: int = 8,
    num_positions: int = 32,
    faulty: tuple[str, ...] = ("off_biased",),
) -> pd.DataFrame:
    """Uniform p-values, and tiny ones in some cells of the faulty comparisons."""
    rng = np.random.default_rng(seed)
    rows = []
    for comparison in ("off_on", "on_on_null", "off_biased"):
        for config in configs:
            for prompt_id in PROMPTS[:num_prompts]:
                for position in range(num_positions):
                    width = rng.uniform(0.02, 0.3)
                    p_value = rng.uniform(0.003, 1)
                    shift = 0.0
                    rejected = comparison in faulty and bool(rng.random() < 0.2)
                    if rejected:
                        p_value, shift = 10 ** -rng.uniform(4, 12), rng.uniform(0.08, 0.3)
                    tv = max(0.0, width * rng.normal(1, 0.15)) + shift
                    rows.append(
                        {
                            "comparison": comparison,
                            "config": config,
                            "prompt_id": prompt_id,
                            "position": position,
                            "num_a": 256,
                            "num_b": 256,
                            "num_bins": 7,
                            "statistic": float(rng.chisquare(6)) if not rejected else 60.0 + 100 * shift,
                            "df": 6.0,
                            "p_value": p_value,
                            "q_value": 0.001 if rejected else min(1.0, 0.3 + p_value),
                            "rejected": rejected,
                            "tv": tv,
                            "tv_null_mean": width,
                            "tv_null_q975": width * 1.3,
                            "tv_excess": tv - width,
                        }
                    )
    return pd.DataFrame(rows, columns=list(CELL_COLUMNS))


def evidence(configs: tuple[str, ...] = ("topp95",)) -> pd.DataFrame:
    rows = [
        {
            "family": "marginal",
            "name": "chi2_bh",
            "stratum": f"{comparison} / {config}",
            "statistic": 3.0,
            "df": None,
            "p_value": 0.42,
            "adjusted_p": 0.9,
            "estimate": 0.31,
            "ci_low": None,
            "ci_high": None,
            "margin": None,
            "num_tokens": 131_072,
            "method": "Pearson per cell, Benjamini-Hochberg at 0.05; estimate: largest TV",
        }
        for config in configs
        for comparison in ("off vs on", "on vs on_null", "off vs biased")
    ]
    return pd.DataFrame(rows, columns=list(EVIDENCE_COLUMNS))


def acceptance(configs: tuple[str, ...] = ("topp95",)) -> pd.DataFrame:
    rates = {"on": 0.62, "on_null": 0.62, "biased": 0.72}
    rows = []
    for config in configs:
        for arm, rate in rates.items():
            reached = 20_000
            for slot in range(4):
                accepted = int(reached * (rate - 0.03 * slot))
                rows.append({"arm": arm, "config": config, "slot": slot, "reached": reached, "accepted": accepted})
                reached = accepted
    return pd.DataFrame(rows)


def expected(configs: tuple[str, ...] = ("topp95",)) -> pd.DataFrame:
    """What the law gives: the share of arm on, from which arm biased is 0.1 away."""
    rows = [
        (arm, config, slot, share, share - 0.005, share + 0.005)
        for config in configs
        for arm in ("on", "on_null", "biased")
        for slot in range(4)
        for share in (0.62 - 0.03 * slot,)
    ]
    return pd.DataFrame(rows, columns=list(EXPECTED_COLUMNS))


def controls(*, caught: bool = True) -> tuple[ControlResult, ...]:
    return (
        ControlResult(
            name="A/A",
            comparison="on vs on_null",
            expected="no rejection",
            outcome="0 of 256 cells rejected",
            num_rejected=0,
            num_cells=256,
            passed=True,
        ),
        ControlResult(
            name="planted fault, epsilon 0.1",
            comparison="off vs biased",
            expected="at least one rejection",
            outcome="51 of 256 cells rejected" if caught else "0 of 256 cells rejected",
            num_rejected=51 if caught else 0,
            num_cells=256,
            passed=caught,
        ),
    )


_WORDS: dict[Word, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    Word.EQUIVALENT: (
        "Spec-on samples as spec-off does: 0 of 256 cells rejected, and the planted fault of 0.1 was found.",
        ("off vs on: no cell rejected at q = 0.05", "controls behaved"),
        ("Nothing. Commit results/ref-1 to keep the evidence.",),
    ),
    Word.DIFFERENT: (
        "Spec-on does not sample as spec-off does: 49 of 256 cells rejected and confirmed on fresh seeds.",
        ("off vs on: 49 of 256 cells rejected at q = 0.05", "confirmed in 3 of 8 prompts with 1,024 fresh seeds"),
        ("Look at the acceptance rule first: biased acceptance moves cells towards the draft.", "equivtest controls"),
    ),
    Word.INCONCLUSIVE: (
        "No difference found, but the run is too small to exclude one of 0.1.",
        ("off vs on: no cell rejected", "64 seeds; the margin needs about 210"),
        ("equivtest run --config topp95 --budget gate",),
    ),
    Word.INVALID: (
        "This run says nothing: the planted fault was missed.",
        ("off vs biased: 0 of 256 cells rejected, at least one was expected",),
        ("equivtest power --epsilon 0.1",),
    ),
}


def report_data(
    word: Word = Word.EQUIVALENT,
    *,
    configs: tuple[str, ...] = ("topp95",),
    num_prompts: int = 8,
    num_positions: int = 32,
) -> ReportData:
    """A run with that verdict."""
    headline, reasons, next_steps = _WORDS[word]
    faulty = {Word.DIFFERENT: ("off_on", "off_biased"), Word.INVALID: ()}.get(word, ("off_biased",))
    bias = 0.021 if word is Word.DIFFERENT else 0.0
    table = cells(configs=configs, num_prompts=num_prompts, num_positions=num_positions, faulty=faulty)
    count = int(table.loc[table["comparison"] == "off_on", "rejected"].sum())
    return ReportData(
        run_id="2026-12-01-topp95",
        title="SmolLM2-135M-Instruct, early_exit drafter, chain acceptance",
        word=word,
        headline=headline,
        reasons=reasons,
        next_steps=next_steps,
        gate_of_record=f"{count} Benjamini-Hochberg rejections at q = 0.05: {'failed' if count else 'passed'}.",
        exit_code=EXIT_CODES[word],
        controls=controls(caught=word is not Word.INVALID),
        configs=tuple(
            ConfigFacts(
                name=name,
                params="temperature 0.8, top_p 0.95",
                routed="spec",
                acceptance_rate=0.613,
                mean_accepted=1.84,
                tokens_per_arm=65_536,
            )
            for name in configs
        ),
        cells=table,
        evidence=_all_evidence(configs, bias),
        acceptance=acceptance(configs),
        diagnosis=diagnosis(word),
        stages=("accept", "streams")[: len(diagnosis(word))],
        speed=tuple(ArmSpeed(arm=arm, num_tokens=65_536, seconds=s) for arm, s in (("off", 64.0), ("on", 32.0))),
        expected=expected(configs),
        shown=shown_tokens(configs, PROMPTS[:num_prompts], num_positions),
        pit=pit_histograms(configs),
        quantiles=quantiles(table),
        power=power_curves(configs),
        manifest={
            "fingerprint": "3f1c9a77",
            "command": "equivtest run --config topp95 --budget gate",
            "code": {"version": "0.1.0", "git_commit": "ea76f43", "git_dirty": False},
            "machine": {"cpu": "Example CPU", "cores": 2},
            "subject": {"kernels": "cpp", "drafter": "early_exit", "acceptance": "chain"},
            "seeds": [0, 256],
            "arm_seconds": {"off": 61.2, "on": 48.7},
        },
    )


def with_prompt_id(data: ReportData, old: str, new: str) -> ReportData:
    return replace(data, cells=data.cells.assign(prompt_id=data.cells["prompt_id"].replace(old, new)))


def _all_evidence(configs: tuple[str, ...], bias: float) -> pd.DataFrame:
    tables = (evidence(configs), law_evidence(configs, bias=bias), joint_evidence(configs, bias=bias))
    rows = [row for table in tables for row in table.to_dict("records")]
    return pd.DataFrame(rows, columns=list(EVIDENCE_COLUMNS))


def without_law(data: ReportData) -> ReportData:
    """The same run by an engine whose law cannot be reached, with the marginal family only."""
    return replace(
        data,
        evidence=data.evidence.loc[data.evidence["family"] == "marginal"],
        diagnosis=(),
        stages=(),
        expected=data.expected.iloc[:0],
        pit=data.pit.iloc[:0],
        quantiles=data.quantiles.iloc[:0],
        power=data.power.iloc[:0],
    )
