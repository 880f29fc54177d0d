"""The layers of a transformer in plain torch, on any device: the definition that other backends are compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from equivtest.kernels.linear import Linear


class TorchLayers:
    """See `equivtest.kernels.contract.LayerOps`."""

    def linear(self, weight: Tensor) -> Linear:
        return Linear(weight)

    def head(self, x: Tensor, weight: Linear) -> Tensor:
        return weight(x)

    def rms_norm(self, hidden: Tensor, norm: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        normed: Tensor = (wide * scale).to(hidden.dtype).mul_(norm)
        return normed

    def normed_linear(self, hidden: Tensor, norm: Tensor, eps: float, weight: Linear) -> Tensor:
        return weight(self.rms_norm(hidden, norm, eps))

    def normed_gate(self, hidden: Tensor, norm: Tensor, eps: float, weight: Linear) -> Tensor:
        gate, up = self.normed_linear(hidden, norm, eps, weight).chunk(2, dim=-1)
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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
