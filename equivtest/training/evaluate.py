"""How many of a drafter's drafts its target accepts under the chain rule, by teacher forcing.

The target samples texts without a drafter; then the drafter drafts at every place of them at once. What is put out
follows the target's law p whatever is drafted. So the text may be drawn first: a draft from q is then accepted with the
probability min(1, q / p) of the text's token, which for a draft that is sure is whether it is that token (arXiv
2211.17192). Rounds are walked as a decoder would take them, each anchor behind what the round before put out; only
rounds with a whole block inside the text count.

The mean number of accepted drafts is the sum over slots of the chance that all drafts before are accepted, a product of
min(1, q / p) along the text, times the chance of the slot's own, the sum over tokens of min(p, q). The coins decide
where rounds begin and nothing else, which makes the mean exacter.
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

from equivtest.decoder.drafters.dflash_network import DFlashConfig, DFlashNetwork
from equivtest.engines.base import Engine
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import RowParams
from equivtest.protocol.configs import CONFIGS
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Generation, Origin, Request, SamplingParams
from equivtest.rng import Purpose, stream_key, uniforms
from equivtest.training.chat_frame import TokenIds
from equivtest.training.loop import mixed_precision, predict
from equivtest.training.target import Target
from equivtest.training.text import HELD_OUT_SET
from equivtest.training.watch import Watcher

Floats = npt.NDArray[np.float64]

CONFIG_NAMES = ("greedy", "topp95", "topk50")
LIKELIEST, DRAWN = "likeliest", "drawn"
"""What a drafter proposes: see `equivtest.decoder.drafters.dflash.DFlashDrafter`."""


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
    drafts: str
    """LIKELIEST or DRAWN."""
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

    def kinds(self, network: DFlashConfig) -> tuple[str, ...]:
        """The drafts that differ: one that is drawn takes a Markov head, and a greedy request draws nothing."""
        return (LIKELIEST, DRAWN) if network.markov_head and not self.params.greedy else (LIKELIEST,)


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
    decoded: Sequence[Mapping[str, float]] | None = None,
) -> list[Acceptance]:
    """One row for each entry of `asked` and kind of drafts.

    answers: what the target put out without a drafter. decoded: of each entry, `Acceptance.decoded` by kind. Raises
    InvalidSetting for answers shorter than a block.
    """
    network.eval()
    with torch.inference_mode():
        successors = network.successors(target.embedding())
    rows = []
    watcher.stage("evaluate", sum(len(one.requests) for one in asked))
    done = 0
    for index, (one, generations) in enumerate(zip(asked, answers, strict=True)):
        walks: dict[str, list[tuple[Floats, Floats]]] = {kind: [] for kind in one.kinds(network.config)}
        for request, generation in zip(one.requests, generations, strict=True):
            answer = generation.token_ids.tolist()
            text = torch.tensor([*request.prompt_token_ids, *answer], device=target.device)
            judged = _judged(network, target, text, len(request.prompt_token_ids), one, successors)
            # Plain decoding tossed no such coin.
            coins = uniforms(np.array(request.stream_key), np.arange(len(answer)), Purpose.ACCEPT)
            for kind, places in judged.items():
                walks[kind].append(walk(*places, coins))
            done += 1
            watcher.advance(done, f"{one.prompts} {one.config}")
        found = {} if decoded is None else decoded[index]
        rows += [_acceptance(one, kind, each, found.get(kind)) for kind, each in walks.items()]
    return rows


def walk(kept: Floats, overlaps: Floats, coins: Floats) -> tuple[Floats, Floats]:
    """The rounds that a decoder would take through one text.

    kept: float64 [num_places, K], the chance that the chain rule keeps draft k of each place, given that the text's
    tokens come out. overlaps: of that shape, its chance given the tokens before. coins: [at least num_places + K - 1]
    in 0..1, one a token of the text, by which a draft is kept. Returns two float64 [num_rounds, K]: the chance that the
    slot is reached, and that times its overlap.
    """
    slots = np.arange(kept.shape[1])
    accepted = np.cumprod(coins[np.arange(len(kept))[:, None] + slots] < kept, axis=1).sum(axis=1)
    places, place = [], 0
    while place < len(kept):
        places.append(place)
        place += int(accepted[place]) + 1
    reached = np.ones((len(places), len(slots)))
    reached[:, 1:] = np.cumprod(kept[places, :-1], axis=1)
    return reached, reached * overlaps[places]


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
    network: DFlashNetwork, target: Target, text: Tensor, start: int, one: Asked, successors: Tensor | None
) -> dict[str, tuple[Floats, Floats]]:
    """By kind of drafts, `kept` and `overlaps` (see `walk`) of every place of the answer with a whole block after it.

    text: int64 [text_length]; the answer begins at `start`.
    """
    num_drafts = network.config.num_drafts
    anchors = torch.arange(start - 1, len(text) - num_drafts, device=text.device)
    if not len(anchors):
        raise InvalidSetting("max_tokens", len(text) - start, f"must be at least {num_drafts}, a block's drafts")
    features, logits = target.features_and_logits(text)
    probs_dtype = target.model.backend.capabilities.probs_dtype
    asked = logits[start - 1 : -1].contiguous()
    laws = torch.empty(asked.shape, dtype=probs_dtype, device=asked.device)
    target.model.backend.verify_probs(asked, _rows(one, len(asked), text.device), out=laws)
    parts: dict[str, list[Tensor]] = {kind: [] for kind in one.kinds(network.config)}
    for part in torch.split(anchors, _MOST_BLOCKS):
        places = part[:, None] + torch.arange(num_drafts, device=text.device)
        next_ids, p = text[places + 1], laws[places - (start - 1)]
        hidden = predict(network, network, target, features[None], part[None], text[part][None])[0]
        with mixed_precision(target):
            drafts = network.drafts(hidden, text[part], target.head, successors)
        overlaps = p.gather(2, drafts[..., None])[..., 0]
        parts[LIKELIEST].append(torch.stack([(drafts == next_ids).to(p.dtype), overlaps]))
        if DRAWN in parts:
            assert successors is not None
            law = _rows(one, places.numel(), text.device)
            with mixed_precision(target):
                q = network.draft_laws(hidden, text[places], target.head, successors, law)
            given, wanted = (each.gather(2, next_ids[..., None])[..., 0] for each in (q, p))
            parts[DRAWN].append(torch.stack([(given / wanted).clamp_max(1), torch.minimum(q, p).sum(dim=-1)]))
    whole = {kind: torch.cat(each, dim=1).double().cpu().numpy() for kind, each in parts.items()}
    return {kind: (kept, overlaps) for kind, (kept, overlaps) in whole.items()}


_MOST_BLOCKS = 64
"""Blocks drafted at a time: bounds the memory of their attention and laws, not the result."""


def _rows(one: Asked, count: int, device: torch.device) -> RowParams:
    return RowParams.of([one.params] * count, device)


def _acceptance(one: Asked, kind: str, walks: Sequence[tuple[Floats, Floats]], decoded: float | None) -> Acceptance:
    reached, probs = (np.concatenate(column) for column in zip(*walks, strict=True))
    mean = float(probs.sum() / len(probs))
    # Of a ratio: each text's sum less what its number of rounds would make of the mean.
    residuals = np.array([float(p.sum()) - mean * len(p) for _, p in walks])
    num_texts = len(walks)
    spread = num_texts / (num_texts - 1) * float((residuals**2).sum()) if num_texts > 1 else 0.0
    reached = reached.sum(axis=0)
    by_slot = np.divide(probs.sum(axis=0), reached, out=np.zeros_like(reached), where=reached > 0)
    return Acceptance(
        prompts=one.prompts,
        config=one.config,
        drafts=kind,
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
        "| prompts | config | drafts | texts | rounds | accepted a round | by the decoder | by slot, if reached |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        decoded = "-" if row["decoded"] is None else f"{row['decoded']:.2f}"
        slots = " ".join(f"{probability:.2f}".lstrip("0") for probability in row["by_slot"])
        lines.append(
            f"| {row['prompts']} | {row['config']} | {row['drafts']} | {row['num_texts']:,} | {row['num_rounds']:,} "
            f"| {row['accepted']:.2f} ± {row['standard_error']:.2f} | {decoded} | {slots} |"
        )
    return lines
