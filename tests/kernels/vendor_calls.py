"""Calls of the FlashInfer backend that tests make on the CPU with a fake FlashInfer and on a GPU with the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from equivtest.kernels.contract import KernelBackend, RowParams, SpecAccept, SpecScratch, Streams
from equivtest.records import SamplingParams
from equivtest.rng import stream_key

Chain = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(draft_token_ids int64 [1, K], target_probs [1, K+1, vocab_size]) to output tokens [1, K+1] and emitted [1]."""

NUM_ROUNDS = 2000


def device_of(backend: KernelBackend) -> str:
    """A GPU where the backend has nothing else."""
    return "cuda" if backend.capabilities.devices == {"cuda"} else "cpu"


def keys(batch: int, name: str = "row") -> Tensor:
    return torch.tensor([stream_key(name, row) for row in range(batch)])


def chain(
    backend: KernelBackend,
    draft_token_ids: np.ndarray,
    p: np.ndarray,
    q: np.ndarray | None,
    *,
    num_draft: np.ndarray | None = None,
    scratch: SpecScratch | None = None,
) -> SpecAccept:
    """spec_accept of many rows with the same laws p [K+1, V] and q [K, V]; None: sure drafts. On the host."""
    batch, width = draft_token_ids.shape
    device = device_of(backend)
    scratch = scratch or SpecScratch(batch, width, p.shape[1], device)

    def rows(table: np.ndarray) -> Tensor:
        return torch.tensor(table, dtype=torch.float32, device=device).expand(batch, *table.shape)

    result = backend.spec_accept(
        torch.tensor(draft_token_ids, device=device),
        torch.tensor(np.full(batch, width) if num_draft is None else num_draft, dtype=torch.int32, device=device),
        rows(p),
        None if q is None else rows(q),
        Streams(torch.arange(batch, device=device) * 7919, torch.zeros(batch, dtype=torch.int64, device=device)),
        scratch=scratch,
    )
    return SpecAccept(*(column.cpu() for column in result[:3]))


def law(backend: KernelBackend, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """verify_probs into a new tensor, on the host."""
    logits = logits.to(device_of(backend))
    out = torch.full(logits.shape, torch.nan, dtype=backend.capabilities.probs_dtype, device=logits.device)
    return backend.verify_probs(logits, RowParams.of(params, logits.device), out=out).cpu()


def explicit(backend: KernelBackend) -> Chain:
    """The backend's own wiring."""
    device = device_of(backend)
    scratch = SpecScratch(1, 3, 256, device)
    streams = Streams(keys(1, "lag").to(device), torch.zeros(1, dtype=torch.int64, device=device))
    num_draft = torch.full((1,), 3, dtype=torch.int32, device=device)

    def accept(draft_token_ids: Tensor, target_probs: Tensor) -> tuple[Tensor, Tensor]:
        result = backend.spec_accept(draft_token_ids, num_draft, target_probs, None, streams, scratch=scratch)
        return result.output_token_ids.clone(), result.emitted.clone()

    return accept


def lag_correlation(accept: Chain, device: str) -> tuple[float, int]:
    """Rank correlation of a recovered token's id with whether the next round keeps its first draft, and the pairs.

    Rounds of batch 1 and K 3. Drafts are token 0, kept half the time; the residual is uniform over 255 other tokens, so
    a recovered id tells the coin that drew it. If that coin is the next round's first, the correlation is that of a
    uniform with its being below its median: -sqrt(3) / 2. If not, it is 0 with a standard error of 1 / sqrt(pairs).
    """
    p = torch.full((1, 4, 256), 0.5 / 255, device=device)
    p[..., 0] = 0.5
    draft_token_ids = torch.zeros((1, 3), dtype=torch.int64, device=device)
    rounds = [accept(draft_token_ids, p) for _ in range(NUM_ROUNDS)]
    tokens = torch.cat([tokens for tokens, _ in rounds]).cpu().numpy()
    emitted = torch.cat([emitted for _, emitted in rounds]).cpu().numpy()
    recovered = np.flatnonzero(emitted[:-1] < 3)
    ids = tokens[recovered, emitted[recovered]]
    kept = emitted[recovered + 1] > 0
    return float(stats.spearmanr(ids, kept).statistic), len(recovered)
