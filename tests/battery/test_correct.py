"""Correct samplers of every form pass: ours, and plain ones in each call shape and with each kind of coins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from equivtest.battery import SamplerReport, check_sampler
from equivtest.battery.adapters import BackendSampler
from tests.battery.samplers import ChainSampler, by_seeds, by_uniforms, right_seeds

CHAIN = ChainSampler()
CHEAP = ("filtered", "tiny", "half")


def passes(sampler: Any, **options: Any) -> SamplerReport:
    report = check_sampler(sampler, **{"budget": "smoke", "vocab": (64,), "only": CHEAP} | options)
    assert report.passed, "\n".join(report.lines())
    return report


def generators_of_rows(
    draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, generators: list[torch.Generator]
) -> object:
    width = target_probs.shape[1]
    coins = torch.stack([torch.rand(width, generator=generator, dtype=torch.float64) for generator in generators])
    return CHAIN.judge(draft_token_ids, draft_probs, target_probs, coins)


def global_generator(draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor) -> object:
    coins = torch.rand(target_probs.shape[:2], dtype=torch.float64)
    return CHAIN.judge(draft_token_ids, draft_probs, target_probs, coins)


def masked(
    draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Decides and recovers at every slot, also past a rejection; the bonus is in the last column."""
    accepted, recovered = [], []
    coins = torch.rand(target_probs.shape[:2], generator=generator, dtype=torch.float64)
    again = torch.rand(target_probs.shape[:2], generator=generator, dtype=torch.float64)
    width = draft_token_ids.shape[1]
    for slot in range(width):
        part = slice(slot, slot + 1)
        q = None if draft_probs is None else draft_probs[:, part]
        pair = torch.stack([coins[:, slot], again[:, slot]], dim=1)
        # One slot by itself, judged against a target whose bonus is never looked at.
        tokens, emitted = CHAIN.judge(draft_token_ids[:, part], q, target_probs[:, slot : slot + 2], pair)
        accepted.append(emitted > 0)
        recovered.append(tokens[:, 0])
    last = torch.searchsorted(
        target_probs[:, -1].double().cumsum(1),
        coins[:, -1:] * target_probs[:, -1].double().sum(1, keepdim=True),
        right=True,
    )[:, 0]
    return torch.stack(accepted, dim=1), torch.stack([*recovered, last], dim=1)


def flashinfer_like(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert draft_token_ids.dtype == torch.int32
    if seed is None:
        coins = torch.rand(target_probs.shape[:2], generator=generator, dtype=torch.float64)
        tokens, emitted = CHAIN.judge(draft_token_ids.long(), draft_probs, target_probs, coins)
    else:
        by_row = by_seeds(CHAIN, right_seeds)
        tokens, emitted = by_row(draft_token_ids.long(), draft_probs, target_probs, seed, offset)
    return tokens.int(), (emitted + 1).clamp(max=draft_token_ids.shape[1]), emitted


def vllm_like(
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: Any,
) -> Tensor:
    """Row by row, as the flat layout has it; seeded rows draw from their own generator."""
    target = target_logits.softmax(dim=-1)
    output = torch.full((len(num_draft_tokens), max_spec_len + 1), -1)
    for row, (end, count) in enumerate(zip(cu_num_draft_tokens.tolist(), num_draft_tokens, strict=True)):
        part = slice(end - count, end)
        generator = sampling_metadata.generators.get(row)
        coins = torch.rand(1, count + 1, generator=generator, dtype=torch.float64)
        if count:
            law = torch.cat([target[part], target[part][-1:]])[None]
            q = None if draft_probs is None else draft_probs[part][None]
            output[row, : count + 1], emitted = CHAIN.judge(draft_token_ids[part].long()[None], q, law, coins)
            count = int(emitted) if int(emitted) < count else count
            if count < num_draft_tokens[row]:
                continue
        output[row, count] = bonus_token_ids[row, 0]
    return output


@pytest.mark.parametrize(
    ("sampler", "options", "coins"),
    [
        (ChainSampler(), {}, "generator"),
        (by_uniforms(CHAIN), {}, "uniforms"),
        (by_seeds(CHAIN, right_seeds), {}, "seeds"),
        (global_generator, {}, "global"),
        (masked, {"form": "mask"}, "generator"),
        (flashinfer_like, {"form": "flashinfer"}, "generator"),
        (flashinfer_like, {"form": "flashinfer", "coins": "seeds"}, "seeds"),
    ],
    ids=["generator", "uniforms", "seeds", "global", "mask", "flashinfer", "flashinfer seeds"],
)
def test_a_correct_sampler_passes_in_every_form(sampler: Any, options: dict[str, str], coins: str) -> None:
    """Each fails with probability 1e-6; the seed is fixed."""
    report = passes(sampler, **options)
    assert report.coins == coins
    assert ("a request's seed" in " ".join(report.notes)) == (coins in ("generator", "global"))


@pytest.mark.parametrize("coins", ["global", "generators"])
def test_the_vllm_form_takes_ragged_drafts_and_seeded_rows(coins: str) -> None:
    """One case of 64 rows: this sampler is written to be read, row by row."""
    report = passes(vllm_like, form="vllm", coins=coins, vocab=(2,), only=("half",))
    assert "the bonus: the function does not draw it" in report.notes


def test_generators_of_rows_hold_in_any_batch() -> None:
    passes(generators_of_rows, vocab=(), only=("half",))


@pytest.mark.parametrize("backend", ["cpp", "reference"])
def test_our_own_backends_pass(backend: str) -> None:
    """All laws, ragged ones too; each fails with probability 1e-6."""
    report = passes(BackendSampler(backend), vocab=(2,), only=())
    assert report.notes == ()
    assert report.num_laws == 21


def test_a_report_is_a_function_of_its_seed() -> None:
    first, again, other = (
        check_sampler(ChainSampler(), budget="smoke", vocab=(), only=("half",), seed=seed) for seed in (1, 1, 2)
    )
    assert first.evidence == again.evidence
    assert first.evidence != other.evidence
