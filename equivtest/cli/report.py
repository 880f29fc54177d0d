"""`equivtest report`: recompute a run's tables and pages from its samples."""

from __future__ import annotations

from pathlib import Path

import click

from equivtest.cli.options import results_dir_option

_EPILOG = """\b
Examples:
  equivtest report                      the newest run under results/
  equivtest report results/my-run       needs the samples only: no torch, no model
"""


@click.command("report", epilog=_EPILOG)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@results_dir_option("Where to look for the newest run.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON on standard output.")
def command(run_dir: Path | None, results_dir: Path, as_json: bool) -> int:
    """Recompute the tables, report.html, summary.md and junit.xml of RUN_DIR; exits with its verdict."""
    from equivtest.cli.verdict import show_verdict
    from equivtest.pipeline.run import find_run, reanalyse

    return show_verdict(reanalyse(run_dir or find_run(results_dir)), as_json=as_json)
