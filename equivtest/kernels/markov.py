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
    logits: Tensor,  # [N, vocab_size]
    gates: Tensor,  # [N, hidden_size]; 0 at the first place of a block, whose logits know the token before already
    successors: Tensor,  # [vocab_size, hidden_size]
    head: Tensor,  # [vocab_size, hidden_size]
    law: RowParams,  # [N]
    previous: Tensor,  # int64 [N], the token before each place
    out: Tensor,  # [N, vocab_size]
) -> Tensor:
    """What `markov_drafts` draws from at places behind given tokens. Written to `out` and returned."""
    scores, candidates = stripe_maxima(logits)
    probs = candidate_law(scores + _behind(previous, candidates, gates, successors, head), law)
    return out.zero_().scatter_add_(1, candidates, probs.to(out.dtype))


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
    ascending, order = (-scores).sort(dim=-1)
    num_above = torch.searchsorted(ascending, -scores)  # equals count for none of them
    mass = torch.where((top_k == 0) | (num_above < top_k), mass, 0.0)
    before = functional.pad(mass.gather(1, order).cumsum(dim=-1), (1, 0)).gather(1, num_above)
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
