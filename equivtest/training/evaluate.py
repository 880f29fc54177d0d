"""How many of a drafter's drafts its target accepts, by teacher forcing.

The target samples texts without a drafter; then the drafter drafts at every place of them at once. A draft of a greedy
drafter is accepted with the probability that the target's law gives it, and what is put out follows that law either
way: so the text may be drawn first, and a draft is accepted when it is the text's token. Rounds are walked as a decoder
would take them, each anchor behind what the round before put out; only rounds with a whole block inside the text count.

The mean number of accepted drafts is that of sum_k [the first k drafts are the text's] p(draft k), whose expectation
over the text is the product of p along the drafts, summed: nothing depends on the last coin, which makes it exacter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.drafters.dflash_network import DFlashNetwork
from equivtest.engines.base import Engine
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import RowParams
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Generation, Origin, Request, SamplingParams
from equivtest.rng import stream_key
from equivtest.training.chat_frame import TokenIds
from equivtest.training.loop import mixed_precision, predict
from equivtest.training.target import Target
from equivtest.training.text import HELD_OUT_SET
from equivtest.training.watch import Watcher

Floats = npt.NDArray[np.float64]

CONFIG_NAMES = ("greedy", "topp95", "topk50")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """What a drafter is judged on."""

    max_tokens: int = 128
    """Of each answer."""
    answers: int = 16
    """To each built-in prompt and configuration; a greedy one is always the same and asked once."""
    num_held_out: int = 128
    """Held-out questions, each answered once."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "answers"):
            if getattr(self, name) < 1:
                raise InvalidSetting(name, getattr(self, name), "must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What became of a drafter's drafts on one set of prompts under one configuration."""

    prompts: str
    """prompts (the built-in ones) or held_out."""
    config: str
    num_texts: int
    num_rounds: int
    accepted: float
    """Mean accepted drafts of a round."""
    standard_error: float
    """Of that mean; texts are drawn independently."""
    by_slot: tuple[float, ...]
    """Probability that the draft of slot k is accepted when all before it were; 0 where none came so far."""
    decoded: float | None
    """Mean accepted drafts of a full round as the decoder with this drafter counts them; None: not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One set of prompts under one configuration."""

    prompts: str
    config: str
    requests: tuple[Request, ...]

    @property
    def params(self) -> SamplingParams:
        return CONFIGS[self.config]


def evaluation_requests(engine: Engine, held_out: Sequence[TokenIds], options: EvaluationOptions) -> list[Asked]:
    """The built-in prompts and the held-out questions under each configuration."""
    built_in = [engine.encode_prompt(prompt.conversation) for prompt in load_prompt_set(HELD_OUT_SET).prompts]
    sets = {"prompts": built_in, "held_out": list(held_out[: options.num_held_out])}
    asked = []
    for name, prompts in sets.items():
        for config in CONFIG_NAMES:
            repeats = options.answers if name == "prompts" and not CONFIGS[config].greedy else 1
            requests = tuple(
                Request(
                    prompt_token_ids=prompt,
                    params=CONFIGS[config],
                    stream_key=stream_key("drafter evaluation", options.seed, name, config, number, repeat),
                    max_tokens=options.max_tokens,
                )
                for number, prompt in enumerate(prompts)
                for repeat in range(repeats)
            )
            if requests:
                asked.append(Asked(prompts=name, config=config, requests=requests))
    return asked


def evaluate(
    network: DFlashNetwork,
    target: Target,
    asked: Sequence[Asked],
    answers: Sequence[Sequence[Generation]],
    watcher: Watcher,
    *,
    decoded: Sequence[float | None] | None = None,
) -> list[Acceptance]:
    """One row for each entry of `asked`.

    answers: what the target put out without a drafter. decoded: see `Acceptance`. Raises InvalidSetting for answers
    shorter than a block.
    """
    network.eval()
    with torch.inference_mode():
        successors = network.successors(target.embedding())
    rows = []
    watcher.stage("evaluate", sum(len(one.requests) for one in asked))
    done = 0
    for index, (one, generations) in enumerate(zip(asked, answers, strict=True)):
        walks = []
        for request, generation in zip(one.requests, generations, strict=True):
            text = torch.tensor([*request.prompt_token_ids, *generation.token_ids.tolist()], device=target.device)
            judged = _judged(network, target, text, len(request.prompt_token_ids), request.params, successors)
            walks.append(walk(*judged))
            done += 1
            watcher.advance(done, f"{one.prompts} {one.config}")
        found = _acceptance(one, walks, None if decoded is None else decoded[index])
        rows.append(found)
    return rows


def walk(hits: npt.NDArray[np.bool_], probs: Floats) -> tuple[Floats, Floats]:
    """The rounds that a decoder would take through one text.

    hits: bool [num_places, K], whether draft k at each place is the text's token. probs: float64 of that shape, the
    law's probability of each draft. Returns two float64 [num_rounds, K]: 1 where the slot was reached, and there the
    draft's probability, else 0.
    """
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    places, place = [], 0
    while place < len(hits):
        places.append(place)
        place += int(accepted[place]) + 1
    reached = np.arange(hits.shape[1]) <= accepted[places, None]
    return reached.astype(np.float64), np.where(reached, probs[places], 0.0)


def decoded_acceptance(generations: Sequence[Generation], num_drafts: int) -> float:
    """Mean accepted drafts of the rounds that were offered all `num_drafts`; 0 where there was none."""
    rounds = accepted = 0
    for generation in generations:
        full = generation.num_drafts == num_drafts
        rounds += len(np.unique(generation.steps[full]))
        accepted += sum(
            origin is Origin.ACCEPTED for origin, whole in zip(generation.origins, full, strict=True) if whole
        )
    return accepted / rounds if rounds else 0.0


@torch.inference_mode()
def _judged(
    network: DFlashNetwork, target: Target, text: Tensor, start: int, params: SamplingParams, successors: Tensor | None
) -> tuple[npt.NDArray[np.bool_], Floats]:
    """Hits and probabilities, see `walk`, of drafts at every place of the answer that has a whole block after it.

    text: int64 [text_length]; the answer begins at `start`.
    """
    num_drafts = network.config.num_drafts
    anchors = torch.arange(start - 1, len(text) - num_drafts, device=text.device)
    if not len(anchors):
        raise InvalidSetting("max_tokens", len(text) - start, f"must be at least {num_drafts}, a block's drafts")
    features, logits = target.features_and_logits(text)
    drafts = torch.cat(
        [_drafts(network, target, features, text, part, successors) for part in torch.split(anchors, _MOST_BLOCKS)]
    )
    places = anchors[:, None] + torch.arange(num_drafts, device=text.device)
    asked = logits[start - 1 : -1]
    rows = RowParams.of([params] * len(asked), asked.device)
    probs_dtype = target.model.backend.capabilities.probs_dtype
    laws = torch.empty(asked.shape, dtype=probs_dtype, device=asked.device)
    target.model.backend.verify_probs(asked.contiguous(), rows, out=laws)
    probs = laws[places - (start - 1), drafts]
    return (drafts == text[places + 1]).cpu().numpy(), probs.double().cpu().numpy()


_MOST_BLOCKS = 256
"""Blocks drafted at a time: bounds the memory of their attention, not the result."""


def _drafts(
    network: DFlashNetwork, target: Target, features: Tensor, text: Tensor, anchors: Tensor, successors: Tensor | None
) -> Tensor:
    """int64 [num_anchors, K]."""
    anchor_ids = text[anchors]
    hidden = predict(network, network, target, features[None], anchors[None], anchor_ids[None])
    with mixed_precision(target):
        return network.drafts(hidden[0], anchor_ids, target.head, successors)


def _acceptance(one: Asked, walks: Sequence[tuple[Floats, Floats]], decoded: float | None) -> Acceptance:
    reached, probs = (np.concatenate(column) for column in zip(*walks, strict=True))
    mean = float(probs.sum() / len(probs))
    # Of a ratio: each text's sum less what its number of rounds would make of the mean.
    residuals = np.array([float(p.sum()) - mean * len(p) for _, p in walks])
    num_texts = len(walks)
    spread = num_texts / (num_texts - 1) * float((residuals**2).sum()) if num_texts > 1 else 0.0
    by_slot = probs.sum(axis=0) / np.maximum(reached.sum(axis=0), 1)
    return Acceptance(
        prompts=one.prompts,
        config=one.config,
        num_texts=num_texts,
        num_rounds=len(probs),
        accepted=mean,
        standard_error=math.sqrt(spread) / len(probs),
        by_slot=tuple(by_slot.tolist()),
        decoded=decoded,
    )


def acceptance_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A Markdown table of `Acceptance` rows."""
    lines = [
        "| prompts | config | texts | rounds | accepted a round | by the decoder | by slot, of those that reach it |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        decoded = "-" if row["decoded"] is None else f"{row['decoded']:.2f}"
        slots = " ".join(f"{probability:.2f}".lstrip("0") for probability in row["by_slot"])
        lines.append(
            f"| {row['prompts']} | {row['config']} | {row['num_texts']:,} | {row['num_rounds']:,} "
            f"| {row['accepted']:.2f} ± {row['standard_error']:.2f} | {decoded} | {slots} |"
        )
    return lines
