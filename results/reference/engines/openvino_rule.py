"""OpenVINO GenAI's rule for the drafts of a draft model, as its source has it, and put right: for `equivtest kernel`.

    equivtest kernel openvino_rule:as_it_is --no-one-hot
    equivtest kernel openvino_rule:put_right --no-one-hot     with the ratio, the coin and the row put right

Source: openvino.genai, src/cpp/src/sampling/sampler.cpp at da1db864d: validate_candidate, get_p_prime and
sample_from_sequence_group. A function gets draft_token_ids [B, K], draft_probs [B, K, V] and target_probs
[B, K+1, V], and gives ids [B, K+1] padded with -1.
"""

from __future__ import annotations

import torch


def as_it_is(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """A draft is kept by its own probability over that of another token, which the target was asked for; the coin is
    one of 101. What follows a rejected draft is drawn from the row behind it, which has read that draft."""
    own = torch.stack([_draw(target_probs[:, i], generator) for i in range(target_probs.shape[1])], dim=1)
    drafted = draft_probs.gather(2, draft_token_ids[..., None])[..., 0]
    drawn = target_probs[:, :-1].gather(2, own[:, :-1, None])[..., 0]
    coins = torch.randint(0, 101, drafted.shape, generator=generator, device=drafted.device) / 100
    return _put_out(draft_token_ids, coins <= drafted / drawn, recovered=own[:, 1:], bonus=own[:, -1])


def put_right(
    draft_token_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """A draft is kept with p/q, and what follows a rejected one comes from max(0, p - q) of its own row."""
    target = target_probs[:, :-1]
    p, q = (probs.gather(2, draft_token_ids[..., None])[..., 0] for probs in (target, draft_probs))
    coins = torch.rand(p.shape, generator=generator, device=p.device, dtype=torch.float64)
    rest = (target - draft_probs).clamp(min=0)
    rest = torch.where(rest.sum(2, keepdim=True) > 0, rest, target)  # q = p: never asked for
    recovered = torch.stack([_draw(rest[:, i], generator) for i in range(rest.shape[1])], dim=1)
    return _put_out(draft_token_ids, coins < p / q, recovered, bonus=_draw(target_probs[:, -1], generator))


def _draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def _put_out(
    drafts: torch.Tensor, accepted: torch.Tensor, recovered: torch.Tensor, bonus: torch.Tensor
) -> torch.Tensor:
    emitted = accepted.long().cumprod(dim=1).sum(dim=1)
    places = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    last = torch.cat([recovered, bonus[:, None]], dim=1).gather(1, emitted[:, None])
    ids = torch.where(places < emitted[:, None], padded, -1)
    return torch.where(places == emitted[:, None], last, ids)
