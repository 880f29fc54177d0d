"""Trains a small Llama on the CPU: next-token cross entropy, with a share of it on an early exit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

SEQUENCE, BATCH = 256, 16
"""Tokens of a training sequence; sequences of a step."""
PEAK_RATE, WARM_UP_STEPS, WEIGHT_DECAY, MAX_NORM = 3e-3, 100, 0.1, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model to train, and for how long."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_steps: int
    exit_weight: float
    """Of the cross entropy of the layer before the last, read through the final norm and the head; 0 for none."""

    def config(self) -> dict[str, Any]:
        """What a config.json holds, but for the vocabulary."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "max_position_embeddings": 2 * SEQUENCE,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
        }


def train(
    config: dict[str, Any], shape: Shape, texts: Sequence[Sequence[int]], *, seed: int, tell: Callable[[str], None]
) -> Any:
    """A LlamaForCausalLM in float32 whose weights are exact in bfloat16.

    texts: token ids. Every training sequence begins with a text and goes on with those that follow it. The result is
    the same for the same seed, torch version, kind of processor and number of threads.
    """
    from transformers import LlamaConfig, LlamaForCausalLM  # a test extra

    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    stream, starts = _stream(texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    begin = time.perf_counter()
    for step in range(shape.num_steps):
        optimizer.param_groups[0]["lr"] = PEAK_RATE * _rate(step, shape.num_steps)
        picked = starts[torch.randint(len(starts), (BATCH,))]
        loss = _loss(model, stream[picked[:, None] + torch.arange(SEQUENCE + 1)], shape.exit_weight)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if step % 50 == 0 or step == shape.num_steps - 1:
            elapsed = time.perf_counter() - begin
            tell(f"train: step {step} of {shape.num_steps}, loss {loss.item():.3f}, {elapsed:.0f} s")
    return model.to(torch.bfloat16).to(torch.float32).eval()


@torch.inference_mode()
def held_out_loss(model: Any, texts: Sequence[Sequence[int]]) -> float:
    """Mean cross entropy of a token, nats; each text on its own."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([text[:SEQUENCE]])
        total += float(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


def _stream(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """All texts one after another, and where each begins that has a whole sequence before the end."""
    lengths = torch.tensor([len(text) for text in texts])
    starts = lengths.cumsum(0) - lengths
    return torch.tensor([id_ for text in texts for id_ in text]), starts[starts + SEQUENCE < lengths.sum()]


def _loss(model: Any, ids: Tensor, exit_weight: float) -> Tensor:
    """ids: int64 [batch, SEQUENCE + 1]."""
    output = model(ids[:, :-1], output_hidden_states=True)
    targets = ids[:, 1:].flatten()
    loss = cross_entropy(output.logits.flatten(0, 1), targets)
    if exit_weight:
        early = model.lm_head(model.model.norm(output.hidden_states[-2]))
        loss = loss + exit_weight * cross_entropy(early.flatten(0, 1), targets)
    return loss


def _rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP_STEPS) / (num_steps - WARM_UP_STEPS)))
