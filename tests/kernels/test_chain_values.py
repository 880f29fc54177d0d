"""spec_accept and sample: exact expected values of hand-made rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equivtest.kernels.contract import KernelBackend, SpecScratch, Streams
from equivtest.rng import Purpose, uniforms

from .calls import accept, streams

VOCAB = 1000


def point(*tokens: int) -> torch.Tensor:
    """Rows that are certain of one token each: [1, len(tokens), VOCAB]."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), VOCAB).float()


def test_certain_drafts_are_all_accepted_and_the_bonus_follows(backend: KernelBackend) -> None:
    result = accept(backend, [[100, 200]], point(100, 200, 777))
    assert result.output_token_ids.tolist() == [[100, 200, 777]]
    assert result.emitted.tolist() == [2]
    assert result.acceptance_telemetry.tolist() == [2]


def test_a_draft_without_mass_is_replaced_by_the_one_residual_token(backend: KernelBackend) -> None:
    result = accept(backend, [[100, 200]], point(555, 200, 777))
    assert result.output_token_ids.tolist() == [[555, -1, -1]]
    assert result.emitted.tolist() == [0]
    # The first draft has p = 0 and u < 0 never holds; the second has p = 1 and u < 1 always does. Its own coin
    # accepts it, although it lies past the first rejection: 0 + 1.
    assert result.acceptance_telemetry.tolist() == [1]


def test_a_draft_with_p_above_q_is_certain_to_be_accepted(backend: KernelBackend) -> None:
    target = point(3, 9)
    draft = torch.zeros(1, 1, VOCAB)
    draft[0, 0, 3] = draft[0, 0, 4] = 0.5  # q = .5, p = 1: u * .5 < 1 always
    for key in range(50):
        result = accept(backend, [[3]], target, draft, rows=streams(1, first_key=key))
        assert result.output_token_ids.tolist() == [[3, 9]]
        assert result.emitted.tolist() == [1]


def test_explicit_q_certain_rejection_leaves_a_residual_of_one_token(backend: KernelBackend) -> None:
    # p = {3: .5, 5: .5}, q = {3: .5, 4: .5}: draft 4 has p = 0, and relu(p - q) has mass on 5 alone.
    target, draft = torch.zeros(1, 2, VOCAB), torch.zeros(1, 1, VOCAB)
    target[0, 0, [3, 5]] = 0.5
    target[0, 1, 9] = 1.0
    draft[0, 0, [3, 4]] = 0.5
    for key in range(50):
        result = accept(backend, [[4]], target, draft, rows=streams(1, first_key=key))
        assert result.output_token_ids.tolist() == [[5, -1]]
        assert result.emitted.tolist() == [0]
        assert result.acceptance_telemetry.tolist() == [0]


def test_acceptance_is_the_accept_coin_below_p_over_q(backend: KernelBackend) -> None:
    batch, p, q = 400, 0.3, 0.4
    target, draft = torch.zeros(batch, 2, 4), torch.zeros(batch, 1, 4)
    target[:, 0] = torch.tensor([p, 0.7, 0, 0])
    target[:, 1, 3] = 1
    draft[:, 0] = torch.tensor([q, 0, 0.6, 0])
    rows = streams(batch, position=5)
    result = accept(backend, [[0]] * batch, target, draft, rows=rows)
    u = uniforms(rows.keys.numpy(), rows.positions.numpy(), Purpose.ACCEPT)
    np.testing.assert_array_equal(result.emitted.numpy() == 1, u * np.float32(q) < np.float32(p))
    assert 0 < int(result.emitted.sum()) < batch


@pytest.mark.parametrize(("num_draft", "purpose"), [(1, Purpose.BONUS), (0, Purpose.PLAIN)])
def test_the_last_draw_inverts_the_distribution_with_its_own_coin(
    backend: KernelBackend, num_draft: int, purpose: Purpose
) -> None:
    batch = 400
    target = torch.zeros(batch, 2, 4)
    target[:, 0, 2] = 1
    target[:, num_draft] = torch.tensor([0.2, 0.3, 0.1, 0.4])
    rows = streams(batch, position=5)
    if num_draft:
        target[:, 0] = torch.tensor([0, 0, 1.0, 0])
    result = accept(backend, [[2]] * batch, target, num_draft=[num_draft] * batch, rows=rows)
    u = uniforms(rows.keys.numpy(), rows.positions.numpy() + num_draft, purpose)
    cumulative = np.cumsum(target[0, num_draft].double().numpy())
    expected = np.searchsorted(cumulative, u * cumulative[-1], side="right")
    np.testing.assert_array_equal(result.output_token_ids[:, num_draft].numpy(), expected)
    assert set(expected) == {0, 1, 2, 3}


def test_sample_draws_with_the_plain_coin(backend: KernelBackend) -> None:
    probs = torch.rand(300, 2000, generator=torch.Generator().manual_seed(5))  # sums are not 1: a draw is relative
    rows = streams(300, position=9)
    tokens = backend.sample(probs, rows, out=torch.empty(300, dtype=torch.int64))
    cumulative = probs.double().numpy().cumsum(axis=1)
    u = uniforms(rows.keys.numpy(), rows.positions.numpy(), Purpose.PLAIN)
    expected = [np.searchsorted(row, coin * row[-1], side="right") for row, coin in zip(cumulative, u, strict=True)]
    np.testing.assert_array_equal(tokens.numpy(), expected)


