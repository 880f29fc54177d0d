"""A drafter's card: what it is, how it was made and how well it drafts, all read from the files beside it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from equivtest.files import write_whole
from equivtest.training.evaluate import acceptance_table

RECORD_FILE, EVALUATION_FILE, LOG_FILE = "training.json", "evaluation.json", "loss.jsonl"
CARD_FILE, CURVE_FILE = "card.md", "loss.png"


def write_card(folder: Path) -> None:
    """Write card.md and loss.png from training.json, loss.jsonl and, if it is there, evaluation.json."""
    record = json.loads((folder / RECORD_FILE).read_text("utf-8"))
    log = [json.loads(line) for line in (folder / LOG_FILE).read_text("utf-8").splitlines()]
    evaluated = folder / EVALUATION_FILE
    evaluation = json.loads(evaluated.read_text("utf-8")) if evaluated.is_file() else None
    write_whole(folder / CURVE_FILE, loss_curve(log))
    write_whole(folder / CARD_FILE, card(record, evaluation))


def card(record: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> str:
    """The card in Markdown."""
    options, network, target, texts = record["options"], record["network"], record["target"], record["texts"]
    loop, text, code = options["loop"], options["text"], record["code"]
    layers = ", ".join(map(str, network["target_layer_ids"]))
    mix = ", ".join(f"{count:,} {name}" for name, count in texts["by_config"].items())
    given = f"; a share of {text['prompts_share']:g} asks {text['prompts']}" if text["prompts"] else ""
    commit = f"{code['git_commit'] or 'unknown'}{' with changes' if code['git_dirty'] else ''}"
    begun, markov, kept = "", "", ""
    if share := loop.get("kept_share"):
        kept = f"; a share of {share:g} of the loss is the drafts not kept of a block drawn at T .8 top_p .95"
    if start := options["network"].get("start_from"):
        begun = f"; begun from the weights of `{start}`"
    if network.get("markov_head"):
        markov = ", and a Markov head, by which a draft depends on the one before it"
    paragraphs = [
        f"# A DFlash drafter for {target['model']}",
        f"Proposes {network['block_size'] - 1} tokens in one pass (block diffusion drafting, arXiv 2602.06036). It "
        "changes how fast the target decodes, not what.",
        f"**Target**: `{target['model']}`, sha256 `{target['model_sha256']}`. The drafter is of no use to another.",
        f"**Network**: {network['num_layers']} layers, {record['num_parameters']:,} weights, bfloat16; blocks of "
        f"{network['block_size']}; features from the target's layers {layers}, counted from 0; mask token "
        f"{network['mask_token_id']}{markov}. The target's embedding and head are shared and not here.",
        f"**Text**: {texts['num_texts']:,} texts of {text['text_length']} tokens, {texts['num_answer_tokens']:,} of "
        "them answers, all sampled from the target: it asked itself questions and answered them (texts by "
        f"configuration: {mix}){given}. sha256 of the token ids `{texts['sha256']}`. The built-in prompts and "
        f"{text['num_held_out']} of its questions were held out.",
        f"**Training**: {record['steps']:,} steps of {loop['batch_texts']} texts with {loop['num_anchors']} blocks "
        f"each, in {record['seconds']:,.0f} s. AdamW, peak rate {loop['rate']:g}, warm-up {loop['warm_up']:.0%}, cosine"
        f" to zero; cross entropy of the target's next tokens, slots weighted by exp(-k / {loop['gamma']:g}), a share "
        f"of {loop['soft_share']:g} of it against the target's law{kept}{begun}. At the end the loss was "
        f"{record['last']['loss']:.3f} nats a draft, and {record['last']['accepted']:.2f} drafts of a block were the "
        "text's (`loss.png`, `loss.jsonl`).",
        f"**Seeds**: text {text['seed']}, weights and draws {loop['seed']}.",
        f"**Made** with `{record['command']}` on {target['device_name'] or record['machine']['cpu']}, torch "
        f"{target['torch']}, kernels {target['kernels']}, {target['dtype']}; equivtest {code['version']}, commit "
        f"{commit}, sources `{code['source_sha256']}`.",
    ]
    if evaluation is None:
        paragraphs.append("Not evaluated yet: `equivtest drafter evaluate` does it.")
    else:
        judged, subject = evaluation["options"], evaluation["subject"]
        where = subject["device_name"] or evaluation["machine"]["cpu"]
        paragraphs += [
            f"**Accepted drafts a round**, in answers of {judged['max_tokens']} tokens ({where}, {subject['dtype']}, "
            f"seed {judged['seed']}). `prompts` are the eight built-in ones, `held_out` questions that were not "
            "trained on.",
            "\n".join(acceptance_table(evaluation["rows"])),
        ]
    return "\n\n".join(paragraphs) + "\n"


def loss_curve(log: Sequence[Mapping[str, Any]]) -> bytes:
    """A PNG: loss and accepted drafts by step."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    steps = [entry["step"] for entry in log]
    for place, (name, title) in enumerate((("loss", "loss, nats a draft"), ("accepted", "tokens hit a block"))):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.plot(steps, [entry[name] for entry in log], linewidth=1)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=120, metadata={"Software": None})
    return sink.getvalue()
