"""What a training run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from equivtest.errors import InvalidSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The text to learn from, all of it sampled from the target."""

    num_texts: int = 32_768
    """Texts to sample; with `minutes` at most so many."""
    text_length: int = 384
    """Tokens of every text, the chat template's included."""
    question_length: int = 128
    """Most tokens of a sampled question; longer ones are dropped."""
    num_held_out: int = 128
    """Sampled questions that are kept for evaluation and never trained on."""
    shard_texts: int = 1024
    """Texts in one file, which are decoded together."""
    prompts: str | None = None
    """Prompt set (a built-in name, or a .jsonl file with its .toml) that asks a share of the questions."""
    prompts_share: float = 0.5
    """That share; each of its prompts is asked several times if need be."""
    minutes: float | None = None
    """No new file is begun after so much time."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_texts", "question_length", "shard_texts"):
            _require_at_least(name, getattr(self, name), 1)
        _require_at_least("num_held_out", self.num_held_out, 0)
        _require_at_least("text_length", self.text_length, 32)
        if not 0 <= self.prompts_share <= 1:
            raise InvalidSetting("prompts_share", self.prompts_share, "must be between 0 and 1")
        if self.minutes is not None and not self.minutes > 0:
            raise InvalidSetting("text minutes", self.minutes, "must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """The drafter's shape; what is None follows from the target."""

    num_layers: int = 3
    block_size: int = 8
    """The anchor and so many drafts less one."""
    target_layer_ids: tuple[int, ...] | None = None
    """Layers of the target whose outputs are features; None: five, from the second to the last."""
    mask_token_id: int | None = None
    """None: the last special token of the vocabulary that the chat template and the end of text do not use."""
    intermediate_size: int | None = None
    """None: the target's."""
    markov_head: bool = True
    """Whether a draft depends on the one before it."""
    start_from: str | None = None
    """Folder of a drafter of this shape whose weights are the first; a Markov head or last layers that it lacks begin
    as if they were not there."""

    def __post_init__(self) -> None:
        _require_at_least("num_layers", self.num_layers, 1)
        _require_at_least("block_size", self.block_size, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How the drafter learns."""

    steps: int | None = 2_000
    """Optimiser steps; None: as many as `minutes` allows."""
    minutes: float | None = None
    """Time for training, to which the learning rate's schedule is fitted; with `steps` whatever comes first."""
    batch_texts: int = 64
    """Texts of a step."""
    num_anchors: int = 64
    """Blocks of a text, at anchors drawn independently and uniformly in its answer."""
    rate: float = 2e-3
    """Peak learning rate of AdamW."""
    warm_up: float = 0.04
    """Share of training in which the rate rises to its peak."""
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    gamma: float = 3.0
    """Slot k = 0, 1, .. weighs exp(-k / gamma). A draft of slot k counts only where all before it are accepted: of .7 a
    slot that is exp(-k / 2.8). The paper takes 4 for blocks of 8 of larger models, whose text is easier to foresee."""
    soft_share: float = 0.5
    """Share of the loss whose labels are the target's law instead of the token that it drew."""
    reach_share: float = 0.5
    """Share of a slot's weight that counts only where all drafts before it are the text's."""
    kept_share: float = 0.0
    """Share of the loss that is the drafts of a block that the chain rule does not keep for T .8 top_p .95, of the 32
    likeliest tokens, of drafts drawn at T .8 from all that the drafter says. For a drafter that knows the law roughly
    already: where q has nothing, there is nothing to pull at."""
    known_share: float = 0.75
    """Share of the later slots that a Markov head lets know the token before them."""
    seed: int = 0
    """Of the first weights, the texts and the anchors."""
    checkpoint_s: float = 60.0
    """Seconds between checkpoints."""
    report_steps: int = 50
    """Steps between entries of the log."""
    compile: bool = False
    """Compile the network with torch.compile."""

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise InvalidSetting("steps", None, "give steps, minutes or both")
        for name in ("steps", "minutes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InvalidSetting(name, getattr(self, name), "must be above 0")
        for name in ("batch_texts", "num_anchors", "report_steps"):
            _require_at_least(name, getattr(self, name), 1)
        for name in ("rate", "max_norm", "gamma"):
            if not getattr(self, name) > 0:
                raise InvalidSetting(name, getattr(self, name), "must be above 0")
        for name in ("warm_up", "soft_share", "reach_share", "kept_share", "known_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidSetting(name, getattr(self, name), "must be between 0 and 1")


def _require_at_least(name: str, value: Any, least: int) -> None:
    if value < least:
        raise InvalidSetting(name, value, f"must be at least {least}")
