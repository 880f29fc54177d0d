"""verify_probs: closed forms of the one law."""

from __future__ import annotations

import math

import pytest
import torch

from equivtest.kernels.contract import KernelBackend, RowParams
from equivtest.kernels.reference import ReferenceBackend
from equivtest.records import SamplingParams

from .calls import law

E1, E2 = math.e, math.e**2


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=0)


def test_plain_softmax_of_2_1_0(backend: KernelBackend) -> None:
    total = E2 + E1 + 1
    close(law(backend, [[2.0, 1.0, 0.0]], SamplingParams())[0], [E2 / total, E1 / total, 1 / total])


def test_temperature_divides_the_logits(backend: KernelBackend) -> None:
    halved, plain = law(backend, [[4.0, 2.0, 0.0], [2.0, 1.0, 0.0]], SamplingParams(temperature=2), SamplingParams())
    assert torch.equal(halved, plain)


def test_top_k_2_leaves_an_exact_zero_and_renormalises(backend: KernelBackend) -> None:
    probs = law(backend, [[2.0, 1.0, 0.0]], SamplingParams(top_k=2))[0]
    assert probs[2] == 0.0
    close(probs, [0.7310585786, 0.2689414214, 0.0])


def test_top_k_keeps_every_tie_at_the_cut(backend: KernelBackend) -> None:
    probs = law(backend, [[1.0, 3.0, 1.0, 1.0, 0.0]], SamplingParams(top_k=2))[0]
    close(probs, [1 / (E2 + 3), E2 / (E2 + 3), 1 / (E2 + 3), 1 / (E2 + 3), 0.0])


@pytest.mark.parametrize("top_k", [0, 3, 4, 1000, 2**31 - 1])
def test_top_k_of_the_vocabulary_or_more_keeps_all(backend: KernelBackend, top_k: int) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert torch.equal(law(backend, logits, SamplingParams(top_k=top_k)), law(backend, logits, SamplingParams()))


def test_top_p_keeps_the_token_that_reaches_it(backend: KernelBackend) -> None:
    # Masses .665, .245, .090: .7 is first reached by the second token.
    probs = law(backend, [[0.0, 2.0, 1.0]], SamplingParams(top_p=0.7))[0]
    close(probs, [0.0, 0.7310585786, 0.2689414214])


def test_top_p_that_one_token_reaches_keeps_one_token(backend: KernelBackend) -> None:
    probs = law(backend, [[0.0, 2.0, 1.0], [0.0, 30.0, 1.0]], SamplingParams(top_p=0.66), SamplingParams(top_p=0.999))
    assert torch.equal(probs, torch.tensor([[0.0, 1.0, 0.0]] * 2))


def test_top_p_keeps_every_tie_at_the_cut(backend: KernelBackend) -> None:
    probs = law(backend, [[1.0, 0.0, 1.0, 1.0, -20.0]], SamplingParams(top_p=0.3))[0]
    close(probs, [1 / 3, 0.0, 1 / 3, 1 / 3, 0.0])


def test_a_tiny_top_p_keeps_the_largest_token(backend: KernelBackend) -> None:
    probs = law(backend, [[0.1, 0.0, 0.3, 0.2]], SamplingParams(top_p=1e-30))[0]
    assert torch.equal(probs, torch.tensor([0.0, 0.0, 1.0, 0.0]))


def test_top_p_counts_the_mass_that_top_k_left(backend: KernelBackend) -> None:
    # Of four equal tokens and a larger one, top-k 1 keeps only that one; its mass is then all there is.
    probs = law(backend, [[1.0, 1.0, 1.1, 1.0, 1.0]], SamplingParams(top_k=1, top_p=0.9))[0]
    assert torch.equal(probs, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]))
    # Masses .644, .237, .087, .032. Of all, .95 needs three tokens; of the three that top-k 3 left (.665, .245, .090),
    # .90 is reached by two, and would have needed three without top-k.
    probs = law(backend, [[3.0, 2.0, 1.0, 0.0]], SamplingParams(top_k=3, top_p=0.90))[0]
    close(probs, [0.7310585786, 0.2689414214, 0.0, 0.0])


