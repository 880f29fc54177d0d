"""How a verdict is shown at the end of a command."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from equivtest.pipeline.run import RunResult


def show_verdict(result: RunResult, *, as_json: bool) -> int:
    """Print the screen, or JSON on standard output, and return the exit code."""
    verdict = result.analysis.verdict
    if as_json:
        click.echo(json.dumps({"run_dir": str(result.run_dir), **verdict.to_dict()}, indent=2))
    else:
        from rich.console import Console

        from equivtest.report.terminal import verdict_screen

        console = Console()
        console.print(f"report: {result.run_dir / 'report.html'}", soft_wrap=True, highlight=False)
        console.print(verdict_screen(result.data))
    return verdict.exit_code
