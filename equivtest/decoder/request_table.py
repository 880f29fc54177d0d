"""The requests of one `generate` call as arrays: what was asked, and what was committed so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from equivtest.decoder.routing import request_stream_key
from equivtest.decoder.token_rules import TokenRules
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import RowParams
from equivtest.records import Generation, LogprobKind, Origin, Request, Route

_ORIGINS = (Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS, Origin.PLAIN)
ACCEPTED, RECOVERED, BONUS, PLAIN = range(4)
NO_LOGPROBS, RAW, PROCESSED = range(3)
_LOGPROB_KINDS: Mapping[LogprobKind | None, int] = {None: NO_LOGPROBS, "raw": RAW, "processed": PROCESSED}


class RequestTable:
    """Arrays over requests (rows) and token positions. Only the commit stage writes, through `append`.

    token_ids: int64 [num_requests, max_length], prompt then committed tokens, 0 past `lengths`.
    lengths, prompt_lengths, max_tokens: int64 [num_requests].
    stream_keys: int64 [num_requests] on the device. params: RowParams [num_requests] on the device.
    rules: what the requests ask beyond that. ended: bool [num_requests], whether a stop token was committed last.
    logprob_kinds: int8 [num_requests], NO_LOGPROBS, RAW or PROCESSED; reports_logprobs: whether any request asks.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        routes: Sequence[Route],
        *,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """eos_token_ids: the model's end-of-text tokens.

        Raises InvalidSetting for an empty prompt, a token outside the vocabulary or max_tokens below 1.
        """
        for index, request in enumerate(requests):
            if not request.prompt_token_ids:
                raise InvalidSetting(f"requests[{index}].prompt_token_ids", (), "needs at least one token")
            if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size:
                raise InvalidSetting(
                    f"requests[{index}].prompt_token_ids",
                    request.prompt_token_ids,
                    f"ids must be in 0..{vocab_size - 1}",
                )
            if request.max_tokens < 1:
                raise InvalidSetting(f"requests[{index}].max_tokens", request.max_tokens, "must be at least 1")
        num_requests = len(requests)
        self.requests = tuple(requests)
        self.routes = tuple(routes)
        self.prompt_lengths = np.array([len(r.prompt_token_ids) for r in requests], np.int64)
        self.max_tokens = np.array([r.max_tokens for r in requests], np.int64)
        self.lengths = self.prompt_lengths.copy()
        self.token_ids = np.zeros((num_requests, int((self.prompt_lengths + self.max_tokens).max(initial=0))), np.int64)
        for row, request in zip(self.token_ids, requests, strict=True):
            row[: len(request.prompt_token_ids)] = request.prompt_token_ids
        self.speculative = np.array([route.speculative for route in routes], bool)
        self.params = RowParams.of([r.params for r in requests], device)
        self.rules = TokenRules.of([r.params for r in requests], eos_token_ids=eos_token_ids, vocab_size=vocab_size)
        self.ended = np.zeros(num_requests, bool)
        self.logprob_kinds = np.array([_LOGPROB_KINDS[r.logprobs] for r in requests], np.int8)
        self.reports_logprobs = bool(self.logprob_kinds.any())
        self.stream_keys = torch.tensor([request_stream_key(r) for r in requests], dtype=torch.int64, device=device)
        width = int(self.max_tokens.max(initial=0))
        self._origins = np.zeros((num_requests, width), np.int8)
        self._slots = np.zeros((num_requests, width), np.int8)
        self._draft_token_ids = np.zeros((num_requests, width), np.int32)
        self._steps = np.zeros((num_requests, width), np.int32)
        self._batch_rows = np.zeros((num_requests, width), np.int32)
        self._num_drafts = np.zeros((num_requests, width), np.int8)
        self._logprobs = np.zeros((num_requests, width if self.reports_logprobs else 0), np.float32)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """int64 [num_requests], tokens committed beyond the prompt."""
        return self.lengths - self.prompt_lengths

    @property
    def remaining(self) -> npt.NDArray[np.int64]:
        """int64 [num_requests], the most tokens still to generate: 0 after a stop token."""
        return np.where(self.ended, 0, self.max_tokens - self.generated)

    def up_to_stop(
        self,
        rows: npt.NDArray[np.int64],  # [B], table rows
        output_token_ids: npt.NDArray[np.int64],  # [B, K+1]
        counts: npt.NDArray[np.int64],  # [B], outputs put out
    ) -> npt.NDArray[np.int64]:
        """[B], how many of each row's outputs to commit: up to the first that ends its text, which is part of it."""
        if not len(self.rules.stops.token_ids):
            return counts
        stops = self.rules.stop(rows, output_token_ids) & (np.arange(output_token_ids.shape[1]) < counts[:, None])
        return np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, counts)

    def append(
        self,
        rows: npt.NDArray[np.int64],  # [B], table rows, each once
        step: int,
        output_token_ids: npt.NDArray[np.int64],  # [B, K+1]
        emitted: npt.NDArray[np.int64],  # [B], accepted drafts
        draft_token_ids: npt.NDArray[np.int64],  # [B, K]
        num_draft: npt.NDArray[np.int32],  # [B]
        *,
        counts: npt.NDArray[np.int64] | None = None,  # [B], outputs to commit; None: emitted + 1
        logprobs: npt.NDArray[np.float32] | None = None,  # [B, K+1]; needed where a request asks for them
    ) -> int:
        """Commit a step's tokens with how each came about; a stop token that comes last ends its text.

        Returns their number.
        """
        width = output_token_ids.shape[1]
        slots = np.arange(width)
        counts = emitted + 1 if counts is None else counts
        batch_rows, columns = np.nonzero(slots < counts[:, None])
        requests = rows[batch_rows]
        positions = self.generated[requests] + columns
        drafts_offered = num_draft[batch_rows]
        accepted = columns < emitted[batch_rows]
        origins = np.where(
            accepted,
            ACCEPTED,
            np.where(drafts_offered == 0, PLAIN, np.where(columns == drafts_offered, BONUS, RECOVERED)),
        )
        has_draft = columns < drafts_offered
        padded = np.full((len(rows), width), -1, np.int64)
        padded[:, : draft_token_ids.shape[1]] = draft_token_ids
        place = (requests, positions)
        self.token_ids[requests, self.lengths[requests] + columns] = output_token_ids[batch_rows, columns]
        self._origins[place] = origins
        self._slots[place] = np.where(origins == PLAIN, -1, columns)
        self._draft_token_ids[place] = np.where(has_draft, padded[batch_rows, columns], -1)
        self._steps[place] = step
        self._batch_rows[place] = batch_rows
        self._num_drafts[place] = drafts_offered
        if logprobs is not None:
            self._logprobs[place] = logprobs[batch_rows, columns]
        self.lengths[rows] += counts
        self.ended[rows] = self.rules.stop(rows, output_token_ids[np.arange(len(rows)), counts - 1])
        return len(columns)

    def generation(self, row: int) -> Generation:
        """The finished request of a table row."""
        num_tokens = int(self.generated[row])
        prompt_length = int(self.prompt_lengths[row])
        return Generation(
            token_ids=self.token_ids[row, prompt_length : prompt_length + num_tokens].astype(np.int32),
            origins=tuple(_ORIGINS[code] for code in self._origins[row, :num_tokens]),
            slots=self._slots[row, :num_tokens].copy(),
            draft_token_ids=self._draft_token_ids[row, :num_tokens].copy(),
            steps=self._steps[row, :num_tokens].copy(),
            batch_rows=self._batch_rows[row, :num_tokens].copy(),
            num_drafts=self._num_drafts[row, :num_tokens].copy(),
            route=self.routes[row],
            logprobs=self._logprobs[row, :num_tokens].copy() if self.logprob_kinds[row] else None,
        )
