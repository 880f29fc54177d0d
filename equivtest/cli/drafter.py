"""`equivtest drafter`: train a block drafter on its target's own text, and measure how well it drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from equivtest.cli.options import pick

if TYPE_CHECKING:
    from equivtest.cli.stages import Stages

_ENGINE_FIELDS = ("model", "dtype", "device", "kernels", "threads", "max_batch")
_EVALUATION_FIELDS = ("max_tokens", "answers")
_TRAIN_EPILOG = """\b
Examples:
  equivtest drafter train --model tiny --out my-drafter --texts 512 --steps 500
  equivtest drafter train --device cuda --out my-drafter --text-minutes 2 --minutes 6
  equivtest drafter train --device cuda --out my-drafter --text-minutes 2 --minutes 6 --resume
  equivtest run --drafter dflash --draft-model my-drafter --draft-len 7

\b
The folder holds the drafter and its card; its subfolder work holds text and checkpoint, which only --resume needs.
"""
_EVALUATE_EPILOG = """\b
Examples:
  equivtest drafter evaluate my-drafter
  equivtest drafter evaluate my-drafter --device cuda --answers 64 --json
"""


@click.group("drafter")
def command() -> None:
    """Block drafters (DFlash) for the built-in decoder: train one on its target's own text, and measure it."""


def _target_options(function: Any) -> Any:
    for option in reversed(
        (
            click.option("--model", default="smollm2-135m", show_default=True,
                         help="The target: built-in name, GGUF file, Hugging Face folder or hub id."),
            click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
                         help="Where everything runs."),
            click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
                         show_default=True, help="The target's weights and activations."),
            click.option("--kernels", default="auto", show_default=True, help="Kernel backend of the target."),
            click.option("--threads", type=int, default=None, help="CPU threads; default: all cores."),
            click.option("--batch", "max_batch", type=int, default=1024, show_default=True,
                         help="Texts decoded at once."),
            click.option("--max-tokens", type=int, default=128, show_default=True,
                         help="Tokens of each answer in the evaluation."),
            click.option("--answers", type=int, default=16, show_default=True,
                         help="Answers to each built-in prompt and sampled configuration in the evaluation."),
            click.option("--held-out", "num_held_out", type=int, default=128, show_default=True,
                         help="Sampled questions that are held out from training, for the evaluation."),
        )
    ):  # fmt: skip
        function = option(function)
    return function


