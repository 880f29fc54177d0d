"""The stages of a correct decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.acceptance import RoutedAcceptance, acceptance_rule, fused_acceptance
from equivtest.decoder.drafters.base import Drafter
from equivtest.decoder.logit_processing import process_logits, row_texts
from equivtest.decoder.model import Model
from equivtest.decoder.request_table import NO_LOGPROBS, RAW
from equivtest.decoder.stages import (
    Drafts,
    Float32Array,
    Int64Array,
    Scored,
    Stages,
    StepInput,
)
from equivtest.errors import InvalidKernelInput
from equivtest.kernels.checks import raise_refusal
from equivtest.kernels.contract import KernelBackend, SpecAccept


class DrafterPropose:
    """Asks the drafter, where any row may be offered a draft."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter

    def __call__(self, step: StepInput) -> Drafts:
        if self.drafter is None or not step.limits.any():
            return Drafts.none(step.batch)
        drafts = self.drafter.propose(step)
        over = np.flatnonzero(drafts.num_draft > step.limits)
        if len(over):
            row = int(over[0])
            raise InvalidKernelInput(
                f"drafter {self.drafter.name}",
                f"more drafts than the row's limit of {step.limits[row]}",
                row=row,
                value=int(drafts.num_draft[row]),
            )
        return drafts.cut(int(drafts.num_draft.max(initial=0)))


