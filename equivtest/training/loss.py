"""The loss of a block: cross entropy of the target's own next tokens, slot by slot, through the shared head.

The head's product with the vocabulary is most of the work and its logits most of the memory. The head is frozen, so the
gradient of a row's hidden state is (q - p) @ head, with q the drafter's law and p the label's: it is computed beside
the loss, a chunk of rows at a time, and no logits are kept or computed twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_ENTRIES = 1 << 28
"""Most logits at a time: bounds the memory, not the result."""


class BlockLoss(NamedTuple):
    """What came out for R rows."""

    total: Tensor
    """Sum of the rows' weighted losses, nats; only its gradient counts."""
    losses: Tensor
    """float32 [R], unweighted."""
    drafts: Tensor
    """int64 [R], the likeliest token of each row under the drafter."""


def slot_weights(num_slots: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """float32 [num_slots], of mean 1, proportional to exp(-k / gamma) at slot k = 0, 1, .. as in arXiv 2602.06036."""
    weights = torch.exp(-torch.arange(num_slots, dtype=torch.float32, device=device) / gamma)
    return weights / weights.mean()


def head_loss(
    hidden: Tensor,  # [R, hidden_size]
    head: Tensor,  # [vocab_size, hidden_size], frozen
    label_ids: Tensor,  # int64 [R, L]
    label_probs: Tensor,  # [R, L], a law in each row; an id may stand in it twice
    weights: Tensor,  # float32 [R]
) -> BlockLoss:
    """Cross entropy of each row's law under softmax(hidden @ head.T); hidden is rounded to the head's dtype."""
    return BlockLoss(*_HeadLoss.apply(hidden, head, label_ids, label_probs, weights))  # type: ignore[no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, label_ids: Tensor, label_probs: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden.detach().to(head.dtype)
        gradient = torch.empty_like(rows)
        losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        drafts = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        for start in range(0, len(rows), chunk := max(1, _CHUNK_ENTRIES // len(head))):
            part = slice(start, start + chunk)
            ids, probs = label_ids[part], label_probs[part]
            logits = rows[part] @ head.T
            torch.argmax(logits, dim=-1, out=drafts[part])
            law = torch.softmax(logits, dim=-1)
            surprisal = -law.gather(1, ids).float().clamp_min(torch.finfo(torch.float32).tiny).log()
            losses[part] = (probs.float() * surprisal).sum(dim=-1)
            torch.mm(law.scatter_add_(1, ids, -probs.to(law.dtype)), head, out=gradient[part])
        ctx.save_for_backward(gradient.mul_(weights[:, None]))
        ctx.mark_non_differentiable(losses, drafts)
        return (losses * weights).sum(), losses, drafts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None
