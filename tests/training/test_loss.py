"""The chunked loss of the head is cross entropy, and its gradient is autograd's."""

from __future__ import annotations

import pytest
import torch

from equivtest.training import loss as module
from equivtest.training.loss import Kept, head_loss, reached, slot_weights

BLOCKS, SLOTS = 8, 3


def inputs() -> tuple[torch.Tensor, ...]:
    """In half of the slots the first label is the likeliest token."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BLOCKS, SLOTS, 8, generator=generator, requires_grad=True)
    head = torch.randn(50, 8, generator=generator)
    ids = torch.randint(50, (BLOCKS, SLOTS, 5), generator=generator)
    hit = torch.rand(BLOCKS, SLOTS, generator=generator) < 0.5
    ids[..., 0] = torch.where(hit, (hidden.detach() @ head.T).argmax(dim=-1), ids[..., 0])
    ids[..., 2] = ids[..., 1]  # an id may stand in a law twice
    probs = torch.rand(BLOCKS, SLOTS, 5, generator=generator)
    return hidden, head, ids, probs / probs.sum(dim=-1, keepdim=True), torch.rand(SLOTS, generator=generator)


@pytest.mark.parametrize("reach_share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("chunk_entries", [1, 50 * 7, 1 << 28])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(
    chunk_entries: int, reach_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", chunk_entries)
    hidden, head, ids, probs, weights = inputs()
    found = head_loss(hidden, head, ids, probs, weights, reach_share)
    (found.total * 2).backward()
    ours = hidden.grad
    hidden.grad = None
    logits = hidden @ head.T
    losses = -(probs * logits.log_softmax(dim=-1).gather(-1, ids)).sum(dim=-1)
    each = torch.zeros(BLOCKS, SLOTS)
    for block in range(BLOCKS):
        for slot in range(SLOTS):
            is_reached = all(logits[block, k].argmax() == ids[block, k, 0] for k in range(slot))
            each[block, slot] = weights[slot] * (1 - reach_share + reach_share * is_reached)
    ((losses * each).sum() * 2).backward()
    torch.testing.assert_close(ours, hidden.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.losses, losses.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.total, (losses * each).sum(), atol=1e-5, rtol=1e-5)
    assert torch.equal(found.drafts, logits.argmax(dim=-1))


def kept_of(weight: float = 0.3, temperature: float = 0.8) -> Kept:
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(50, generator=generator)[:6] for _ in range(BLOCKS * SLOTS)])
    probs = torch.rand(BLOCKS, SLOTS, 6, generator=generator)
    probs[..., 4:] = 0  # a nucleus
    return Kept(ids.view(BLOCKS, SLOTS, 6), probs / probs.sum(dim=-1, keepdim=True), temperature, weight)


def not_kept(logits: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Drafts of a block less those that the chain rule keeps on average, over all blocks, token by token."""
    laws = (logits / kept.temperature).softmax(dim=-1)
    lost = torch.zeros(())
    for block in range(BLOCKS):
        reach = torch.ones(())
        for slot in range(SLOTS):
            wanted = torch.zeros(50).scatter(0, kept.token_ids[block, slot], kept.probs[block, slot])
            reach = reach * torch.minimum(laws[block, slot], wanted).sum()
            lost = lost + 1 - reach
    return lost


