"""Drafts of a block, each depending on the one before: the definition that other backends are compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

STRIPES = 128
"""Candidates of a place: of the tokens with one remainder by this number, the likeliest. Neighbours in a vocabulary are
about as frequent and so lie in different stripes. What a stripe hides makes a draft worse, never a law wrong."""


def stripe_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of every stripe, and its token, the lowest of equals.

    logits: [..., vocab_size]. Returns float32 and int64 [..., min(STRIPES, vocab_size)].
    """
    vocab_size = logits.shape[-1]
    stripes = min(STRIPES, vocab_size)
    padded = functional.pad(logits.float(), (0, -vocab_size % stripes), value=-torch.inf)
    values, rows = padded.view(*logits.shape[:-1], -1, stripes).max(dim=-2)
    return values, rows * stripes + torch.arange(stripes, device=logits.device)


def markov_drafts(logits: Tensor, gates: Tensor, anchors: Tensor, successors: Tensor, head: Tensor) -> Tensor:
    """See `equivtest.kernels.contract.LayerOps.markov_drafts`."""
    values, candidates = stripe_maxima(logits)
    previous, drafts = anchors, []
    for place in range(logits.shape[1]):
        tokens = candidates[:, place]
        states = gates[:, place].float() * successors[previous].float()
        scores = values[:, place] + torch.einsum("bch,bh->bc", head[tokens].float(), states)
        previous = tokens.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
        drafts.append(previous)
    return torch.stack(drafts, dim=1)
