"""The two acceptance rules. Both are exact: neither changes the law of what is put out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from equivtest.decoder.stages import AcceptStage, Drafts, Scored, Stages, StepInput, VerifyStage
from equivtest.errors import UnknownName
from equivtest.kernels.contract import PADDING, AcceptanceRule, FusedBackend, KernelBackend, SpecAccept, Streams


class ChainAcceptance:
    """Chain rejection sampling: accept a draft with min(1, p/q), draw the first rejection from the residual.

    Source: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2; see KernelBackend.spec_accept.
    """

    def __init__(self, backend: KernelBackend) -> None:
        self.backend = backend

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        if target_probs.shape[1] == 1:
            return draw_plain(self.backend, step, target_probs)
        device = target_probs.device
        return self.backend.spec_accept(
            drafts.on(device),
            torch.from_numpy(drafts.num_draft).to(device),
            target_probs,
            drafts.probs,
            step.streams,
            scratch=step.scratch,
        )


class MatchAcceptance:
    """Draw the target's own token for every row and keep the longest prefix that equals the draft.

    The token put out after that prefix is the target's own draw at the first mismatch, or the bonus row's. Every token
    is thus drawn from its own law with the PLAIN coin of its own position, whatever was drafted: in exact arithmetic
    the text is the one that plain decoding gives under the same stream key.
    """

    def __init__(self, backend: KernelBackend) -> None:
        self.backend = backend

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        batch, num_rows, vocab_size = target_probs.shape
        device, scratch = target_probs.device, step.scratch
        slots = torch.arange(num_rows, device=device)
        # Rows past num_draft are drawn too and ignored: the scratch holds a law in every row at all times.
        drawn = self.backend.sample(
            target_probs.view(batch * num_rows, vocab_size),
            Streams(
                step.streams.keys.repeat_interleave(num_rows),
                (step.streams.positions[:, None] + slots).view(-1),
            ),
            out=scratch.token_ids[: batch * num_rows],
        ).view(batch, num_rows)
        draft_token_ids = drafts.on(device)
        num_draft = torch.from_numpy(drafts.num_draft).to(device)
        matches = (drawn[:, :-1] == draft_token_ids) & (slots[:-1] < num_draft[:, None])
        emitted = matches.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
        output_token_ids = drawn.masked_fill(slots > emitted[:, None], PADDING)
        return SpecAccept(output_token_ids, emitted, matches.sum(dim=1, dtype=torch.int32))


def draw_plain(backend: KernelBackend, step: StepInput, target_probs: Tensor) -> SpecAccept:
    """One PLAIN draw per row from row 0 of target_probs [B, K+1, vocab_size]."""
    batch = target_probs.shape[0]
    token_ids = backend.sample(target_probs[:, 0].contiguous(), step.streams, out=step.scratch.token_ids[:batch])
    nothing = torch.zeros(batch, dtype=torch.int32, device=token_ids.device)
    return SpecAccept(token_ids[:, None], nothing, nothing)


class RoutedAcceptance:
    """Gives the rows that the main backend cannot represent to the plain one, and all others to `rule`."""

    def __init__(self, rule: AcceptStage, plain_backend: KernelBackend) -> None:
        self.rule, self.plain_backend = rule, plain_backend

    def __call__(self, step: StepInput, drafts: Drafts, target_probs: Tensor) -> SpecAccept:
        if step.num_main == step.batch:
            return self.rule(step, drafts, target_probs)
        split, width = step.num_main, target_probs.shape[1]
        plain = draw_plain(self.plain_backend, step.rows(split, step.batch), target_probs[split:])
        # Copied, for the rule is about to use the scratch that these are views of.
        parts = [SpecAccept(functional.pad(plain.output_token_ids.clone(), (0, width - 1), value=PADDING), *plain[1:])]
        if split:
            parts.insert(0, self.rule(step.rows(0, split), drafts.rows(split), target_probs[:split]))
        return SpecAccept(*(torch.cat(columns) for columns in list(zip(*parts, strict=True))[:3]))


class FusedAcceptance:
    """Verify and accept in one kernel, for a backend that has it."""

    def __init__(self, verify: VerifyStage, accept: AcceptStage, backend: FusedBackend, rule: AcceptanceRule) -> None:
        self.verify, self.accept, self.backend, self.rule = verify, accept, backend, rule
        self._plain: dict[int, tuple[Tensor, Tensor]] = {}

    def stands_for(self, stages: Stages, step: StepInput) -> bool:
        standard = stages.verify is self.verify and stages.accept is self.accept
        return standard and step.num_main == step.batch and not step.table.reports_logprobs

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> SpecAccept:
        device = scored.logits.device
        num_draft, row_start = self._counts(drafts, device)
        return self.backend.accept_logits(
            scored.logits,
            row_start,
            step.params,
            drafts.on(device),
            num_draft,
            drafts.probs,
            step.streams,
            rule=self.rule,
            scratch=step.scratch,
        )

    def _counts(self, drafts: Drafts, device: torch.device) -> tuple[Tensor, Tensor]:
        """num_draft and the first logits row of each batch row, int32 [B] on the device; plain steps' are kept."""
        batch = len(drafts.num_draft)
        if not drafts.width and batch in self._plain:
            return self._plain[batch]
        counts = np.stack([drafts.num_draft, np.cumsum(drafts.num_draft + 1) - drafts.num_draft - 1]).astype(np.int32)
        num_draft, row_start = torch.from_numpy(counts).to(device, non_blocking=True)
        if not drafts.width:
            self._plain[batch] = num_draft, row_start
        return num_draft, row_start


def fused_acceptance(
    verify: VerifyStage, accept: AcceptStage, backend: KernelBackend, rule: str
) -> FusedAcceptance | None:
    """What does these two stages in one, where the backend can."""
    if not backend.capabilities.fused:
        return None
    return FusedAcceptance(verify, accept, cast("FusedBackend", backend), cast("AcceptanceRule", rule))


_RULES: Mapping[str, Callable[[KernelBackend], AcceptStage]] = {"chain": ChainAcceptance, "match": MatchAcceptance}


def known_rules() -> tuple[str, ...]:
    """Names that `acceptance_rule` takes."""
    return tuple(_RULES)


def acceptance_rule(name: str, backend: KernelBackend) -> AcceptStage:
    """The rule of that name on a backend. Raises UnknownName."""
    if name not in _RULES:
        raise UnknownName("acceptance rule", name, _RULES)
    return _RULES[name](backend)
