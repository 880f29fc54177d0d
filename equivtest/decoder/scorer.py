"""The scorer: what the target's law says at every token of finished samples.

Teacher forcing: the tokens are fed as they were put out, every distinct prefix once, all in one ragged forward; the law
of every position then comes from the kernel backend, as it does when decoding.

A text that a stop token ended has that token at every later position too. The law there is a point mass on it: nothing
is fed, the token has probability 1, and any other token is off the support.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.cut_tolerance import within_tolerance
from equivtest.decoder.draft_laws import DraftLaws, PlacedLaws
from equivtest.decoder.finished_samples import FinishedSamples
from equivtest.decoder.law_columns import DraftColumns, RowLaws, law_columns, row_laws
from equivtest.decoder.logit_processing import RowTexts, process_logits
from equivtest.decoder.model import Model
from equivtest.decoder.shared_prefixes import SharedPrefixes, lexicographic
from equivtest.decoder.sparse_law import Floats, SparseLaw
from equivtest.decoder.stages import Int64Array
from equivtest.decoder.teacher_forcing import TeacherForcing
from equivtest.decoder.token_rules import TokenRules
from equivtest.errors import InvalidSetting
from equivtest.kernels.checks import check_params_supported
from equivtest.kernels.contract import KernelBackend, RowParams
from equivtest.records import LawColumns, SamplingParams
from equivtest.rng import Purpose, uniforms

_MAX_FORWARD_ROWS = 2048
_MAX_LAW_ENTRIES = 1 << 23
"""Most entries of [rows, vocab_size] whose law is held at a time: bounds the memory, not the result."""


class Reading(NamedTuple):
    """How a decoder might have read its own rows; the default is right. Another one makes another law to hold tokens
    against, to find out what a faulty decoder did."""

    row: int = 0
    """The law of a token is read from the row so many tokens later: -1 is the row before its own."""
    history_lag: int = 0
    """The newest so many tokens of the text are not in the history that penalties look at."""
    softmax: bool = True
    """Otherwise logits are taken for probabilities, negative ones for 0."""


RIGHT = Reading()


class Law(NamedTuple):
    """One law to hold tokens against."""

    params: SamplingParams
    reading: Reading = RIGHT


class Scorer:
    """Scores samples in batches of bounded memory. A sample's columns do not depend on its batch-mates, but for
    rounding of the forward. Not for use from two threads."""

    def __init__(
        self,
        model: Model,
        backend: KernelBackend,
        *,
        drafts: DraftLaws | None = None,
        max_forward_rows: int = _MAX_FORWARD_ROWS,
        max_law_rows: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """backend: computes the laws; it must be able to represent every request that is scored.

        drafts: knows the law q that drafts were drawn from. None: drafts were sure, and q is the point mass at the
        draft. eos_token_ids: the model's end-of-text tokens.
        """
        if max_forward_rows < 1:
            raise InvalidSetting("max_forward_rows", max_forward_rows, "must be at least 1")
        self.model, self.backend = model, backend
        vocab_size = model.config.vocab_size
        self.max_forward_rows, self.eos_token_ids = max_forward_rows, tuple(eos_token_ids)
        self.max_law_rows = max_law_rows or max(1, _MAX_LAW_ENTRIES // vocab_size)
        self._drafts = drafts
        follower = None if drafts is None else drafts.follower
        scratch_pages = 0 if drafts is None else drafts.scratch_pages(max_forward_rows)
        self._target = TeacherForcing(model, max_forward_rows, follower=follower, scratch_pages=scratch_pages)
        dtype, device = backend.capabilities.probs_dtype, model.device
        self._probs = torch.empty(self.max_law_rows, vocab_size, dtype=dtype, device=device)
        self._draft_probs = None if drafts is None else torch.empty_like(self._probs)

    def score(self, samples: FinishedSamples, *, on_tokens: Callable[[int], None] | None = None) -> LawColumns:
        """The law columns of the samples, [num_samples, num_positions] each. `on_tokens` hears of every batch's tokens.

        Raises UnsupportedSampling when the backend cannot represent the parameters, InvalidSetting for token ids
        outside the vocabulary (those of the parameters too) or a text longer than the model's context.
        """
        return self.score_as(samples, [Law(samples.params)], on_tokens=on_tokens)[0]

    @torch.inference_mode()
    def score_as(
        self, samples: FinishedSamples, laws: Sequence[Law], *, on_tokens: Callable[[int], None] | None = None
    ) -> list[LawColumns]:
        """What several laws say of the same samples, with one forward: law columns as of `score`, one for each.

        Texts end where the samples' own parameters end them. With a `Reading` of another row, tokens that have no such
        row are held against their own. Raises what `score` does.
        """
        vocab_size = self.model.config.vocab_size
        for law in laws:
            check_params_supported(self.backend, law.params, seeded=False)
        for name, low in (("prompt_token_ids", 0), ("token_ids", 0), ("draft_token_ids", -1)):
            ids = np.asarray(getattr(samples, name))
            if ids.min() < low or ids.max() >= vocab_size:
                raise InvalidSetting(name, (int(ids.min()), int(ids.max())), f"must be in {low}..{vocab_size - 1}")
        own, *rules = (self._rules(params) for params in (samples.params, *(law.params for law in laws)))
        num_samples, num_positions = samples.token_ids.shape
        batch = max(1, self.max_forward_rows // num_positions)
        order = lexicographic(samples.token_ids)
        parts: list[list[LawColumns]] = []
        for start in range(0, num_samples, batch):
            part = samples.take(order[start : start + batch])
            lengths = _lengths(part.token_ids, own)
            parts.append(self._score_batch(part, lengths, list(zip(laws, rules, strict=True))))
            if on_tokens is not None:
                on_tokens(part.token_ids.size)
        back = np.argsort(order)
        return [
            LawColumns(
                **{
                    field.name: np.concatenate([getattr(part, field.name) for part in of_law])[back]
                    for field in dataclasses.fields(LawColumns)
                }
            )
            for of_law in zip(*parts, strict=True)
        ]

    def _rules(self, params: SamplingParams) -> TokenRules:
        return TokenRules.of([params], eos_token_ids=self.eos_token_ids, vocab_size=self.model.config.vocab_size)

    def _score_batch(
        self, samples: FinishedSamples, lengths: Int64Array, laws: Sequence[tuple[Law, TokenRules]]
    ) -> list[LawColumns]:
        shape = samples.token_ids.shape
        prefixes = SharedPrefixes.of(samples.token_ids, lengths)
        hidden = self._target.hidden(samples, prefixes)
        placed = None
        if self._drafts is not None:
            placed = self._drafts.of(samples, prefixes, self._target.kv, self.max_forward_rows)
        nodes = [_shifted(prefixes.node, law.reading.row).ravel() for law, _ in laws]
        before = [_texts(samples, prefixes, law.reading.history_lag) for law, _ in laws]
        token_ids, draft_ids = samples.token_ids.ravel(), samples.draft_token_ids.ravel()
        positions = np.arange(shape[1])
        coins = [
            uniforms(samples.stream_keys[:, None], positions, Purpose.SCORE, draw=draw).ravel() for draw in range(2)
        ]
        columns: list[dict[str, np.ndarray]] = [{} for _ in laws]

        def put(index: int, rows: Int64Array, part: Mapping[str, np.ndarray]) -> None:
            for name, values in part.items():
                columns[index].setdefault(name, np.empty(len(token_ids), values.dtype))[rows] = values

        for start in range(0, len(hidden), self.max_law_rows):
            stop = min(start + self.max_law_rows, len(hidden))
            raw = self.model.logits(hidden[start:stop])
            for index, (law, rules) in enumerate(laws):
                rows = np.flatnonzero((nodes[index] >= start) & (nodes[index] < stop))
                if not len(rows):
                    continue  # every token is read from another row
                part = self._law_columns(
                    raw,
                    before[index].part(start, stop),
                    nodes[index][rows] - start,
                    token_ids[rows],
                    draft_ids[rows],
                    law,
                    rules,
                    (coins[0][rows], coins[1][rows]),
                    None if placed is None else placed._replace(place=placed.place.ravel()[rows]),
                )
                put(index, rows, part)
        ended = np.flatnonzero(prefixes.node.ravel() < 0)
        if len(ended):
            # What a drafter's law would have been there is of no interest: no draft is offered to a text that ended.
            certain = SparseLaw.certain(samples.token_ids[ended // shape[1], lengths[ended // shape[1]] - 1])
            p_draft = certain.at(draft_ids[ended])
            drafts = DraftColumns.of_sure_drafts(p_draft, token_ids[ended], draft_ids[ended])
            part = law_columns(
                certain, token_ids[ended], draft_ids[ended], p_draft, drafts, (coins[0][ended], coins[1][ended])
            )
            for index in range(len(laws)):
                put(index, ended, part)
        return [LawColumns(**{name: values.reshape(shape) for name, values in own.items()}) for own in columns]

    def _law_columns(
        self,
        raw: Tensor,  # [num_nodes, vocab_size], the model's logits
        before: RowTexts,  # [num_nodes]
        node: Int64Array,  # [n], the row of `raw` that predicts each token
        token_ids: Int64Array,  # [n]
        draft_ids: Int64Array,  # [n], -1 for none
        law: Law,
        rules: TokenRules,
        coins: tuple[Floats, Floats],  # [n] each
        drawn: PlacedLaws | None,  # of n drafts
    ) -> dict[str, np.ndarray]:
        params = law.params
        logits = process_logits(raw, rules, before)
        probs = self._law(logits, params, self._probs) if law.reading.softmax else _as_probs(logits)
        laws = row_laws(probs).take(node)
        p_draft = laws.at(draft_ids)
        if drawn is None:
            drafts = DraftColumns.of_sure_drafts(p_draft, token_ids, draft_ids)
        else:
            drafts = self._draft_columns(laws, token_ids, params, drawn)
        columns = law_columns(laws, token_ids, draft_ids, p_draft, drafts, coins)
        off = np.flatnonzero(columns["support_violation"])
        if len(off):
            at = torch.from_numpy(node[off]).to(logits.device)
            tolerated = within_tolerance(
                self.backend, logits[at], token_ids[off], params, raw=raw[at], dtype=self.model.dtype
            )
            columns["support_violation"][off] = ~tolerated
        return columns

    def _draft_columns(
        self, laws: RowLaws, token_ids: Int64Array, params: SamplingParams, drawn: PlacedLaws
    ) -> DraftColumns:
        """0 where there is no draft."""
        assert self._draft_probs is not None
        q_token, q_mean, q_variance = np.zeros((3, len(token_ids)))
        drafted = np.flatnonzero(drawn.place >= 0)
        distinct, row = np.unique(drawn.place[drafted], return_inverse=True)
        for start in range(0, len(distinct), self.max_law_rows):
            part = distinct[start : start + self.max_law_rows]
            out = self._draft_probs[: len(part)]
            q = drawn.law(torch.from_numpy(part).to(out.device), _rows(params, out), out)
            inside = (row >= start) & (row < start + len(part))
            here, q_rows = drafted[inside], row[inside] - start
            q_token[here] = row_laws(q).take(q_rows).at(token_ids[here])
            q_mean[here], q_variance[here] = laws.take(here).moments(q, q_rows)
        return DraftColumns(q_token, q_mean, q_variance)

    def _law(self, logits: Tensor, params: SamplingParams, out: Tensor) -> Tensor:
        return self.backend.verify_probs(logits, _rows(params, logits), out=out[: len(logits)])


def _rows(params: SamplingParams, like: Tensor) -> RowParams:
    """The same parameters for every row of `like`."""
    one = RowParams.of([params], like.device)
    return one.take(torch.zeros(len(like), dtype=torch.int64, device=like.device))


def _as_probs(logits: Tensor) -> Tensor:
    """Logits taken for probabilities that nobody normalised, float32: negative ones count as 0, and where no other is
    left the largest has all."""
    probs = logits.float().clamp(min=0)
    best = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
    return torch.where(probs.sum(dim=1, keepdim=True) > 0, probs, best)


def _lengths(token_ids: Int64Array, rules: TokenRules) -> Int64Array:
    """[num_samples] tokens of each text, its stop token included; all have the first request's rules."""
    ends = rules.stop(np.zeros(len(token_ids), np.int64), token_ids)
    lengths: Int64Array = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, token_ids.shape[1])
    return lengths


def _shifted(node: Int64Array, row: int) -> Int64Array:
    """The node so many positions later in each sample; its own at positions that have none, or whose text has ended."""
    positions = np.arange(node.shape[1]) + row
    there = np.where((positions >= 0) & (positions < node.shape[1]), positions, np.arange(node.shape[1]))
    moved = node[:, there]
    return np.where((node < 0) | (moved < 0), node, moved)


def _texts(samples: FinishedSamples, prefixes: SharedPrefixes, history_lag: int) -> RowTexts:
    """What stands before each node: the prompt, and the tokens of the first sample that has it but for the newest."""
    rows, positions = np.nonzero(prefixes.is_new)
    prompt = np.broadcast_to(
        np.array(samples.prompt_token_ids), (len(samples.token_ids), len(samples.prompt_token_ids))
    )
    prompt_lengths = np.full(len(rows), len(samples.prompt_token_ids))
    return RowTexts(
        requests=np.zeros(len(rows), np.int64),
        texts=np.concatenate([prompt, samples.token_ids], axis=1),
        rows=rows,
        prompt_lengths=prompt_lengths,
        lengths=prompt_lengths + np.maximum(positions - history_lag, 0),
    )