@command.command("train", epilog=_TRAIN_EPILOG)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the drafter.")
@click.option("--resume", is_flag=True, help="Go on with what --out holds; the other options must be the same.")
@_target_options
@click.option("--texts", "num_texts", type=int, default=32_768, show_default=True, help="Texts to sample.")
@click.option("--text-length", type=int, default=384, show_default=True, help="Tokens of a text.")
@click.option("--text-minutes", type=float, default=None, help="Most time for sampling; what is there by then is used.")
@click.option("--prompts", default=None, help="Prompt set (.jsonl with its .toml) that asks a share of the questions.")
@click.option("--prompts-share", type=float, default=0.5, show_default=True, help="That share.")
@click.option("--layers", "num_layers", type=int, default=3, show_default=True, help="Layers of the drafter.")
@click.option("--block-size", type=int, default=8, show_default=True, help="Rows of a block: one more than its drafts.")
@click.option(
    "--target-layers", default=None, help="Layers, from 0, whose outputs are features: 1,8,15; default: five, spread."
)
@click.option(
    "--mask-token", "mask_token_id", type=int, default=None, help="Token id; default: one that is not in use."
)
@click.option(
    "--markov-head/--no-markov-head", default=True, show_default=True, help="Let a draft depend on the one before it."
)
@click.option(
    "--start-from",
    type=click.Path(exists=True, file_okay=False),
    default=None,
    help="Folder of a trained drafter of this shape, or of fewer layers, whose weights are the first.",
)
@click.option("--steps", type=int, default=None, help="Optimiser steps; default: 2000, or as many as --minutes allows.")
@click.option("--minutes", type=float, default=None, help="Time for training, to which its schedule is fitted.")
@click.option("--batch-texts", type=int, default=64, show_default=True, help="Texts of a step.")
@click.option("--anchors", "num_anchors", type=int, default=64, show_default=True, help="Blocks of a text in a step.")
@click.option("--rate", type=float, default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--gamma", type=float, default=3.0, show_default=True, help="Slot k weighs exp(-k / gamma).")
@click.option(
    "--soft-share", type=float, default=0.5, show_default=True, help="Share of the loss against the target's law."
)
@click.option(
    "--reach-share",
    type=float,
    default=0.5,
    show_default=True,
    help="Share of a slot's weight that counts only where all drafts before it are the text's.",
)
@click.option(
    "--kept-share",
    type=float,
    default=0.0,
    show_default=True,
    help="Share of the loss that is the drafts not kept of a block drawn at T .8 top_p .95.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of text, weights and draws.")
@click.option("--compile", is_flag=True, help="Compile the network with torch.compile.")
@click.option("--no-evaluation", is_flag=True, help="Leave out the evaluation at the end.")
def train(out: Path, resume: bool, target_layers: str | None, no_evaluation: bool, seed: int, **values: Any) -> int:
    """Train a drafter for a model: text sampled from the model itself, training, evaluation, card."""
    from equivtest.training import train as training

    if values["steps"] is None and values["minutes"] is None:
        values["steps"] = 2000
    num_held_out = values.pop("num_held_out")
    evaluation = training.EvaluationOptions(**pick(values, _EVALUATION_FIELDS), num_held_out=num_held_out)
    text = pick(values, ("num_texts", "text_length", "prompts", "prompts_share"))
    network = pick(values, ("num_layers", "block_size", "mask_token_id", "markov_head", "start_from"))
    options = training.TrainOptions(
        engine=training.EngineOptions(**pick(values, _ENGINE_FIELDS)),
        text=training.TextOptions(**text, minutes=values.pop("text_minutes"), num_held_out=num_held_out, seed=seed),
        network=training.NetworkOptions(**network, target_layer_ids=_layer_ids(target_layers)),
        loop=training.LoopOptions(**values, seed=seed),
        evaluation=None if no_evaluation else evaluation,
    )
    with _stages() as watcher:
        rows = training.train(options, out, resume=resume, provenance=_provenance(), watcher=watcher)
    click.echo(f"drafter: {out}")
    return _show(rows, as_json=False)


@command.command("evaluate", epilog=_EVALUATE_EPILOG)
@click.argument("folder", type=click.Path(path_type=Path))
@_target_options
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the answers.")
def evaluate(folder: Path, as_json: bool, num_held_out: int, seed: int, **values: Any) -> int:
    """Measure how many drafts of the drafter in FOLDER are accepted, greedy, at T .8 top_p .95 and at T 1 top_k 50.

    The likeliest drafts and, where it has a Markov head, those drawn from the request's law (--drafts drawn of a run).
    On the built-in prompts and, where the folder names them, on questions held out from training.
    """
    from equivtest.training import train as training

    judged = pick(values, _EVALUATION_FIELDS)
    options = training.EvaluationOptions(**judged, num_held_out=num_held_out, seed=seed)
    engine = training.EngineOptions(**values)
    with _stages() as watcher:
        rows = training.evaluate_folder(folder, engine, options, provenance=_provenance(), watcher=watcher)
    return _show(rows, as_json=as_json)


def _layer_ids(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a list like 1,8,15", param_hint="--target-layers") from error


def _provenance() -> Mapping[str, Any]:
    from equivtest.pipeline.manifest import command_line, describe_code, describe_machine

    return {"command": command_line(), "code": describe_code(), "machine": describe_machine()}


def _stages() -> Stages:
    from rich.console import Console

    from equivtest.cli.stages import Stages

    return Stages(Console(stderr=True))


def _show(rows: Sequence[Any], *, as_json: bool) -> int:
    from equivtest.training.evaluate import acceptance_table

    table = [asdict(row) for row in rows]
    if as_json:
        click.echo(json.dumps(table, indent=2))
    elif table:
        click.echo("\n".join(acceptance_table(table)))
    return 0