@pytest.mark.parametrize("chunk_entries", [1, 50 * 7, 1 << 28])
def test_the_part_for_kept_drafts_and_its_gradient_are_autograds(
    chunk_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the cross entropy, of which the plain loss knows the gradient."""
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", chunk_entries)
    hidden, head, ids, probs, weights = inputs()
    kept = kept_of()
    found = head_loss(hidden, head, ids, probs, weights, 0.7, kept)
    found.total.backward()
    ours, hidden.grad = hidden.grad, None
    plain = head_loss(hidden, head, ids, probs, weights, 0.7)
    lost = not_kept(hidden @ head.T, kept)
    (plain.total + kept.weight * lost).backward()
    torch.testing.assert_close(ours, hidden.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.total, plain.total + kept.weight * lost)
    assert torch.equal(found.losses, plain.losses)
    assert 0.1 < float(lost.detach()) / (BLOCKS * SLOTS) < 0.999


def test_descent_along_it_keeps_more_drafts_than_along_another_law() -> None:
    """The twin: the gradient for other tokens' laws keeps fewer."""
    kept, rates = kept_of(), []
    for shift in (0, 7):
        hidden, head, ids, probs, weights = inputs()
        asked = kept._replace(token_ids=(kept.token_ids + shift) % 50)
        for _ in range(400):
            hidden.grad = None
            head_loss(hidden, head, ids, probs, 0 * weights, 0.0, asked).total.backward()
            hidden = (hidden.detach() - 2 * hidden.grad).requires_grad_()
        with torch.no_grad():
            rates.append(1 - float(not_kept(hidden @ head.T, kept)) / (BLOCKS * SLOTS))
    assert rates[0] > 0.15
    assert rates[1] < 0.05


def test_a_slot_is_reached_when_all_before_it_are_hits() -> None:
    hits = torch.tensor([[True, True, False, True], [False, True, True, True]])
    assert reached(hits).tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


def test_slots_behind_a_miss_do_not_teach_when_reaching_is_all() -> None:
    """The twin: with a share of 0 they do."""
    hidden, head, ids, probs, weights = inputs()
    behind = reached((hidden.detach() @ head.T).argmax(dim=-1) == ids[..., 0]) == 0
    norms = []
    for share in (1.0, 0.0):
        hidden.grad = None
        head_loss(hidden, head, ids, probs, weights, share).total.backward()
        norms.append(hidden.grad[behind].norm(dim=-1))
    assert behind.any()
    assert float(norms[0].max()) == 0
    assert float(norms[1].min()) > 0


def test_a_label_that_is_off_by_one_has_another_gradient() -> None:
    hidden, head, ids, probs, weights = inputs()
    gradients = []
    for labels in (ids, (ids + 1) % 50):
        hidden.grad = None
        head_loss(hidden, head, labels, probs, weights).total.backward()
        gradients.append(hidden.grad)
    assert float((gradients[0] - gradients[1]).abs().max()) > 0.1


def test_in_bfloat16_the_gradient_is_right_to_its_rounding() -> None:
    hidden, head, ids, probs, weights = inputs()
    head_loss(hidden, head, ids, probs, weights).total.backward()
    exact, hidden.grad = hidden.grad, None
    head_loss(hidden, head.bfloat16(), ids, probs.bfloat16(), weights).total.backward()
    assert float((hidden.grad - exact).norm() / exact.norm()) < 0.02


def test_for_kept_drafts_only_the_sum_is_rounded_to_bfloat16() -> None:
    """Of sure drafters, whose law the target's nearly is, and whose gradient's parts all but cancel."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(40 * 5, 2000, generator=generator)).bfloat16()
    near = logits.float() + 0.1 * torch.randn(logits.shape, generator=generator)
    top = (near / 0.8).softmax(dim=-1).topk(16)
    probs = top.values / top.values.sum(dim=-1, keepdim=True)
    kept = Kept(top.indices.view(40, 5, 16), probs.view(40, 5, 16), 0.8, 1.0)
    exact, rounded = torch.zeros(logits.shape), torch.zeros_like(logits)
    totals = [
        module._add_kept(slope, given, kept, slice(0, 40))
        for slope, given in ((exact, logits.float()), (rounded, logits))
    ]
    assert totals[0] == totals[1]
    assert float((rounded - exact).norm() / exact.norm()) < 0.005


def test_slots_weigh_less_the_later_they_are() -> None:
    weights = slot_weights(7, 4.0)
    torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((6,), 2.718281828 ** (-1 / 4)))
    assert float(weights.mean()) == pytest.approx(1)
