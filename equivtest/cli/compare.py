"""`equivtest compare`: two files of samples from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from equivtest.cli.options import analysis_options

_EPILOG = """\b
Examples:
  equivtest compare on.parquet off.jsonl
  equivtest compare results/a/samples/arm=on results/b/samples/arm=off
\b
A file has the columns prompt_id, seed, position, token_id (and config, if there are several), one row per token, in
parquet or JSON lines; or JSON lines with prompt_id, seed and token_ids. A folder is all such files in it. A shorter
token_ids list is a text that ended early: its last token is repeated. Record both arms with the same max_tokens.
"""


@click.command("compare", epilog=_EPILOG)
@click.argument("on", type=click.Path(path_type=Path))
@click.argument("off", type=click.Path(path_type=Path))
@click.option(
    "--epsilon",
    type=float,
    default=0.1,
    show_default=True,
    help="Bias towards the likeliest token planted in a copy of ON: the teeth.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON on standard output.")
@analysis_options
def command(on: Path, off: Path, epsilon: float, as_json: bool, **analysis: Any) -> int:
    """Judge samples ON (speculative) against OFF (plain) that any engine recorded; a flag counts at once."""
    import json

    from equivtest.pipeline.analysis_options import AnalysisOptions
    from equivtest.pipeline.compare import compare

    verdict = compare(on, off, AnalysisOptions(confirm=False, **analysis), epsilon=epsilon).verdict
    if as_json:
        click.echo(json.dumps(verdict.to_dict(), indent=2))
        return verdict.exit_code
    controls = (f"{control.name}: {control.line}" for control in verdict.controls)
    for line in (f"gate of record: {verdict.gate_of_record.line}", *controls, *verdict.reasons, *verdict.next_steps):
        click.echo(f"  {line}")
    click.echo(f"{verdict.word.upper()}: {verdict.headline}")
    return verdict.exit_code