def test_plain_rows_of_a_batch_draw_what_sample_draws(backend: KernelBackend) -> None:
    target = torch.rand(50, 1, 300, generator=torch.Generator().manual_seed(6))
    rows = streams(50, position=3)
    through_chain = accept(backend, torch.empty(50, 0), target, rows=rows).output_token_ids[:, 0]
    assert torch.equal(through_chain, backend.sample(target[:, 0], rows, out=torch.empty(50, dtype=torch.int64)))


def test_rows_of_one_batch_may_offer_different_numbers_of_drafts(backend: KernelBackend) -> None:
    target = torch.cat([point(10, 11, 12), point(20, 21, 22), point(30, 31, 32)])
    drafts = [[10, 11], [20, -7], [-7, 10**9]]  # entries past num_draft are ignored, whatever they are
    result = accept(backend, drafts, target, num_draft=[2, 1, 0])
    assert result.output_token_ids.tolist() == [[10, 11, 12], [20, 21, -1], [30, -1, -1]]
    assert result.emitted.tolist() == [2, 1, 0]
    assert result.acceptance_telemetry.tolist() == [2, 1, 0]


def test_rows_past_num_draft_are_not_looked_at(backend: KernelBackend) -> None:
    target = torch.full((1, 3, VOCAB), torch.nan)
    target[0, :2] = point(10, 11)[0]
    draft = torch.full((1, 2, VOCAB), torch.nan)
    draft[0, 0] = point(10)[0, 0]
    assert accept(backend, [[10, 0]], target, draft, num_draft=[1]).output_token_ids.tolist() == [[10, 11, -1]]


def test_rows_past_the_first_rejection_are_not_drawn_from(backend: KernelBackend) -> None:
    target = torch.zeros(1, 4, VOCAB)  # without mass, and the last two drafts are rejected too
    target[0, 0, 555] = 1
    result = accept(backend, [[100, 200, 300]], target)
    assert result.output_token_ids.tolist() == [[555, -1, -1, -1]]
    assert result.acceptance_telemetry.tolist() == [0]


def test_a_residual_that_rounding_left_empty_draws_from_p(backend: KernelBackend) -> None:
    # p lies below q everywhere, as when p sums to a little less than 1: relu(p - q) is empty.
    target = torch.tensor([[[0.25, 0.0, 0.25], [1.0, 0.0, 0.0]]]).repeat(200, 1, 1)
    draft = torch.tensor([[[0.5, 0.0, 0.5]]]).repeat(200, 1, 1)
    result = accept(backend, [[0]] * 200, target, draft)
    recovered = result.output_token_ids[result.emitted == 0, 0]
    assert set(recovered.tolist()) == {0, 2}
    one_hot = accept(backend, [[0]] * 200, torch.tensor([[[0.5, 0.0], [1.0, 0.0]]]).repeat(200, 1, 1))
    assert one_hot.output_token_ids[one_hot.emitted == 0, 0].unique().tolist() == [0]


def test_draws_are_relative_to_the_row_s_sum_and_acceptance_is_not(backend: KernelBackend) -> None:
    batch = 400
    target, draft = torch.zeros(batch, 2, 4), torch.zeros(batch, 1, 4)
    target[:] = torch.tensor([0.25, 0.25, 0.0, 0.5])
    draft[:] = torch.tensor([0.75, 0.0, 0.25, 0.0])
    rows = streams(batch, position=5)
    result = accept(backend, [[0]] * batch, target, draft, rows=rows)
    bonus = result.output_token_ids[result.emitted == 1, 1]
    doubled = accept(backend, [[0]] * batch, 2 * target, draft, rows=rows)
    u = uniforms(rows.keys.numpy(), rows.positions.numpy(), Purpose.ACCEPT)
    np.testing.assert_array_equal(result.emitted.numpy() == 1, u * 0.75 < 0.25)
    np.testing.assert_array_equal(doubled.emitted.numpy() == 1, u * 0.75 < 0.5)
    assert torch.equal(doubled.output_token_ids[result.emitted == 1, 1], bonus)
    assert set(bonus.tolist()) == {0, 1, 3}


def test_an_inflated_target_entry_makes_its_draft_certain(backend: KernelBackend) -> None:
    # A planted fault inflates p[d] in place: the draft is then certain, and nothing else changes.
    target = torch.tensor([[[1.5, 0.25, 0.25], [0.0, 6.0, 0.0]]]).repeat(100, 1, 1)
    assert accept(backend, [[0]] * 100, target).output_token_ids.tolist() == [[0, 1]] * 100


def test_a_token_without_probability_is_never_drawn(backend: KernelBackend) -> None:
    probs = torch.zeros(2000, 1300)
    probs[:, [600, 601, 1299]] = torch.tensor([1e-30, 1.0, 1e-30])
    tokens = backend.sample(probs, streams(2000), out=torch.empty(2000, dtype=torch.int64))
    assert set(tokens.tolist()) <= {600, 601, 1299}
    assert 601 in tokens


def test_results_are_views_of_the_scratch(backend: KernelBackend) -> None:
    scratch = SpecScratch(8, 4, VOCAB)
    result = backend.spec_accept(
        torch.tensor([[100, 200]]), torch.tensor([2], dtype=torch.int32), point(100, 200, 777), None,
        Streams(torch.tensor([1]), torch.tensor([0])), scratch=scratch,
    )  # fmt: skip
    assert result.output_token_ids.data_ptr() == scratch.output_token_ids.data_ptr()
    assert result.output_token_ids.shape == (1, 3)
    assert result.output_token_ids.is_contiguous()
