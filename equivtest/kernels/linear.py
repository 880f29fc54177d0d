"""A matrix product with fixed weights, laid out once for this machine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """x @ weight.T for x [num_rows, in_features]; weight: [out_features, in_features].

    bfloat16 weights on a CPU are brought into oneDNN's blocked layout when they are loaded: functional.linear would do
    it again in every call, a quarter of the time of a batch of 256 rows. The products are the same to the last bit.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _onednn_has_bfloat16()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return product
        return functional.linear(x, self._weight)


def _onednn_has_bfloat16() -> bool:
    return bool(torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())
