"""The loss of a block: cross entropy of the target's own next tokens, slot by slot, through the shared head.

The head's product with the vocabulary is most of the work and its logits most of the memory. The head is frozen, so the
gradient of a row's hidden state is (q - p) @ head, with q the drafter's law and p the label's: it is computed beside
the loss, a chunk of rows at a time, and no logits are kept or computed twice.

Cross entropy asks for all of the target's law. What a request keeps of drafts that are drawn from q asks for less: of
slot k, a_k = sum over tokens of min(p, q), the chance of the chain rule (arXiv 2211.17192); of a block, the sum over k
of the products a_0 .. a_k. `Kept` makes that a part of the loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_ENTRIES = 1 << 28
"""Most logits at a time: bounds the memory, not the result."""


class BlockLoss(NamedTuple):
    """What came out for K places of each of N blocks."""

    total: Tensor
    """Sum of the places' weighted losses, nats; only its gradient counts."""
    losses: Tensor
    """float32 [N, K], unweighted."""
    drafts: Tensor
    """int64 [N, K], the likeliest token of each place under the drafter."""


class Kept(NamedTuple):
    """Asks for drafts that are kept when they are drawn: by these laws, of requests at one temperature."""

    token_ids: Tensor
    """int64 [N, K, L], each once in a place."""
    probs: Tensor
    """[N, K, L], what the requests draw from."""
    temperature: float
    """At which the drafter draws too."""
    weight: float
    """Of a draft that is not kept, in `BlockLoss.total`."""


def slot_weights(num_slots: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """float32 [num_slots], of mean 1, proportional to exp(-k / gamma) at slot k = 0, 1, .. as in arXiv 2602.06036."""
    weights = torch.exp(-torch.arange(num_slots, dtype=torch.float32, device=device) / gamma)
    return weights / weights.mean()


def head_loss(
    hidden: Tensor,  # [N, K, hidden_size], of N blocks' K places
    head: Tensor,  # [vocab_size, hidden_size], frozen
    label_ids: Tensor,  # int64 [N, K, L], the text's token first
    label_probs: Tensor,  # [N, K, L], a law in each place; an id may stand in it twice
    weights: Tensor,  # float32 [K]
    reach_share: float = 0.0,
    kept: Kept | None = None,
) -> BlockLoss:
    """Cross entropy of each place's law under softmax(hidden @ head.T); hidden is rounded to the head's dtype.

    reach_share: in 0..1, this share of a place's weight counts only where all drafts before it are the text's: a
    decoder throws away what stands behind a wrong one. kept: another part of the loss, expected drafts of a block that
    are not kept.
    """
    return BlockLoss(*_HeadLoss.apply(hidden, head, label_ids, label_probs, weights, reach_share, kept))  # type: ignore[no-untyped-call]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        label_ids: Tensor,
        label_probs: Tensor,
        weights: Tensor,
        reach_share: float,
        kept: Kept | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks, num_slots = hidden.detach().to(head.dtype), hidden.shape[1]
        gradient = torch.empty_like(blocks)
        losses = torch.empty(hidden.shape[:2], dtype=torch.float32, device=hidden.device)
        drafts = torch.empty(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(blocks), chunk := max(1, _CHUNK_ENTRIES // (len(head) * num_slots))):
            part = slice(start, start + chunk)
            ids, probs = label_ids[part].flatten(0, 1), label_probs[part].flatten(0, 1)
            logits = blocks[part].flatten(0, 1) @ head.T
            torch.argmax(logits, dim=-1, out=drafts[part].view(-1))
            law = torch.softmax(logits, dim=-1)
            surprisal = -law.gather(1, ids).float().clamp_min(torch.finfo(torch.float32).tiny).log()
            losses[part] = (probs.float() * surprisal).sum(dim=-1).view(-1, num_slots)
            each = weights * ((1 - reach_share) + reach_share * reached(drafts[part] == label_ids[part, :, 0]))
            total += (losses[part] * each).sum()
            slope = law.scatter_add_(1, ids, -probs.to(law.dtype)).mul_(each.view(-1, 1).to(law.dtype))
            if kept is not None:
                total += _add_kept(slope, logits, kept, part)
            torch.mm(slope, head, out=gradient[part].flatten(0, 1))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses, drafts)
        return total, losses, drafts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], *(None,) * 6


def _add_kept(slope: Tensor, logits: Tensor, kept: Kept, part: slice) -> Tensor:
    """The part of the loss that `kept` asks for, of the blocks `part`; its gradient is added to `slope`.

    slope, logits: [n * K, vocab_size].
    """
    ids, wanted = kept.token_ids[part], kept.probs[part].float()
    law = torch.softmax(logits.float() / kept.temperature, dim=-1)
    given = law.gather(1, ids.flatten(0, 1)).view(ids.shape)
    overlaps = torch.minimum(given, wanted).sum(dim=-1)
    reach = overlaps.cumprod(dim=1)
    # Of the block's sum by the overlap of slot k: all terms from k on have it as a factor.
    factors = reach.flip(1).cumsum(dim=1).flip(1) / overlaps.clamp_min(torch.finfo(torch.float32).tiny)
    # An overlap grows where q is below p, and the law's slope is q (1[token] - q).
    pulled = torch.where(given < wanted, given, 0.0) * (factors * kept.weight / kept.temperature)[..., None]
    # In float32, for a sure token's two parts all but cancel.
    law.mul_(pulled.sum(dim=-1).view(-1, 1)).scatter_add_(1, ids.flatten(0, 1), -pulled.flatten(0, 1))
    slope.add_(law)
    return kept.weight * (overlaps.numel() - reach.sum())


def reached(hits: Tensor) -> Tensor:
    """Of hits, bool [N, K]: float32 [N, K], 1 where every slot before is a hit."""
    before = torch.ones_like(hits)
    before[:, 1:] = hits[:, :-1]
    return before.cumprod(dim=1).float()
