"""`equivtest gate`: verdicts as an exit code and one screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from equivtest.cli.options import results_dir_option

if TYPE_CHECKING:
    from equivtest.pipeline.gate import GateResult

_EPILOG = """\b
Examples:
  equivtest gate                        the newest run under results/
  equivtest gate results/a results/b    several runs: the worst verdict decides
  equivtest gate results/a --require fingerprint            not one of other code or prompts
  equivtest gate results/a --require fingerprint=3f1c9a77   nor of another protocol, model or engine
  equivtest gate results/a --require budget=gate            not equivalent at a budget that carries no merge
\b
Without the last an equivalent smoke run passes, with a warning. In GitHub Actions it also writes the step summary and
an annotation.
"""


@click.command("gate", epilog=_EPILOG)
@click.argument("run_dirs", nargs=-1, type=click.Path(path_type=Path))
@results_dir_option("Where to look for the newest run.")
@click.option(
    "--require",
    multiple=True,
    metavar="fingerprint[=HEX]|budget=NAME",
    help="Refuse, as invalid: a run of other code; with HEX also one of another protocol or engine; a pass of a budget "
    "below NAME. May be repeated.",
)
def command(run_dirs: tuple[Path, ...], results_dir: Path, require: tuple[str, ...]) -> int:
    """Print the verdict of RUN_DIRS and exit with its code; reads files only."""
    from equivtest.pipeline.gate import read_verdict, worst
    from equivtest.pipeline.run import find_run
    from equivtest.records import EXIT_CODES

    results = [read_verdict(run_dir, require) for run_dir in run_dirs or (find_run(results_dir),)]
    for result in results:
        click.echo(result.run_dir)
        for line in result.lines:
            click.echo(f"  {line}")
        if result.caveat:
            click.echo(f"WARNING: no merge on this: {result.caveat}")
        click.echo(f"{result.word.upper()}: {result.headline}")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for result in results:
            _tell_github(result)
    word = worst(results)
    if len(results) > 1:
        click.echo(f"{word.upper()} decides over {len(results)} runs")
    return EXIT_CODES[word]


def _tell_github(result: GateResult) -> None:
    level = "error" if result.exit_code else "warning" if result.caveat else "notice"
    headline = f"{result.word}: {result.headline}"
    said = f"no merge on this: {result.caveat}; {headline}" if result.caveat else headline
    escaped = said.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    click.echo(f"::{level} title=equivtest::{escaped}")
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target:
        # The summary of a run that is refused says what no longer counts.
        summary = result.run_dir / "summary.md"
        text = summary.read_text("utf-8") if result.judged and summary.is_file() else f"**{headline}**\n"
        with Path(target).open("a", encoding="utf-8") as sink:
            sink.write(text + "\n")
