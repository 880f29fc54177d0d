"""`equivtest model`: fetch models ahead of a run."""

from __future__ import annotations

import click


@click.group("model")
def command() -> None:
    """Models that the built-in decoder runs."""


@command.command("pull", epilog="\b\nExample:\n  equivtest model pull smollm2-135m")
@click.argument("name")
def pull(name: str) -> int:
    """Fetch NAME into the user's cache, check its sha256 and print where it is."""
    from equivtest.pipeline.models import pull_model

    click.echo(pull_model(name, on_message=lambda text: click.echo(text, err=True)))
    return 0
