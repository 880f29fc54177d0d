"""From logits to accepted tokens as an engine does it with FlashInfer: dense probabilities and dense one-hot drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from flashinfer import sampling
from torch import Tensor


def pieces(
    logits: Tensor,  # [B * (K + 1), vocab_size] on a CUDA device
    draft_token_ids: Tensor,  # int64 [B, K], there too
    temperature: float,
    top_p: float,
) -> Mapping[str, Callable[[], object]]:
    """The pipeline's pieces by name, to be called in this order: each works on what the one before it left.

    Every buffer is allocated here but those that FlashInfer's functions return.
    """
    device, (num_rows, vocab_size), (batch, max_draft) = logits.device, logits.shape, draft_token_ids.shape
    temperatures = torch.full((num_rows,), temperature, device=device)
    limits = torch.full((num_rows,), top_p, device=device)
    one_hot = torch.zeros(batch, max_draft, vocab_size, device=device)
    seed, offset = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
    accepted, emitted = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2))
    held: dict[str, Tensor] = {}

    def cast() -> None:
        held["logits"] = logits.float()

    def softmax() -> None:
        held["probs"] = sampling.softmax(held["logits"], temperatures)

    def top_p_renorm() -> None:
        held["law"] = sampling.top_p_renorm_probs(held["probs"], limits)

    def dense_one_hot() -> None:
        one_hot.zero_()
        one_hot.scatter_(2, draft_token_ids[:, :, None], 1.0)

    def chain() -> None:
        law = held["law"].view(batch, max_draft + 1, vocab_size)
        accepted.zero_()
        emitted.zero_()
        sampling.chain_speculative_sampling(
            one_hot, draft_token_ids.int(), law, accepted, emitted, seed=seed, offset=offset
        )

    return {"cast": cast, "softmax": softmax, "top_p renorm": top_p_renorm, "one-hot": dense_one_hot, "chain": chain}
