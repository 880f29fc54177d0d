"""The training loop: draws blocks, takes steps, logs, and leaves checkpoints from which it goes on as if never stopped.

Nothing in a step waits for the device; only a log entry or a checkpoint does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equivtest.decoder.drafters.dflash_network import DFlashNetwork
from equivtest.errors import RunMismatch, UnsupportedModel
from equivtest.files import atomic_file
from equivtest.protocol.configs import CONFIGS
from equivtest.training.lessons import Blocks, Lessons
from equivtest.training.loss import Kept, head_loss, slot_weights
from equivtest.training.options import LoopOptions
from equivtest.training.target import Target
from equivtest.training.watch import Watcher

BETAS = (0.9, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """Means over the steps since the entry before."""

    step: int
    """Steps taken so far."""
    seconds: float
    """Spent on them, in all sittings."""
    rate: float
    """Learning rate of the last step."""
    loss: float
    """Cross entropy of a draft's place, nats, all slots alike."""
    accepted: float
    """Drafts of a block up to the first that is not the text's next token."""
    accuracy: tuple[float, ...]
    """By slot: how often the draft is the text's token, whatever stands before it."""
    norm: float
    """Of the gradient, before it is scaled down."""
    drafts_per_s: float


class Loop:
    """One network in training."""

    def __init__(self, network: DFlashNetwork, target: Target, lessons: Lessons, options: LoopOptions) -> None:
        """The network must be on the target's device, in float32."""
        self.network, self.options = network, options
        self.step, self.seconds = 0, 0.0
        self.log: list[LogEntry] = []
        self._target, self._lessons = target, lessons
        cuda = target.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=0.0, betas=BETAS, weight_decay=options.weight_decay, fused=cuda
        )
        self._generator = torch.Generator(target.device).manual_seed(options.seed)
        self._forward: Callable[..., Tensor] = torch.compile(network) if options.compile else network
        self._weights = slot_weights(network.config.num_drafts, options.gamma, target.device)

    def run(self, on_checkpoint: Callable[[], None], watcher: Watcher) -> None:
        """Train until steps or time are over. `on_checkpoint` is called now and then, and at the end."""
        options = self.options
        timed = options.steps is None
        total, done = (60 * (options.minutes or 0), self.seconds) if timed else (options.steps or 0, self.step)
        watcher.stage("train", total, done)
        means = _Means(self.network.config.num_drafts, self._target.device)
        begin = time.monotonic() - self.seconds
        saved = self.seconds
        while (progress := self._progress()) < 1:
            rate = options.rate * schedule(progress, options.warm_up)
            means.add(*self._take_step(rate))
            self.step += 1
            self.seconds = time.monotonic() - begin
            if self.step % options.report_steps == 0 or self._progress() >= 1:
                found = means.take()
                self.seconds = time.monotonic() - begin  # only now has the device caught up
                self.log.append(LogEntry(step=self.step, seconds=round(self.seconds, 3), rate=rate, **found))
                watcher.advance(self.seconds if timed else self.step, describe(self.log[-1]))
                # Here alone: a checkpoint between two entries would lose what the next one is a mean of.
                if self.seconds - saved >= options.checkpoint_s:
                    on_checkpoint()
                    saved = self.seconds
        on_checkpoint()

    def save(self, path: Path, material: Mapping[str, Any]) -> None:
        """Everything that the rest of training depends on. material: what identifies the texts."""
        state = {
            "options": asdict(self.options),
            "material": dict(material),
            "step": self.step,
            "seconds": self.seconds,
            "log": [asdict(entry) for entry in self.log],
            "network": self.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
        }
        with atomic_file(path) as sink:
            torch.save(state, sink)

    def load(self, path: Path, material: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. Raises RunMismatch if it is of other options or texts."""
        try:
            state = torch.load(path, map_location=self._target.device, weights_only=True)
        except Exception as error:  # torch raises what it likes
            raise UnsupportedModel(str(path), f"not a checkpoint: {error}; delete it to train anew") from error
        for field, asked in (("options", asdict(self.options)), ("material", dict(material))):
            for name, value in asked.items():
                if state[field].get(name) != value:
                    raise RunMismatch(path, name, state[field].get(name), value)
        self.step, self.seconds = state["step"], state["seconds"]
        self.log = [LogEntry(**entry) for entry in state["log"]]
        self.network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"].cpu())

    def _progress(self) -> float:
        """Share of training that is done, by steps or by time, whatever is further."""
        options = self.options
        by_steps = self.step / options.steps if options.steps else 0.0
        by_time = self.seconds / (60 * options.minutes) if options.minutes else 0.0
        return max(by_steps, by_time)

    def _take_step(self, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """Losses float32 [B, N, K], hits bool [B, N, K] and the gradient's norm."""
        options = self.options
        blocks = self._lessons.draw(options.batch_texts, options.num_anchors, self._generator)
        losses, hits, total = self._loss(blocks)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), options.max_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return losses, hits, norm

    def _loss(self, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
        """Unweighted losses, hits, and what is minimised."""
        hidden = predict(self._forward, self.network, self._target, blocks.features, blocks.anchors, blocks.anchor_ids)
        previous = torch.cat([blocks.anchor_ids[..., None], blocks.next_ids[..., :-1]], dim=-1)
        with mixed_precision(self._target):
            behind = self.network.behind(hidden, self._target.embed(previous))
        predictions = hidden if behind is hidden else torch.where(self._knows_before(hidden), behind, hidden)
        ids, probs = label_laws(blocks, self.options.soft_share)
        share, num_drafts = self.options.kept_share, blocks.next_ids.numel()
        found = head_loss(
            predictions.flatten(0, 1),
            self._target.head,
            ids.flatten(0, 1),
            probs.flatten(0, 1),
            self._weights * (1 - share) / num_drafts,
            self.options.reach_share,
            kept_law(blocks, share / num_drafts) if share else None,
        )
        shape = blocks.next_ids.shape
        return found.losses.view(shape), found.drafts.view(shape) == blocks.next_ids, found.total

    def _knows_before(self, hidden: Tensor) -> Tensor:
        """Which places may look at the token before them, bool [B, N, K, 1]: the first always, others mostly. A decoder
        picks candidates by what the rest of the network says alone."""
        known = torch.rand(hidden.shape[:3], generator=self._generator, device=hidden.device) < self.options.known_share
        known[..., 0] = True
        return known[..., None]


def predict(
    forward: Callable[..., Tensor],
    network: DFlashNetwork,
    target: Target,
    features: Tensor,  # [B, T, feature_size]
    anchors: Tensor,  # int64 [B, N], their positions
    anchor_ids: Tensor,  # int64 [B, N], their tokens
) -> Tensor:
    """Hidden states of the rows that predict drafts: [B, N, K, hidden_size]. On a GPU products are in bfloat16.

    forward: the network, or what it was compiled to.
    """
    config = network.config
    fed = target.embed(network.block_token_ids(anchor_ids))
    with mixed_precision(target):
        hidden = forward(features.to(target.compute_dtype), fed, anchors)
    return hidden.narrow(2, config.first_draft_row, config.num_drafts)


def mixed_precision(target: Target) -> torch.autocast:
    """Where products are in the target's compute dtype."""
    mixed = target.compute_dtype != torch.float32
    return torch.autocast(target.device.type, dtype=target.compute_dtype, enabled=mixed)


def label_laws(blocks: Blocks, soft_share: float) -> tuple[Tensor, Tensor]:
    """Ids int64 and probabilities [B, N, K, 1 + NUM_LABELS]: the text's token, and the law that it was drawn from.

    The law is the mean of the token over its draw, so the soft part of the loss has the gradient that the hard part has
    on average, with less noise; but it is the law at temperature 1, while the tokens are drawn from filtered ones.
    """
    law_ids, law_probs = blocks.laws
    ids = torch.cat([blocks.next_ids[..., None], law_ids.long()], dim=-1)
    hard = torch.full_like(law_probs[..., :1], 1 - soft_share)
    return ids, torch.cat([hard, soft_share * law_probs], dim=-1)


def kept_law(blocks: Blocks, weight: float) -> Kept:
    """What a request at T .8 top_p .95 draws from, of the B * N blocks: see `equivtest.training.loss.Kept`."""
    ids, probs = (column.flatten(0, 1) for column in blocks.laws)
    asked = CONFIGS["topp95"]
    sharp = (probs.float().clamp_min(torch.finfo(torch.float32).tiny).log() / asked.temperature).softmax(dim=-1)
    before = sharp.cumsum(dim=-1) - sharp  # the likeliest come first
    sharp = torch.where(before < asked.top_p, sharp, 0.0)
    return Kept(ids.long(), sharp / sharp.sum(dim=-1, keepdim=True), asked.temperature, weight)


def schedule(progress: float, warm_up: float) -> float:
    """Share of the peak rate: a linear rise, then a cosine to zero."""
    if progress < warm_up:
        return progress / warm_up
    return 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def describe(entry: LogEntry) -> str:
    """An entry on one line, for people."""
    return (
        f"step {entry.step:,}, loss {entry.loss:.3f}, accepted {entry.accepted:.2f} a block, "
        f"{entry.drafts_per_s:,.0f} drafts/s"
    )


class _Means:
    """Means over steps, added up on the device."""

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self._sums = torch.zeros(3 + num_drafts, device=device)
        self._num_steps = self._num_drafts = 0
        self._begin = time.monotonic()

    def add(self, losses: Tensor, hits: Tensor, norm: Tensor) -> None:
        """See `Loop._take_step`."""
        accepted = hits.cumprod(dim=-1).sum(dim=-1).float().mean()
        self._sums += torch.cat([torch.stack([losses.mean(), accepted, norm]), hits.float().mean(dim=(0, 1))])
        self._num_steps += 1
        self._num_drafts += hits.numel()

    def take(self) -> dict[str, Any]:
        """Fields of a LogEntry; waits for the device, and begins anew."""
        loss, accepted, norm, *accuracy = (self._sums / self._num_steps).tolist()
        drafts_per_s = self._num_drafts / max(time.monotonic() - self._begin, 1e-9)
        self._sums.zero_()
        self._num_steps = self._num_drafts = 0
        self._begin = time.monotonic()
        names = ("loss", "accepted", "accuracy", "norm", "drafts_per_s")
        return dict(zip(names, (loss, accepted, tuple(accuracy), norm, drafts_per_s), strict=True))
