"""Sums over pairs within an arm, in panels, are those of the whole matrix to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.stats.joint_statistics import _PANEL_ROWS, _equal_tokens, _within


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("num_samples", [4, _PANEL_ROWS, _PANEL_ROWS + 1, 3 * _PANEL_ROWS - 7])
def test_pairs_within_an_arm_are_summed_exactly(num_samples: int, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(0)
    kernel = _equal_tokens(rng.integers(0, 3, (num_samples, 32))).astype(dtype)
    labels = rng.permuted(np.tile(np.arange(num_samples)[:, None] % 2, (1, 50)), axis=0).astype(np.float64)
    whole = np.einsum("ib,ij,jb->b", labels, kernel.astype(np.float64), labels)
    np.testing.assert_array_equal(_within(kernel, labels), whole)
    kernel[-1, 0] = kernel[0, -1] = kernel[0, -1] + 1
    both = labels[0] * labels[-1]
    assert both.any()
    np.testing.assert_array_equal(_within(kernel, labels), whole + 2 * both)
