"""From a target to a drafter in a folder: text, training, evaluation, card.

The folder holds the drafter itself, card.md, training.json, loss.jsonl, loss.png, evaluation.json and held_out.json;
its subfolder `work` holds the text and the checkpoint, which only a resumed run needs.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from equivtest.decoder.drafters.dflash_network import DFlashConfig, DFlashNetwork
from equivtest.decoder.hub import resolve_model
from equivtest.decoder.weights import Checkpoint, load_checkpoint
from equivtest.engines.base import EngineOptions as EngineOptions
from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidSetting, RunExists, RunNotFound, UnsupportedModel
from equivtest.files import sole_writer, write_whole
from equivtest.training.card import EVALUATION_FILE, LOG_FILE, RECORD_FILE, write_card
from equivtest.training.chat_frame import ChatFrame
from equivtest.training.evaluate import (
    DRAWN,
    LIKELIEST,
    Acceptance,
    decoded_acceptance,
    evaluate,
    evaluation_requests,
)
from equivtest.training.evaluate import EvaluationOptions as EvaluationOptions
from equivtest.training.lessons import Lessons
from equivtest.training.loop import Loop
from equivtest.training.options import LoopOptions as LoopOptions
from equivtest.training.options import NetworkOptions as NetworkOptions
from equivtest.training.options import TextOptions as TextOptions
from equivtest.training.target import Target
from equivtest.training.text import HELD_OUT_FILE, describe_texts, read_held_out, read_texts, sample_texts
from equivtest.training.watch import Watcher

if TYPE_CHECKING:
    from equivtest.decoder.drafters.dflash_layers import Layer

WORK = "work"
CHECKPOINT_FILE = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """A whole training run."""

    engine: EngineOptions
    """Of the target; its drafter is not used."""
    text: TextOptions
    network: NetworkOptions
    loop: LoopOptions
    evaluation: EvaluationOptions | None
    """None: do not evaluate."""


def train(
    options: TrainOptions, folder: Path, *, resume: bool, provenance: Mapping[str, Any], watcher: Watcher
) -> list[Acceptance]:
    """Leave a drafter in `folder`; return what its evaluation found.

    provenance: command, code and machine, for the record. resume: go on where an earlier run stopped. Raises RunExists,
    RunNotFound, RunMismatch, RunBusy, InvalidSetting, or what loading the model does.
    """
    work = folder / WORK
    if work.exists() and not resume:
        raise RunExists(folder)
    if resume and not work.exists():
        raise RunNotFound(folder, "leave out --resume to begin there")
    with sole_writer(work):
        checkpoint = load_checkpoint(resolve_model(options.engine.model, on_progress=watcher.message))
        record = {"options": asdict(options), **_fit(options, folder, checkpoint, watcher), **provenance}
        write_whole(folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")
        write_card(folder)
        free_memory()
        if options.evaluation is None:
            return []
        return evaluate_folder(
            folder, options.engine, options.evaluation, provenance=provenance, watcher=watcher, checkpoint=checkpoint
        )


def _fit(options: TrainOptions, folder: Path, checkpoint: Checkpoint, watcher: Watcher) -> dict[str, Any]:
    """Sample the text and train on it, or go on with that; leave drafter and log in the folder. Returns the record."""
    work, saved = folder / WORK, folder / WORK / CHECKPOINT_FILE
    plain = replace(options.engine, drafter="ngram", draft_len=1, draft_model=None)
    engine = DecoderEngine.open(plain, load=lambda: checkpoint, on_message=watcher.message)
    described = dict(engine.describe())
    config = network_config(checkpoint, ChatFrame.of(engine), options.network)
    texts = read_texts(work) if saved.is_file() else sample_texts(engine, options.text, work, watcher)
    target = Target.of(engine.model, checkpoint, config.target_layer_ids)
    del engine
    free_memory()
    network = new_network(config, checkpoint, options.loop.seed)
    if options.network.start_from is not None:
        start_from(network, Path(options.network.start_from))
    network.to(target.device)
    loop = Loop(network, target, Lessons(texts, target, config.num_drafts, watcher), options.loop)
    material = {"texts": describe_texts(texts), "model_sha256": checkpoint.sha256, "network": asdict(config)}
    if saved.is_file():
        loop.load(saved, material)
        watcher.message(f"train: goes on at step {loop.step:,}")

    def keep() -> None:
        loop.save(saved, material)
        publish(network, folder)
        write_whole(folder / LOG_FILE, "".join(json.dumps(asdict(entry)) + "\n" for entry in loop.log))

    write_whole(folder / HELD_OUT_FILE, (work / HELD_OUT_FILE).read_bytes())
    loop.run(keep, watcher)
    return {
        "target": described,
        **material,
        "num_parameters": sum(weight.numel() for weight in network.parameters()),
        "steps": loop.step,
        "seconds": round(loop.seconds, 1),
        "last": asdict(loop.log[-1]),
    }


def evaluate_folder(
    folder: Path,
    engine_options: EngineOptions,
    options: EvaluationOptions,
    *,
    provenance: Mapping[str, Any],
    watcher: Watcher,
    checkpoint: Checkpoint | None = None,
) -> list[Acceptance]:
    """Judge the drafter of a folder, write evaluation.json and, where it was trained, bring its card up to date.

    checkpoint: the target, if it is loaded already. Raises ModelUnavailable or UnsupportedModel for what is no drafter
    of this target.
    """
    network = DFlashNetwork.load(folder)
    config = network.config
    loaded = checkpoint or load_checkpoint(resolve_model(engine_options.model, on_progress=watcher.message))
    drafting = replace(engine_options, drafter="dflash", draft_model=str(folder), draft_len=config.num_drafts)
    engine = DecoderEngine.open(drafting, load=lambda: loaded, on_message=watcher.message)
    asked = evaluation_requests(engine, read_held_out(folder), options)
    drawing = [index for index, one in enumerate(asked) if DRAWN in one.kinds(config)]
    watcher.stage("answers", 2 * len(asked) + len(drawing))
    answers, decoded = [], []
    for index, one in enumerate(asked):
        answers.append(engine.generate(one.requests, speculative=False))
        watcher.advance(2 * index + 1, f"{one.prompts} {one.config}, plain")
        texts = engine.generate(one.requests, speculative=True)
        decoded.append({LIKELIEST: decoded_acceptance(texts, config.num_drafts)})
        watcher.advance(2 * index + 2, f"{one.prompts} {one.config}, {LIKELIEST} drafts")
    record = {"options": asdict(options), "subject": dict(engine.describe()), **provenance}
    if drawing:
        engine = DecoderEngine.open(replace(drafting, drafts=DRAWN), load=lambda: loaded)
    for done, index in enumerate(drawing, 2 * len(asked) + 1):
        texts = engine.generate(asked[index].requests, speculative=True)
        decoded[index][DRAWN] = decoded_acceptance(texts, config.num_drafts)
        watcher.advance(done, f"{asked[index].prompts} {asked[index].config}, {DRAWN} drafts")
    target = Target.of(engine.model, loaded, config.target_layer_ids)
    del engine
    free_memory()
    rows = evaluate(network.to(target.device), target, asked, answers, watcher, decoded=decoded)
    record["rows"] = [asdict(row) for row in rows]
    write_whole(folder / EVALUATION_FILE, json.dumps(record, indent=2) + "\n")
    if (folder / RECORD_FILE).is_file():
        write_card(folder)
    return rows


def network_config(checkpoint: Checkpoint, frame: ChatFrame, options: NetworkOptions) -> DFlashConfig:
    """The drafter for a target, whose layers are shaped like the target's. Raises InvalidSetting where no mask token
    can be found, UnsupportedModel for a shape that cannot be."""
    target = checkpoint.config
    mask = options.mask_token_id
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size or target.intermediate_size,
        num_layers=options.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rope_theta=target.rope_theta,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        max_position=target.max_position,
        num_target_layers=target.num_layers,
        block_size=options.block_size,
        target_layer_ids=options.target_layer_ids or spread_layers(target.num_layers),
        mask_token_id=unused_token(checkpoint, frame) if mask is None else mask,
        markov_head=options.markov_head,
    )


def spread_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Layers from the second to the last, evenly spread, each once: 1, 8, 15, 22 and 29 of 30."""
    first = min(1, num_layers - 1)
    steps = max(1, count - 1)
    return tuple(sorted({first + round(index * (num_layers - 1 - first) / steps) for index in range(count)}))


