"""Drafts of a block, each depending on the one before: the definition that other backends are compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from equivtest.kernels.contract import BlockDrafts, RowParams, Streams
from equivtest.rng import Purpose, uniforms

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


def markov_drafts(
    logits: Tensor,
    gates: Tensor,
    successors: Tensor,
    head: Tensor,
    law: RowParams | None = None,
    streams: Streams | None = None,
) -> BlockDrafts:
    """See `equivtest.kernels.contract.LayerOps.markov_drafts`."""
    scores, candidates = stripe_maxima(logits)
    drafts: list[Tensor] = []
    laws: list[Tensor] = []
    for place in range(logits.shape[1]):
        tokens, ranked = candidates[:, place], scores[:, place]
        if drafts:
            ranked = ranked + _behind(drafts[-1], tokens, gates[:, place], successors, head)
        if law is None or streams is None:
            drafts.append(tokens.gather(1, ranked.argmax(dim=-1, keepdim=True))[:, 0])
        else:
            laws.append(candidate_law(ranked, law))
            drafts.append(_drawn(tokens, laws[-1], Streams(streams.keys, streams.positions + place)))
    token_ids = torch.stack(drafts, dim=1)
    return BlockDrafts(token_ids, candidates, torch.stack(laws, dim=1)) if laws else BlockDrafts(token_ids, None, None)


def markov_law(
    logits: Tensor,
    gates: Tensor,
    successors: Tensor,
    head: Tensor,
    law: RowParams,
    previous: Tensor,
    opens: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `equivtest.kernels.contract.LayerOps.markov_law`."""
    scores, candidates = stripe_maxima(logits)
    behind = _behind(previous, candidates, gates, successors, head)
    return candidates, candidate_law(torch.where(opens[:, None], scores, scores + behind), law)


def _behind(previous: Tensor, tokens: Tensor, gates: Tensor, successors: Tensor, head: Tensor) -> Tensor:
    """What the tokens before (int64 [B]) add to the scores of candidates [B, C]: float32 [B, C]."""
    states = gates.float() * successors[previous].float()
    return torch.einsum("bch,bh->bc", head[tokens].float(), states)


def candidate_law(scores: Tensor, law: RowParams) -> Tensor:
    """What the law of the house makes of these candidates alone: float32 [B, C], computed in float64.

    scores: float32 [B, C], logits. law: of B rows.
    """
    temperature, top_k, top_p, min_p = (column[:, None] for column in law)
    wide = scores.double()
    largest = wide.amax(dim=-1, keepdim=True)
    mass = ((wide - largest) / torch.where(temperature > 0, temperature, 1).double()).exp()
    above = scores[:, None, :] > scores[:, :, None]  # [B, C, C], those that rank before
    mass = torch.where((top_k == 0) | (above.sum(dim=-1) < top_k), mass, 0.0)
    before = (above * mass[:, None, :]).sum(dim=-1)
    kept = (before < top_p.double() * mass.sum(dim=-1, keepdim=True)) & (mass >= min_p.double())
    mass = torch.where(kept, mass, 0.0)
    sure = functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).double()
    return torch.where(temperature > 0, mass / mass.sum(dim=-1, keepdim=True), sure).float()


def _drawn(tokens: Tensor, probs: Tensor, streams: Streams) -> Tensor:
    """int64 [B], drawn with the DRAFT coin of each position by inverse distribution function in vocabulary order."""
    order = tokens.argsort(dim=-1)
    cumulative = probs.gather(1, order).double().cumsum(dim=-1)
    coins = torch.from_numpy(uniforms(streams.keys.cpu().numpy(), streams.positions.cpu().numpy(), Purpose.DRAFT))
    thresholds = coins.to(probs.device)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, thresholds, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())  # a product may round up to the sum itself
    return tokens.gather(1, order.gather(1, torch.minimum(chosen, last)))[:, 0]
