"""spec_accept and sample: the law of every output position, and planted errors that the same test rejects.

Each test compares 200,000 rows (20,000 on a GPU, where each costs a block of threads) with the exact law by
chi-squared, at every output position. Seeds are fixed. A position is rejected at p < 5e-9; no more than 170 positions
are tested in this file, so the false-alarm rate of all the tests that pass correct kernels together is below 1e-6
(Bonferroni).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equivtest.kernels.contract import KernelBackend

from .calls import accept, streams
from .chain_law import Fault, draw_drafts, p_value, position_laws, simulate, tables

NUM_ROWS = 200_000
REJECT_BELOW = 5e-9
VOCAB = 7


def smallest_p_value(output: np.ndarray, p: np.ndarray, q: np.ndarray) -> float:
    laws = position_laws(p, q)
    return min(p_value(output[:, j], laws[j]) for j in range(output.shape[1]))


def rows_on(backend: KernelBackend) -> int:
    return NUM_ROWS // 10 if backend.name == "cuda" else NUM_ROWS


def batch_of(table: np.ndarray, num_rows: int) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.float32).expand(num_rows, *table.shape)


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
@pytest.mark.parametrize("num_draft", [1, 2, 3, 4, 5])
def test_every_output_position_has_the_law_of_the_target(backend: KernelBackend, num_draft: int, one_hot: bool) -> None:
    p, q = tables(num_draft, one_hot=one_hot, vocab_size=VOCAB, seed=num_draft)
    num_rows = rows_on(backend)
    drafts = torch.tensor(draw_drafts(q, num_rows, np.random.default_rng(num_draft)))
    result = accept(backend, drafts, batch_of(p, num_rows), None if one_hot else batch_of(q, num_rows))
    assert smallest_p_value(result.output_token_ids.numpy(), p, q) > REJECT_BELOW


def test_rows_with_fewer_drafts_have_the_law_too(backend: KernelBackend) -> None:
    p, q = tables(3, one_hot=False, vocab_size=VOCAB, seed=9)
    num_rows = rows_on(backend)
    drafts = torch.tensor(draw_drafts(q, num_rows, np.random.default_rng(9)))
    num_draft = torch.arange(num_rows) % 4
    output = accept(
        backend, drafts, batch_of(p, num_rows), batch_of(q, num_rows), num_draft=num_draft
    ).output_token_ids.numpy()
    for k in range(4):
        rows = output[num_draft.numpy() == k]
        assert smallest_p_value(rows[:, : k + 1], p[: k + 1], q[:k]) > REJECT_BELOW
        assert (rows[:, k + 1 :] == -1).all()


def test_sample_has_the_law_of_its_row(backend: KernelBackend) -> None:
    """20,000 rows of 600 tokens, so that a draw has to find its block of the vocabulary first."""
    num_rows = 20_000
    p, _ = tables(1, one_hot=True, vocab_size=600, seed=10)
    probs = torch.tensor(p[1], dtype=torch.float32).expand(num_rows, 600)
    tokens = backend.sample(probs, streams(num_rows), out=torch.empty(num_rows, dtype=torch.int64))
    assert p_value(tokens.numpy(), np.append(p[1], 0.0)) > REJECT_BELOW


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
def test_what_is_reached_has_the_target_law_exactly(one_hot: bool) -> None:
    """The theorem itself, by enumeration: given that position j is reached, its law is p_j."""
    p, q = tables(5, one_hot=one_hot, vocab_size=VOCAB, seed=11)
    laws = position_laws(p, q)
    reached = 1 - laws[:, -1:]
    target = p / p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(laws[:, :-1] / reached, target, rtol=1e-5, atol=1e-7)  # tables are float32 numbers
    assert reached[-1, 0] > 0.1


PLANTED = [fault for fault in Fault if fault is not Fault.NONE]


@pytest.mark.parametrize("one_hot", [True, False], ids=["one_hot", "real_q"])
def test_the_simulation_without_a_fault_passes(one_hot: bool) -> None:
    p, q = tables(3, one_hot=one_hot, vocab_size=VOCAB, seed=12)
    output = simulate(p, q, NUM_ROWS, Fault.NONE, np.random.default_rng(12))
    assert smallest_p_value(output, p, q) > REJECT_BELOW


@pytest.mark.parametrize(
    ("fault", "one_hot"),
    [
        (fault, one_hot)
        for fault in PLANTED
        for one_hot in (True, False)
        # Against a point mass, removing the draft is the residual.
        if not (fault is Fault.DRAFT_REMOVED and one_hot)
    ],
)
def test_a_planted_error_is_rejected(fault: Fault, one_hot: bool) -> None:
    p, q = tables(3, one_hot=one_hot, vocab_size=VOCAB, seed=12)
    output = simulate(p, q, NUM_ROWS, fault, np.random.default_rng(12))
    assert smallest_p_value(output, p, q) < REJECT_BELOW


def test_a_draft_inflated_in_place_is_rejected_through_the_kernel(backend: KernelBackend) -> None:
    """The planted fault of the biased arm: p[d] + .02 in the tensor that the kernel reads."""
    p, q = tables(3, one_hot=True, vocab_size=VOCAB, seed=13)
    num_rows = rows_on(backend)
    drafts = draw_drafts(q, num_rows, np.random.default_rng(13))
    inflated = p.copy()
    inflated[np.arange(3), drafts[0]] += 0.02
    result = accept(backend, torch.tensor(drafts), batch_of(inflated, num_rows))
    assert smallest_p_value(result.output_token_ids.numpy(), p, q) < REJECT_BELOW
