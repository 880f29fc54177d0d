"""The layers of a transformer in plain torch, on any device: the definition that other backends are compared with."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from equivtest.kernels.linear import Linear
from equivtest.kernels.markov import markov_drafts


class NormedLinear(NamedTuple):
    """A product of RMSNorm's output."""

    norm: Tensor
    product: Linear


class TorchLayers:
    """See `equivtest.kernels.contract.LayerOps`. The residual stream is a tensor in the model's dtype."""

    def linear(self, weight: Tensor, norm: Tensor | None = None) -> Linear | NormedLinear:
        return Linear(weight) if norm is None else NormedLinear(norm, Linear(weight))

    def head(self, x: Tensor, weight: Linear) -> Tensor:
        return weight(x)

    def residual(self, rows: Tensor) -> Tensor:
        return rows

    def rows(self, hidden: Tensor) -> Tensor:
        return hidden

    def rms_norm(self, hidden: Tensor, norm: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        normed: Tensor = (wide * scale).to(hidden.dtype).mul_(norm)
        return normed

    def normed_linear(self, hidden: Tensor, eps: float, weight: NormedLinear) -> Tensor:
        return weight.product(self.rms_norm(hidden, weight.norm, eps))

    def normed_gate(self, hidden: Tensor, eps: float, weight: NormedLinear) -> Tensor:
        gate, up = self.normed_linear(hidden, eps, weight).chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Linear) -> Tensor:
        return weight(x).add_(hidden)

    def rotate_and_store(
        self,
        heads: Tensor,
        rotary: tuple[Tensor, Tensor],
        positions: Tensor,
        query_key_norm: Tensor | None,
        eps: float,
        kv_pages: Tensor,
        slots: Tensor,
    ) -> Tensor:
        _, _, page_size, num_kv_heads, _ = kv_pages.shape
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated, value = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if query_key_norm is not None:
            rotated = self.rms_norm(rotated, query_key_norm, eps)
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in rotary)
        rotated = _rotate(rotated, cos, sin)
        # Rows of the pages seen as [num_pages * 2 * page_size, ...]: a page's keys, then its values.
        rows = kv_pages.flatten(0, 2)
        key_rows = slots + torch.div(slots, page_size, rounding_mode="floor") * page_size
        rows.index_copy_(0, key_rows, rotated[:, num_heads:])
        rows.index_copy_(0, key_rows + page_size, value)
        return rotated[:, :num_heads].contiguous()

    markov_drafts = staticmethod(markov_drafts)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
