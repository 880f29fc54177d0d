"""`equivtest run`: collect the arms, analyse, report, print the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from equivtest.cli.options import (
    ANALYSIS_FIELDS,
    analysis_options,
    engine_options,
    pick,
    pick_engine,
    results_dir_option,
    server_options,
)

_EPILOG = """\b
Examples:
  equivtest run --config topp95 --budget smoke          about a minute, sees gross faults
  equivtest run --config topp95                         the protocol of record
  equivtest run --config all --drafter ngram            three sampled configs in one run
  equivtest run --model path/to/model.gguf --acceptance match
  equivtest run --sequential                            stop as soon as the answer is known
  equivtest run --resume                                continue the newest unfinished run
\b
Budgets, with their time for one config on two processor cores and the default model:
  smoke   2 prompts x 16 positions x 64 seeds x 4 arms      about a minute; gates nothing
  gate    8 prompts x 32 positions x 256 seeds x 4 arms     about 25 minutes; the protocol of record
  audit   8 prompts x 32 positions x 1,024 seeds x 4 arms   about 90 minutes
\b
Exit codes:
  0 equivalent   1 different   2 usage error   3 inconclusive   4 invalid run
The folder of the run holds report.html, summary.md, junit.xml, verdict.json and the samples.
\b
Other engines, whose teeth are a bias planted in a copy of their recordings (--model: what the servers serve):
  equivtest run --engine transformers --drafter ngram   prompt lookup; also early_exit, or model with --draft-model
  equivtest run --engine vllm --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
  equivtest run --engine openvino --drafter ngram --model model.gguf
  equivtest run --engine openai --spec-off http://a:8000 --spec-on http://b:8000 --model path/to/folder
  equivtest run --engine openai --spec-off http://a:8000 --run-dir results/x   then restart the server, and
  equivtest run --engine openai --spec-on http://a:8000 --run-dir results/x --resume
  equivtest run --engine openai --api llamacpp --spec-off http://a:8080 --spec-on http://b:8080 --model model.gguf
"""

_JUDGING_FIELDS = ("confirm", "law", "bias_margin", "pit_margin")


@click.command("run", epilog=_EPILOG)
@click.option(
    "--config",
    "configs",
    multiple=True,
    default=("topp95",),
    show_default=True,
    help="topp95, topk50, topk20p90, greedy, minp05, penalties, logitbias, processing, stops, or all (the first "
    "three); may be repeated.",
)
@click.option(
    "--budget",
    default="gate",
    show_default=True,
    help="smoke (2 prompts, 16 positions, 64 seeds), gate (8, 32, 256) or audit (8, 32, 1,024).",
)
@click.option("--prompts", default="default", show_default=True, help="Prompt set: a name or a .jsonl file.")
@click.option(
    "--epsilon",
    type=float,
    default=None,
    help="Acceptance bias planted in the biased arm; default: the budget's (smoke 0.5, gate and audit 0.1).",
)
@click.option(
    "--plant",
    "planted",
    default=None,
    help="Fault of the biased arm: inflated_acceptance, or likeliest_token for engines that no fault can be put into; "
    "another one, such as reused_coin, shows which evidence would see it.",
)
@click.option(
    "--confirm/--no-confirm",
    default=True,
    show_default=True,
    help="Draw four times as many fresh seeds for what was flagged before calling it different.",
)
@click.option(
    "--law/--no-law",
    default=True,
    show_default=True,
    help="Hold every token against the target's own law; without it only histograms and whole samples are compared.",
)
@click.option(
    "--bias-margin",
    type=float,
    default=None,
    help="Acceptance bias that still counts as equivalent; default: the budget's (smoke 0.1, gate and audit 0.01).",
)
@click.option(
    "--pit-margin",
    type=float,
    default=None,
    help="The same for the distance of the sampled distribution function; default: smoke 0.1, gate and audit 0.02.",
)
@click.option("--run-seed", type=int, default=0, show_default=True, help="Seeds every random stream of the run.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Run folder; default: a new one.")
@results_dir_option("Where run folders are made.")
@click.option(
    "--sequential",
    is_flag=True,
    help="Collect in rounds and stop as soon as the answer is known; the report says how many tokens it took.",
)
@click.option("--resume", is_flag=True, help="Continue --run-dir, or the newest unfinished run.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON on standard output.")
@engine_options
@server_options
@analysis_options
def command(as_json: bool, **values: Any) -> int:
    """Sample with speculation off and on, test whether the distributions agree, and end in a verdict."""
    from rich.console import Console

    from equivtest.cli.progress import listener_for
    from equivtest.cli.verdict import show_verdict
    from equivtest.pipeline.analysis_options import AnalysisOptions
    from equivtest.pipeline.run import RunOptions, run

    subject = pick_engine(values)
    analysis = AnalysisOptions(**pick(values, (*ANALYSIS_FIELDS, *_JUDGING_FIELDS)))
    result = run(RunOptions(engine=subject, analysis=analysis, **values), listener_for(Console(stderr=True)))
    return show_verdict(result, as_json=as_json)
