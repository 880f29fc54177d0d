"""`equivtest model`: fetch models ahead of a run, and write them for other engines."""

from __future__ import annotations

from pathlib import Path

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


@command.command("export", epilog="\b\nExample:\n  equivtest model export smollm2-135m smollm2-float32")
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
def export(name: str, folder: Path) -> int:
    """Write the model NAME as a Hugging Face FOLDER in float32, for engines that do not read its file."""
    from equivtest.pipeline.models import export_model

    export_model(name, folder, on_message=lambda text: click.echo(text, err=True))
    click.echo(folder)
    return 0