def publish(network: DFlashNetwork, folder: Path) -> None:
    """Put the network into the folder, each file whole or not at all."""
    fresh = folder / WORK / "fresh"
    network.save(fresh)
    for file in sorted(fresh.iterdir()):
        os.replace(file, folder / file.name)
    fresh.rmdir()


def new_network(config: DFlashConfig, checkpoint: Checkpoint, seed: int) -> DFlashNetwork:
    """A fresh network on the CPU whose last norm is the target's, which the shared head expects. torch's own generator
    is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = DFlashNetwork(config)
    network.norm.load_state_dict({"weight": checkpoint.weights["model.norm.weight"]})
    return network


def start_from(network: DFlashNetwork, folder: Path) -> None:
    """Give the network the weights of a trained one, which then drafts the same.

    Its last layers may be more than the trained one has, and it may have a Markov head that the other lacks: these
    begin as if they were not there. Raises UnsupportedModel where the two differ in anything else.
    """
    trained = DFlashNetwork.load(folder)
    own, other = asdict(network.config), asdict(trained.config)
    for name, value in own.items():
        may_grow = name in ("markov_head", "num_layers") and value > other[name]
        if other[name] != value and not may_grow:
            raise UnsupportedModel(str(folder), f"{name} = {other[name]!r}: training asks for {value!r}")
    for layer in network.layers[len(trained.layers) :]:
        cast("Layer", layer).begin_as_none()
    network.load_state_dict(trained.state_dict(), strict=False)


def unused_token(checkpoint: Checkpoint, frame: ChatFrame) -> int:
    """A token that no text holds: the first id of the padding past the tokenizer's vocabulary, or else the last special
    token that neither ends a text nor stands in the chat template. Raises InvalidSetting if there is none."""
    tokenizer, vocab_size = checkpoint.tokenizer, checkpoint.config.vocab_size
    if tokenizer.vocab_size < vocab_size:
        return tokenizer.vocab_size
    used = {*frame.opening, *frame.closing, *tokenizer.eos_token_ids}
    unused = [id_ for id_ in tokenizer.special_token_ids if id_ not in used]
    if not unused:
        raise InvalidSetting(
            "mask_token_id", None, "every special token of the vocabulary is in use; name one to spare"
        )
    return unused[-1]


def free_memory() -> None:
    """What is no longer used goes back to the device, caches and graphs that hold each other too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
