"""`equivtest report`: recompute a run's tables and pages from its samples."""

from __future__ import annotations

from pathlib import Path

import click

from equivtest.cli.options import results_dir_option

_EPILOG = """\b
Examples:
  equivtest report                      the newest run under results/
  equivtest report results/my-run       needs the samples only: no torch, no model
  equivtest report results/my-run --format parquet    tables for pandas, DuckDB and polars in results/my-run/parquet
"""


@click.command("report", epilog=_EPILOG)
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@results_dir_option("Where to look for the newest run.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["pages", "parquet"]),
    default="pages",
    show_default=True,
    help="pages: what a run leaves; parquet: also RUN_DIR/parquet with cells, evidence, controls and samples "
    "(law columns beside the tokens), and columns.md, which says what each column holds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON on standard output.")
def command(run_dir: Path | None, results_dir: Path, kind: str, as_json: bool) -> int:
    """Recompute the tables, report.html, summary.md and junit.xml of RUN_DIR; exits with its verdict."""
    from equivtest.cli.verdict import show_verdict
    from equivtest.pipeline.publish import publish_tables
    from equivtest.pipeline.run import find_run, reanalyse

    result = reanalyse(run_dir or find_run(results_dir))
    if kind == "parquet":
        folder = publish_tables(result.run_dir, result.data)
        click.echo(f"tables: {folder}", err=as_json)
    return show_verdict(result, as_json=as_json)
