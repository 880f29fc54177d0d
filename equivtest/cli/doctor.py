"""`equivtest doctor`: what is installed, which backends resolve and why not."""

from __future__ import annotations

import dataclasses
import json

import click


@click.command("doctor", epilog="\b\nExample:\n  equivtest doctor --json")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(as_json: bool) -> int:
    """Say what is installed, which kernel backends work here, and why not. Exits 4 when a run cannot work."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from equivtest.pipeline.doctor import examine
    from equivtest.records import EXIT_CODES, Word

    checks = examine()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        table = Table(show_header=False, box=None)
        for check in checks:
            mark = "[green]ok[/]" if check.ok else "[red]missing[/]" if check.required else "[yellow]missing[/]"
            table.add_row(check.name, mark, Text(check.finding))  # a finding may hold brackets that are no markup
        Console().print(table)
    return 0 if all(check.ok or not check.required for check in checks) else EXIT_CODES[Word.INVALID]