def test_min_p_keeps_what_has_that_fraction_of_the_largest(backend: KernelBackend) -> None:
    logits = [[math.log(8.0), math.log(4.0), math.log(1.0), math.log(0.5)]]
    close(law(backend, logits, SamplingParams(min_p=0.1))[0], [8 / 13, 4 / 13, 1 / 13, 0.0])
    close(law(backend, logits, SamplingParams(min_p=0.2))[0], [8 / 12, 4 / 12, 0.0, 0.0])


def test_min_p_1_keeps_the_largest_and_its_ties(backend: KernelBackend) -> None:
    close(law(backend, [[1.0, 2.0, 2.0, 0.0]], SamplingParams(min_p=1.0))[0], [0.0, 0.5, 0.5, 0.0])


def test_greedy_is_a_point_mass_on_the_lowest_id_of_a_tie(backend: KernelBackend) -> None:
    probs = law(backend, [[1.0, 5.0, 5.0, -torch.inf], [0.0, -0.0, -1.0, -1.0]], SamplingParams(temperature=0))
    assert torch.equal(probs, torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))


def test_greedy_and_sampled_rows_mix(backend: KernelBackend) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    greedy, sampled = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_p=0.9)
    mixed = law(backend, logits, *[greedy, sampled] * 3)
    assert torch.equal(mixed[::2], law(backend, logits[::2], greedy))
    assert torch.equal(mixed[1::2], law(backend, logits[1::2], sampled))
    assert (mixed[::2].amax(dim=1) == 1).all()


def test_tokens_at_minus_infinity_are_exact_zeros(backend: KernelBackend) -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [3, 150]] = 2.5
    for params in (SamplingParams(), SamplingParams(top_k=100), SamplingParams(top_p=0.99), SamplingParams(min_p=0.01)):
        probs = law(backend, logits, params)[0]
        assert probs.nonzero().flatten().tolist() == [3, 150]
        assert (probs[[3, 150]] == 0.5).all()


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 49152])
def test_rows_sum_to_1_at_every_vocabulary_size(backend: KernelBackend, vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    each = (
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(top_k=min(50, vocab_size)),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(temperature=1.5, min_p=0.05),
    )
    probs = law(backend, logits, *each)
    assert (probs.double().sum(dim=1) - 1).abs().max() < 1e-5
    assert (probs >= 0).all()


def test_a_flat_row_keeps_all_of_its_ties(backend: KernelBackend) -> None:
    for params in (SamplingParams(top_k=7), SamplingParams(top_p=0.5), SamplingParams(top_k=7, top_p=0.5, min_p=0.5)):
        probs = law(backend, torch.full((1, 49152), 0.25), params)[0]
        torch.testing.assert_close(probs, torch.full((49152,), 1 / 49152), rtol=1e-5, atol=0)


def test_out_rows_scatters_and_leaves_the_other_rows(backend: KernelBackend) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    out = torch.full((6, 100), 7.0)
    where = torch.tensor([4, 0, 3])
    backend.verify_probs(logits, RowParams.of([SamplingParams(top_p=0.8)] * 3), out=out, out_rows=where)
    assert torch.equal(out[where], law(backend, logits, SamplingParams(top_p=0.8)))
    assert (out[[1, 2, 5]] == 7.0).all()


def test_bfloat16_logits_are_their_float32_values(backend: KernelBackend) -> None:
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(3)) * 4).bfloat16()
    for params in (SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(top_k=9), SamplingParams(temperature=0)):
        assert torch.equal(law(backend, logits, params), law(backend, logits.float(), params))


def test_no_rows_is_no_work(backend: KernelBackend) -> None:
    assert law(backend, torch.empty(0, 10), SamplingParams()).shape == (0, 10)


def test_the_float64_reference_returns_float64() -> None:
    probs = law(ReferenceBackend(torch.float64), torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64), SamplingParams())
    total = E2 + E1 + 1
    expected = torch.tensor([[E2 / total, E1 / total, 1 / total]], dtype=torch.float64)
    torch.testing.assert_close(probs, expected, rtol=1e-15, atol=0)
