"""Weights laid out ahead of time give the products of torch's own linear."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from equivtest.kernels.linear import Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 257])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 32), (49, 33), (3, 576)])
def test_products_are_those_of_functional_linear(
    dtype: torch.dtype, num_rows: int, out_features: int, in_features: int
) -> None:
    """Compared with float64 on the same rounded inputs: half a unit in the last place of the largest product."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    exact = functional.linear(x.double(), weight.double())
    product = Linear(weight)(x)
    assert product.dtype == dtype
    assert product.shape == (num_rows, out_features)
    tolerance = torch.finfo(dtype).eps * float(exact.abs().max()) * (4 if dtype == torch.float32 else 0.51)
    assert float((product.double() - exact).abs().max()) <= tolerance


def test_a_product_may_be_changed_in_place() -> None:
    linear = Linear(torch.eye(32).bfloat16())
    x = torch.ones(3, 32).bfloat16()
    linear(x).add_(x)
    assert torch.equal(linear(x), x)
