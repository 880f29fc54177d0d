"""A row's output is its own: not its batch-mates', not its place's, and not the backend's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.kernels.contract import KernelBackend, RowParams, Streams
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams
from equivtest.rng import Purpose, uniforms

from .calls import accept, law, streams

VOCAB = 997  # odd, so that rows differ in alignment
KINDS = (
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(top_k=50),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=1.4),
)


def logits_of(num_rows: int, seed: int) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def chain_inputs(batch: int, num_draft: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts drawn from q, target probabilities, q: all random, q near p."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, num_draft + 1, VOCAB, generator=generator) * 6
    target = logits.softmax(dim=-1)
    draft_probs = (logits[:, :-1] + torch.randn(batch, num_draft, VOCAB, generator=generator) * 0.5).softmax(dim=-1)
    drafts = torch.multinomial(draft_probs.flatten(0, 1), 1, generator=generator).view(batch, num_draft)
    return drafts, target, draft_probs


def test_the_law_of_a_row_alone_is_bitwise_its_law_in_a_batch() -> None:
    backend = get_backend("cpp")
    logits = logits_of(36, seed=1)
    kinds = [KINDS[i % len(KINDS)] for i in range(36)]
    together = law(backend, logits, *kinds)
    for i in range(36):
        assert torch.equal(law(backend, logits[i : i + 1].clone(), kinds[i])[0], together[i])


def test_the_law_of_a_row_is_bitwise_the_same_at_any_place() -> None:
    backend = get_backend("cpp")
    logits, kinds = logits_of(36, seed=2), [KINDS[i % len(KINDS)] for i in range(36)]
    together = law(backend, logits, *kinds)
    shuffled = torch.randperm(36, generator=torch.Generator().manual_seed(3))
    assert torch.equal(law(backend, logits[shuffled], *[kinds[i] for i in shuffled]), together[shuffled])


def test_the_number_of_threads_changes_nothing() -> None:
    backend = get_backend("cpp")
    logits, kinds = logits_of(36, seed=4), [KINDS[i % len(KINDS)] for i in range(36)]
    drafts, target, q = chain_inputs(36, 3, seed=4)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append((law(backend, logits, *kinds), accept(backend, drafts, target, q).output_token_ids))
    finally:
        torch.set_num_threads(before)
    for probs, tokens in results[1:]:
        assert torch.equal(probs, results[0][0])
        assert torch.equal(tokens, results[0][1])


@pytest.mark.parametrize("with_q", [False, True], ids=["one_hot", "real_q"])
def test_tokens_of_a_row_do_not_depend_on_the_batch(backend: KernelBackend, with_q: bool) -> None:
    batch = 24
    drafts, target, q = chain_inputs(batch, 4, seed=5)
    num_draft = torch.arange(batch) % 5
    rows = Streams(torch.arange(batch) * 7919, torch.arange(batch) * 3)
    together = accept(backend, drafts, target, q if with_q else None, num_draft=num_draft, rows=rows)
    sampled = backend.sample(target[:, 0], rows, out=torch.empty(batch, dtype=torch.int64))
    shuffled = torch.randperm(batch, generator=torch.Generator().manual_seed(6))
    for subset in (*torch.arange(batch)[:, None], shuffled, shuffled[:7]):
        own = Streams(rows.keys[subset], rows.positions[subset])
        q_own = q[subset] if with_q else None
        alone = accept(backend, drafts[subset], target[subset], q_own, num_draft=num_draft[subset], rows=own)
        for column, all_rows in zip(alone[:3], together[:3], strict=True):
            assert torch.equal(column, all_rows[subset])
        alone_sampled = backend.sample(target[subset, 0], own, out=torch.empty(len(subset), dtype=torch.int64))
        assert torch.equal(alone_sampled, sampled[subset])


def distance_to_a_boundary(
    drafts: Tensor, target: Tensor, q: Tensor | None, rows: Streams, emitted: Tensor
) -> np.ndarray:
    """Per row, the least distance of a coin from the value at which the row's output would change, in float64."""
    batch, num_draft = drafts.shape
    keys, start = rows.keys.numpy(), rows.positions.numpy()
    distance = np.full(batch, np.inf)
    for b in range(batch):
        for i in range(num_draft):
            p_d = float(target[b, i, drafts[b, i]])
            q_d = 1.0 if q is None else float(q[b, i, drafts[b, i]])
            u = uniforms(keys[b : b + 1], start[b : b + 1] + i, Purpose.ACCEPT)[0]
            distance[b] = min(distance[b], abs(u * q_d - p_d))
        last = int(emitted[b])
        weights = target[b, last].double().numpy().copy()
        purpose = Purpose.BONUS
        if last < num_draft:
            purpose = Purpose.RECOVER
            if q is None:
                weights[drafts[b, last]] = 0
            else:
                weights = np.maximum(weights - q[b, last].double().numpy(), 0)
        u = uniforms(keys[b : b + 1], start[b : b + 1] + last, purpose)[0]
        cumulative = weights.cumsum() / weights.sum()
        distance[b] = min(distance[b], np.abs(cumulative - u).min())
    return distance


@pytest.mark.parametrize("with_q", [False, True], ids=["one_hot", "real_q"])
def test_both_backends_put_out_the_same_tokens(with_q: bool) -> None:
    """Token for token, on every row whose coins are at least 1e-6 from a boundary: nearly all, and that is checked."""
    drafts, target, q_table = chain_inputs(300, 4, seed=7)
    q = q_table if with_q else None
    expected = accept(get_backend("reference"), drafts, target, q)
    actual = accept(get_backend("cpp"), drafts, target, q)
    clear = torch.tensor(distance_to_a_boundary(drafts, target, q, streams(300), expected.emitted) > 1e-6)
    assert clear.sum() > 285
    assert len(set(expected.emitted.tolist())) > 2
    for column, reference_column in zip(actual[:3], expected[:3], strict=True):
        assert torch.equal(column[clear], reference_column[clear])


def test_both_backends_sample_the_same_tokens_from_their_own_laws() -> None:
    """Filter and draw on each backend's own float32 law; rows whose coin is within 1e-6 of a boundary are left out."""
    logits, rows = logits_of(300, seed=8), streams(300)
    tokens = {}
    for name in ("reference", "cpp"):
        backend = get_backend(name)
        probs = law(backend, logits, SamplingParams(temperature=0.8, top_p=0.95))
        tokens[name] = backend.sample(probs, rows, out=torch.empty(300, dtype=torch.int64))
    cumulative = probs.double().numpy().cumsum(axis=1)
    u = uniforms(rows.keys.numpy(), rows.positions.numpy(), Purpose.PLAIN)
    clear = torch.tensor(np.abs(cumulative / cumulative[:, -1:] - u[:, None]).min(axis=1) > 1e-6)
    assert clear.sum() > 290
    assert torch.equal(tokens["cpp"][clear], tokens["reference"][clear])


def test_a_ragged_batch_written_through_out_rows_is_what_a_full_one_is(backend: KernelBackend) -> None:
    logits, params = logits_of(12, seed=9), SamplingParams(temperature=0.8, top_p=0.95)
    full = law(backend, logits, params)
    rows = torch.tensor([0, 1, 2, 4, 8, 9])
    out = torch.zeros(12, VOCAB)
    backend.verify_probs(logits[rows], RowParams.of([params] * 6), out=out, out_rows=rows)
    torch.testing.assert_close(out[rows], full[rows], rtol=1e-6, atol=0)
    if backend.name == "cpp":
        assert torch.equal(out[rows], full[rows])
