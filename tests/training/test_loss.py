"""The chunked loss of the head is cross entropy, and its gradient is autograd's."""

from __future__ import annotations

import pytest
import torch

from equivtest.training import loss as module
from equivtest.training.loss import head_loss, slot_weights


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(23, 8, generator=generator, requires_grad=True)
    head = torch.randn(50, 8, generator=generator)
    ids = torch.randint(50, (23, 5), generator=generator)
    ids[:, 1] = ids[:, 0]  # an id may stand in a law twice
    probs = torch.rand(23, 5, generator=generator)
    return hidden, head, ids, probs / probs.sum(dim=1, keepdim=True), torch.rand(23, generator=generator)


@pytest.mark.parametrize("chunk_entries", [1, 50 * 7, 1 << 28])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(
    chunk_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK_ENTRIES", chunk_entries)
    hidden, head, ids, probs, weights = inputs()
    found = head_loss(hidden, head, ids, probs, weights)
    (found.total * 2).backward()
    ours = hidden.grad
    hidden.grad = None
    logits = hidden @ head.T
    losses = -(probs * logits.log_softmax(dim=-1).gather(1, ids)).sum(dim=-1)
    ((losses * weights).sum() * 2).backward()
    torch.testing.assert_close(ours, hidden.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.losses, losses.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.total, (losses * weights).sum(), atol=1e-5, rtol=1e-5)
    assert torch.equal(found.drafts, logits.argmax(dim=-1))


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


def test_slots_weigh_less_the_later_they_are() -> None:
    weights = slot_weights(7, 4.0)
    torch.testing.assert_close(weights[1:] / weights[:-1], torch.full((6,), 2.718281828 ** (-1 / 4)))
    assert float(weights.mean()) == pytest.approx(1)
