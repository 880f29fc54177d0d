"""Whether a token that a filter removes lies so close to the cut that rounding may have put it inside."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.stages import Int64Array
from equivtest.kernels.contract import KernelBackend, RowParams
from equivtest.records import SamplingParams

TOLERANCE_ULPS: Mapping[torch.dtype, int] = {torch.float32: 64, torch.bfloat16: 4}
"""How far the same logit may differ between two forwards of different shape, in units in the last place of the model's
dtype at the row's largest logit. A float32 forward loses a few of them in every layer; in bfloat16 the final rounding
outweighs what came before."""


def logit_tolerance(logits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """float32 [n]: how far each logit of a row [n, vocab_size] may be from the one that was sampled from.

    dtype: the model's, where its logits have another.
    """
    dtype = dtype or logits.dtype
    largest = logits.float().masked_fill(~logits.isfinite(), 0.0).abs().amax(dim=1)
    return TOLERANCE_ULPS.get(dtype, TOLERANCE_ULPS[torch.bfloat16]) * torch.finfo(dtype).eps * largest


def within_tolerance(
    backend: KernelBackend,
    logits: Tensor,
    token_ids: Int64Array,
    params: SamplingParams,
    *,
    raw: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> npt.NDArray[np.bool_]:
    """[n] whether logits that differ by at most d from these, each in its own way, keep the token.

    logits: [n, vocab_size]; token_ids: [n], a token that the law of its row filters out. raw: the model's logits, where
    `logits` are processed ones. d is the `logit_tolerance` of the model's (and of its dtype), stretched as the
    repetition penalty does.
    No such logits are better for the token than its own d higher and all others d lower. For top-k, min-p and the
    argmax, which compare it with others, that is its own 2 d higher. Top-p compares the mass M above it with top_p: the
    odds of M fall by at most exp(2 d / temperature), which is the same as raising the odds of top_p by that. So the law
    is evaluated once more with both.
    """
    device, raised = logits.device, logits.float().clone()
    place = torch.arange(len(raised), device=device), torch.from_numpy(token_ids).to(device)
    stretch = max(params.repetition_penalty, 1 / params.repetition_penalty)
    twice = 2 * stretch * logit_tolerance(logits if raw is None else raw, dtype)
    raised[place] += twice
    row_params = RowParams.of([params] * len(raised), device)
    if params.top_p < 1 and not params.greedy:
        fall = torch.exp(-twice / params.temperature)
        row_params = row_params._replace(top_p=params.top_p / (params.top_p + (1 - params.top_p) * fall))
    probs = backend.verify_probs(
        raised, row_params, out=torch.empty_like(raised, dtype=backend.capabilities.probs_dtype)
    )
    kept: npt.NDArray[np.bool_] = (probs[place] > 0).cpu().numpy()
    return kept