class RaggedForward:
    """One forward over every row of the step: the last committed token and the drafts of each request."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, step: StepInput, drafts: Drafts) -> Scored:
        batch_rows, slots = np.nonzero(np.arange(drafts.width + 1) <= drafts.num_draft[:, None])
        batch = step.kv.extend(step.sequences, drafts.num_draft.astype(np.int64) + 1)
        token_ids = fed_token_ids(step, drafts, batch_rows, slots)
        logits = self.model.step_logits(token_ids, batch, step.kv, follower=step.follower)
        return Scored(logits, batch_rows, slots)


def fed_token_ids(step: StepInput, drafts: Drafts, batch_rows: Int64Array, slots: Int64Array) -> Tensor:
    """int64 [num_rows], the tokens that these rows feed: on the host, or on the device that holds the drafts."""
    if drafts.unread is None:
        block = np.concatenate([step.last_token_ids[:, None], drafts.token_ids], axis=1)
        return torch.from_numpy(block[batch_rows, slots])
    last = torch.from_numpy(step.last_token_ids).to(drafts.unread.device, non_blocking=True)
    on_device = torch.cat([last[:, None], drafts.unread], dim=1).view(-1)
    if len(batch_rows) == len(on_device):
        return on_device
    index = torch.from_numpy(batch_rows * (drafts.width + 1) + slots).to(on_device.device, non_blocking=True)
    return on_device.index_select(0, index)


class ProcessLogits:
    """Penalties, bias and the ban on stop tokens, row by row."""

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Scored:
        rules = step.table.rules
        if not rules.asks_processing:
            return scored
        return scored._replace(logits=process_logits(scored.logits, rules, row_texts(step, drafts, scored)))


class LawVerify:
    """The law of every row, written to its place in the scratch; rows that `backend` cannot represent by the other."""

    def __init__(self, backend: KernelBackend, plain_backend: KernelBackend) -> None:
        self.backend, self.plain_backend = backend, plain_backend

    def __call__(self, step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        num_draft = drafts.width
        target_probs = step.scratch.probs(step.batch, num_draft)
        out = target_probs.view(-1, target_probs.shape[-1])
        places = scored.batch_rows * (num_draft + 1) + scored.slots
        split = int(np.searchsorted(scored.batch_rows, step.num_main))
        for backend, part in ((self.backend, slice(0, split)), (self.plain_backend, slice(split, None))):
            rows = scored.batch_rows[part]
            if len(rows):
                device = scored.logits.device
                backend.verify_probs(
                    scored.logits[part],
                    step.params.take(torch.from_numpy(rows).to(device)),
                    out=out,
                    out_rows=torch.from_numpy(places[part]).to(device),
                )
        return target_probs


class ReportLogprobs:
    """Log-probabilities of what is put out, for the requests that ask for them."""

    def __call__(
        self, step: StepInput, drafts: Drafts, scored: Scored, target_probs: Tensor, accepted: SpecAccept
    ) -> Float32Array | None:
        if not step.table.reports_logprobs:
            return None
        kinds = step.table.logprob_kinds[step.requests[scored.batch_rows]]
        put_out = scored.slots <= accepted.emitted.cpu().numpy()[scored.batch_rows]
        output_token_ids = accepted.output_token_ids
        logprobs = np.zeros(tuple(output_token_ids.shape), np.float32)
        for raw in (True, False):
            rows = np.flatnonzero(put_out & (kinds != NO_LOGPROBS) & ((kinds == RAW) == raw))
            if not len(rows):
                continue
            place = scored.batch_rows[rows], scored.slots[rows]
            on_device = tuple(torch.from_numpy(index).to(scored.logits.device) for index in place)
            token_ids = output_token_ids[on_device][:, None]
            if raw:
                z = scored.logits.index_select(0, torch.from_numpy(rows).to(scored.logits.device)).float()
                values = z.gather(1, token_ids) - z.logsumexp(dim=1, keepdim=True)
            else:
                law = target_probs[on_device]
                values = (law.gather(1, token_ids) / law.sum(dim=1, keepdim=True)).log()
            logprobs[place] = values[:, 0].float().cpu().numpy()
        return logprobs


class CommitEmitted:
    """Commits the accepted prefix and the one token after it: `emitted`, never the telemetry. What comes after a stop
    token within them is dropped."""

    def crop(self, step: StepInput, output_token_ids: Int64Array, counts: Int64Array) -> Int64Array:
        """[B], how many of the `counts` outputs of each row are committed: up to the first that stops its text."""
        return step.table.up_to_stop(step.requests, output_token_ids, counts)

    def __call__(self, step: StepInput, drafts: Drafts, accepted: SpecAccept, logprobs: Float32Array | None) -> int:
        output_token_ids, emitted = read(accepted, drafts)
        counts = self.crop(step, output_token_ids, emitted + 1)
        num_tokens = step.table.append(
            step.requests,
            step.index,
            output_token_ids,
            emitted,
            drafts.token_ids,
            drafts.num_draft,
            counts=counts,
            logprobs=logprobs,
        )
        if drafts.width:
            # The KV holds the fed token and every draft; the committed ones stay but the last, which is not fed yet, or
            # never where it ends the text.
            step.kv.truncate(step.sequences, step.lengths + counts - 1)
        return num_tokens


def read(accepted: SpecAccept, drafts: Drafts) -> tuple[Int64Array, Int64Array]:
    """output_token_ids [B, K+1] and emitted [B] of a step on the host, int64: one copy, the step's one wait.

    Drafts that are still on the device come along. Raises InvalidKernelInput where a kernel refused a row.
    """
    parts = [accepted.output_token_ids, accepted.emitted, accepted.refusal, drafts.unread]
    held = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts if part is not None])
    if held.is_cuda:
        held = held.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        arrived.synchronize()
    output_token_ids, emitted, refusal, unread = _apart(held.numpy(), parts)
    assert output_token_ids is not None
    assert emitted is not None
    if refusal is not None:
        raise_refusal("accept_logits", refusal)
    if unread is not None:
        drafts.have_read(unread)
    return output_token_ids, emitted.astype(np.int64)


def _apart(held: np.ndarray[Any, Any], parts: Sequence[Tensor | None]) -> Iterator[np.ndarray[Any, Any] | None]:
    """The parts whose bytes stand in `held` one behind the other."""
    offset = 0
    for part in parts:
        if part is None:
            yield None
            continue
        values = np.frombuffer(held, _NUMPY[part.dtype], part.numel(), offset).reshape(part.shape)
        offset += values.nbytes
        yield values


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float64: np.float64}


def standard_stages(
    model: Model,
    backend: KernelBackend,
    drafter: Drafter | None,
    *,
    acceptance: str = "chain",
    plain_backend: KernelBackend | None = None,
) -> Stages:
    """The stages of a correct decoder; `plain_backend` serves rows that `backend` cannot represent (default: all)."""
    plain = plain_backend or backend
    verify = LawVerify(backend, plain)
    accept = RoutedAcceptance(acceptance_rule(acceptance, backend), plain)
    return Stages(
        propose=DrafterPropose(drafter),
        forward=RaggedForward(model),
        process=ProcessLogits(),
        verify=verify,
        accept=accept,
        report=ReportLogprobs(),
        commit=CommitEmitted(),
        fused=fused_acceptance(verify, accept, backend, acceptance),
    )
