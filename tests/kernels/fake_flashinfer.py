"""What FlashInfer's sampling functions do, in torch on the CPU: which coins they draw and what they do with them.

Written from the kernels of 0.6.13 and 0.7.4, of which it has the differences that reach a caller: whose seeds are
read, how far a generator advances by itself, which drafts the telemetry counts, and what is put out where nothing is
left to draw from: nothing in 0.7.4, here nothing in either.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equivtest.kernels.flashinfer import FlashInferBackend
from equivtest.rng import Purpose, uniforms
from tests.kernels.chain_law import draw

VERSIONS = ("0.6.13", "0.7.4")


class FakeSampling:
    """`flashinfer.sampling`; `calls` holds the name, seeds, offsets and number of coins of every call that drew."""

    def __init__(self, version: str) -> None:
        self.old = version == "0.6.13"
        self.calls: list[tuple[str, list[int], list[int], int]] = []
        self.coin: float | None = None
        """What every coin shows; None: what it does."""
        self._offsets: dict[int, int] = {}

    def softmax(self, logits: Tensor, temperature: Tensor, *, enable_pdl: bool | None = None) -> Tensor:
        return (logits / temperature[:, None]).softmax(dim=-1)

    def top_k_renorm_probs(self, probs: Tensor, top_k: Tensor) -> Tensor:
        kth = probs.sort(dim=1, descending=True).values.gather(1, top_k.long()[:, None] - 1)
        kept = probs * (probs >= kth)
        return kept / kept.sum(dim=1, keepdim=True)

    def top_p_renorm_probs(self, probs: Tensor, top_p: Tensor) -> Tensor:
        in_order = probs.sort(dim=1, descending=True).values
        enough = (in_order.double().cumsum(dim=1) >= top_p.double()[:, None]).int().argmax(dim=1, keepdim=True)
        kept = probs * (probs >= in_order.gather(1, enough))
        return kept / kept.sum(dim=1, keepdim=True)

    def sampling_from_probs(self, probs: Tensor, *, seed: Tensor, offset: Tensor) -> Tensor:
        u = self._coins("sample", seed, offset, len(probs), 1)[:, 0]
        return torch.from_numpy(draw(probs.double().numpy(), u)).int()

    def chain_speculative_sampling(
        self,
        draft_probs: Tensor,
        draft_token_ids: Tensor,
        target_probs: Tensor,
        maybe_output_accepted_token_num: Tensor | None = None,
        maybe_output_emitted_draft_token_num: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        seed: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, width = draft_token_ids.shape
        counters = (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
        telemetry, emitted = (torch.zeros(batch, dtype=torch.int32) if c is None else c for c in counters)
        if seed is None or offset is None:
            assert generator is not None
            seed, offset = self._advance(generator, batch * (width + (1 if self.old else 2)))
        u = self._coins("chain", seed, offset, batch, width + 2)
        ids = draft_token_ids.long()[:, :, None]
        p, q = target_probs[:, :-1].gather(2, ids)[:, :, 0].numpy(), draft_probs.gather(2, ids)[:, :, 0].numpy()
        kept = u[:, :width] * q < p
        count = kept.cumprod(axis=1).sum(axis=1)
        slots = np.arange(width)
        # Past the first rejection, and in old versions at it, a draft is counted by the coin after its own.
        again = u[:, 1 : width + 1] * q < p
        past = slots >= count[:, None] if self.old else slots > count[:, None]
        telemetry += torch.from_numpy(count + (again & past).sum(axis=1)).int()
        emitted += torch.from_numpy(count).int()
        rows = np.arange(batch)
        weights = target_probs.double().numpy()[rows, count]
        q_rows = draft_probs.double().numpy()[rows, np.minimum(count, width - 1)]
        weights = np.where((count < width)[:, None], np.maximum(weights - q_rows, 0), weights)
        below_one = np.minimum(np.where(count < width, u[:, width + 1], u[:, width]), 1 - 2.0**-24)
        last = draw(weights, below_one)
        last = np.where(weights.any(axis=1), last, -1)
        tokens = np.full((batch, width + 1), -1)
        tokens[:, :width] = np.where(slots < count[:, None], draft_token_ids.numpy(), -1)
        tokens[rows, count] = last
        return torch.from_numpy(tokens).int(), telemetry, emitted

    def _advance(self, generator: torch.Generator, increment: int) -> tuple[Tensor, Tensor]:
        seed = generator.initial_seed()
        offset = self._offsets.get(seed, 0)
        self._offsets[seed] = offset + (increment + 3) // 4 * 4
        return torch.tensor([seed]), torch.tensor([offset])

    def _coins(self, name: str, seed: Tensor, offset: Tensor, batch: int, count: int) -> np.ndarray:
        """[batch, count]; every row has a stream of its own whatever its seed, as in FlashInfer."""
        self.calls.append((name, seed.tolist(), offset.tolist(), count))
        read = slice(0, 1) if self.old else slice(None)
        with np.errstate(over="ignore"):
            keys = seed.numpy()[read] ^ (np.arange(batch) * np.int64(0x9E3779B97F4A7C1))
        positions = offset.numpy()[read].repeat(batch) if len(offset[read]) == 1 else offset.numpy()
        u = uniforms(keys[:, None], positions[:, None] + np.arange(count), Purpose.PLAIN)
        return u if self.coin is None else np.full_like(u, self.coin)


class OnCpu(FlashInferBackend):
    """The backend with a fake FlashInfer."""

    capabilities = dataclasses.replace(FlashInferBackend.capabilities, devices=frozenset({"cpu"}))

    def __init__(self, version: str) -> None:
        self.fake: Any = FakeSampling(version)
        super().__init__(SimpleNamespace(__version__=version, sampling=self.fake))
