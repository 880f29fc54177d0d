"""The kernel contract: what every backend computes.

The one law of the house, in this order (`LAW_ORDER`):

    z = logits / temperature            float32
    top-k      keep z >= the k-th largest z
    softmax    over what is kept
    top-p      keep z >= the z at which the mass of the larger ones first reaches top_p
    min-p      keep p >= min_p * max p
    renormalise; filtered tokens are exact 0.0 (and a kept one may be 0 where float32 only has subnormals, below 1e-37)

Every filter is a threshold on z, so tokens that tie at a cut are all kept, whatever their id. `temperature == 0`
is greedy: a point mass on the largest logit, the lowest id on a tie.

A draw from a row of probabilities is by inverse distribution function in vocabulary order: the first id whose
cumulative probability exceeds u * (row sum), sums in float64. So backends agree token for token on the same streams,
but for inputs within rounding of a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.errors import ScratchTooSmall
from equivtest.records import SamplingParams
from equivtest.rng import Purpose

LAW_ORDER = ("temperature", "top_k", "softmax", "top_p", "min_p", "renormalise")
PADDING = -1
"""Fills output_token_ids past the tokens that were put out."""
MAX_HEAD_DIM = 128
"""Largest head_dim that `paged_attention` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can represent. What it cannot, it refuses; it never approximates."""

    min_p: bool
    per_request_seed: bool
    """A request's streams depend on its own key alone, so a request with a seed can be replayed."""
    ragged_draft: bool
    """Rows of one call may have different num_draft."""
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    """Dtypes of the logits that `verify_probs` takes."""
    probs_dtype: torch.dtype = torch.float32
    """Dtype of probabilities, in and out."""
    attention_dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16})
    """Dtypes of queries, keys and values that `paged_attention` takes: those that a model may have."""
    fused: bool = False
    """It is a `FusedBackend`: accepts from logits, without probabilities in memory."""
    graphs: bool = False
    """A CUDA graph may hold its `paged_attention` and layers: they read nothing on the host."""
    late_lengths: bool = False
    """`paged_attention` reads lengths and pages from the planned tensors when it runs: what they held when it was
    planned does not matter."""


class RowParams(NamedTuple):
    """Sampling parameters, one entry per logits row, all on the device of the logits."""

    temperature: Tensor  # float32 [num_rows]; 0 is greedy
    top_k: Tensor  # int32 [num_rows]; 0 keeps all
    top_p: Tensor  # float32 [num_rows]; in (0, 1]
    min_p: Tensor  # float32 [num_rows]; in [0, 1]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
        """One row per entry of `params`."""
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        )

    def take(self, rows: Tensor) -> RowParams:
        """The parameters of `rows` (int64 [n]), repeats allowed."""
        return RowParams(*(column.index_select(0, rows) for column in self))


class Streams(NamedTuple):
    """Where each row's coins come from (see equivtest.rng)."""

    keys: Tensor  # int64 [B], stream keys
    positions: Tensor  # int64 [B], generated position of the row's first output token


class BlockDrafts(NamedTuple):
    """What a block drafter proposes for K places of each of B rows."""

    token_ids: Tensor  # int64 [B, K]
    candidates: Tensor | None  # int64 [B, K, C], the tokens that could have been drawn; one may stand there twice
    probs: Tensor | None  # float32 [B, K, C], their law; None: a point mass at each draft

    def spread(self, rows: Tensor, batch: int) -> BlockDrafts:
        """As `rows` (int64 [B]) of a larger batch, whose others hold zeros."""

        def spread(column: Tensor) -> Tensor:
            return column.new_zeros(batch, *column.shape[1:]).index_copy_(0, rows, column)

        return BlockDrafts(
            spread(self.token_ids),
            None if self.candidates is None else spread(self.candidates),
            None if self.probs is None else spread(self.probs),
        )

    def dense(self, out: Tensor) -> Tensor:
        """The law over the vocabulary, written to `out`, [B, K, vocab_size] of zeros."""
        assert self.candidates is not None
        assert self.probs is not None
        return out.scatter_add_(2, self.candidates, self.probs.to(out.dtype))


class SpecAccept(NamedTuple):
    """Result of `spec_accept` and `accept_logits`: views into the scratch, valid until its next use."""

    output_token_ids: Tensor  # int64 [B, K+1]: the accepted drafts, then one recovered or bonus token, then PADDING
    emitted: Tensor  # int32 [B]: length of the accepted prefix; the row puts out emitted + 1 tokens. Commit on this.
    acceptance_telemetry: (
        Tensor  # int32 [B]: drafts whose own coin accepts, also past the first rejection. Never commit.
    )
    refusal: Tensor | None = None
    """float64 [3] on the device: (problem, row, value), problem an index into REFUSALS, 0 for none. Set where a kernel
    refuses values without waiting for the host: whoever reads the tokens must give it to `checks.raise_refusal`."""


REFUSALS = (
    "",
    "logits must not hold NaN or +inf",
    "logits must hold at least one finite value",
    "the largest logit divided by temperature overflows float32",
    "probabilities must be finite and at least 0",
    "draft probabilities must be finite and at least 0",
    "probabilities must not all be 0",
    "draft id out of range",
    "num_draft must be in 0..K and row_start must name rows of logits",
    "temperature must be at least 0, top_k at least 0, top_p in (0, 1] and min_p in [0, 1]",
)
"""What a kernel may find wrong with the values of a row."""

AcceptanceRule = Literal["chain", "match"]


class AttentionShape(NamedTuple):
    """What one model's attention calls have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    dtype: torch.dtype


class HostBatch(NamedTuple):
    """An AttentionBatch on the host, int32."""

    page_table: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    query_start: npt.NDArray[np.int32]


class AttentionBatch(NamedTuple):
    """Whose rows attend to what, in one forward. On the device, with a copy on the host for backends that plan
    there."""

    page_table: Tensor  # int32 [B, max_pages]; entries past a sequence's length are ignored
    kv_lens: Tensor  # int32 [B], length of each sequence including this call's rows
    query_start: Tensor  # int32 [B + 1], rows query_start[b]:query_start[b+1] are the last ones of sequence b
    host: HostBatch


AttentionPlan = Any
"""What a backend makes of an AttentionBatch, once a forward; opaque to everyone else."""


class SpecScratch:
    """Every buffer that a step needs, allocated once per executor and never inside a step."""

    def __init__(
        self,
        max_batch: int,
        max_draft: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.max_batch, self.max_draft, self.vocab_size = max_batch, max_draft, vocab_size
        self.target_probs = torch.empty(max_batch, max_draft + 1, vocab_size, dtype=dtype, device=device)
        self.output_token_ids = torch.empty(max_batch, max_draft + 1, dtype=torch.int64, device=device)
        self.emitted = torch.empty(max_batch, dtype=torch.int32, device=device)
        self.acceptance_telemetry = torch.empty(max_batch, dtype=torch.int32, device=device)
        self.token_ids = torch.empty(max_batch * (max_draft + 1), dtype=torch.int64, device=device)
        # What a kernel that judges every row by itself notes of it.
        self.row_tokens = torch.empty(max_batch * (max_draft + 1), dtype=torch.int64, device=device)
        self.row_accepts = torch.empty(max_batch * (max_draft + 1), dtype=torch.int32, device=device)
        self.refusal = torch.zeros(3, dtype=torch.float64, device=device)

    def probs(self, batch: int, num_draft: int) -> Tensor:
        """A contiguous view of target_probs: [batch, num_draft + 1, vocab_size]. Contents are the last call's."""
        self.require("probs", batch=batch, draft=num_draft)
        rows = batch * (num_draft + 1)
        return self.target_probs.view(-1, self.vocab_size)[:rows].view(batch, num_draft + 1, self.vocab_size)

    def accepted(self, batch: int, num_draft: int) -> SpecAccept:
        """Contiguous views of the three outputs of spec_accept, output_token_ids as [batch, num_draft + 1]."""
        self.require("spec_accept", batch=batch, draft=num_draft)
        tokens = self.output_token_ids.view(-1)[: batch * (num_draft + 1)].view(batch, num_draft + 1)
        return SpecAccept(tokens, self.emitted[:batch], self.acceptance_telemetry[:batch])

    def require(self, op: str, *, batch: int, draft: int) -> None:
        """Raise ScratchTooSmall unless `batch` rows of `draft` drafts fit."""
        if batch > self.max_batch or draft > self.max_draft:
            raise ScratchTooSmall(
                op, f"batch {batch}, draft {draft}", f"batch {self.max_batch}, draft {self.max_draft}"
            )


class KernelBackend(Protocol):
    """One implementation of the contract. Every method is deterministic in its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def verify_probs(
        self,
        logits: Tensor,  # [num_rows, vocab_size], a dtype of capabilities.dtypes
        params: RowParams,
        *,
        out: Tensor,  # [num_out_rows, vocab_size] float32 (float64 on the float64 reference), written in place
        out_rows: Tensor | None = None,  # int64 [num_rows], the row of `out` for each row of `logits`; None: the same
    ) -> Tensor:
        """The law of each row, written to `out`, which is returned. Rows of `out` not named keep what they held.

        A ragged verification batch passes its rows' places in [B, K+1] as `out_rows`.
        Raises InvalidKernelInput naming the row for NaN, +inf, no finite logit, or a largest logit that overflows when
        divided by the temperature, before anything is written.
        """
        ...

    def spec_accept(
        self,
        draft_token_ids: Tensor,  # int64 [B, K]; entries at or past num_draft are ignored
        num_draft: Tensor,  # int32 [B], 0..K
        target_probs: Tensor,  # [B, K+1, vocab_size]; rows past num_draft are ignored
        draft_probs: Tensor | None,  # [B, K, vocab_size], the drafter's law q; None: point mass at each draft
        streams: Streams,
        *,
        scratch: SpecScratch,
    ) -> SpecAccept:
        """Chain rejection sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

        Draft i of row b, at position streams.positions[b] + i, is accepted when u * q(d) < p(d), u the ACCEPT coin of
        that position. The first rejection draws from relu(p - q), renormalised, with the RECOVER coin of its position
        (from p itself in the one case where rounding leaves that residual empty); full acceptance draws from row
        num_draft with the BONUS coin of position + num_draft; num_draft 0 draws from row 0 with the PLAIN coin.

        p and q must be normalised to rounding, which is not checked: acceptance and the residual take them as they
        are. Draws are relative to the row's sum, so that this rounding does not matter to them. Raises
        InvalidKernelInput naming the row, before anything is written, for a negative or non-finite entry among those
        it looks at (every draft's own entries, and all of the rows it draws from) and for a row without mass.
        """
        ...

    def sample(
        self, target_probs: Tensor, streams: Streams, *, out: Tensor, purpose: Purpose = Purpose.PLAIN
    ) -> Tensor:
        """One draw per row with the coin of that purpose at its position.

        target_probs: [B, vocab_size]; out: int64 [B], written in place and returned. Refuses what `spec_accept` does.
        """
        ...

    def plan_attention(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        for_graph: bool = False,
        reuse: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """Get ready for the attention calls of one forward, one a layer.

        for_graph: a CUDA graph will hold those calls; no later batch of its has more rows or tokens than `batch`.

        reuse: a plan whose calls a CUDA graph holds. It is brought up to date in its own memory and returned; `batch`
        is then of the same shape, with empty sequences at its end.
        Raises InvalidKernelInput naming the sequence for lengths or pages that cannot be.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,  # [num_rows, num_heads, head_dim], a dtype of capabilities.attention_dtypes
        kv_pages: Tensor,  # [num_pages, 2, page_size, num_kv_heads, head_dim], the query's dtype; [:, 0] keys
        plan: AttentionPlan,
    ) -> Tensor:
        """Causal grouped-query attention over paged keys and values, scale 1/sqrt(head_dim), float32 accumulation.

        Row j of the n rows of sequence b sees positions 0 .. kv_lens[b] - n + j. Returns the shape of `query`. With
        capabilities.graphs there may be rows past query_start[B], which belong to nobody: their output is finite.
        """
        ...

    @property
    def layers(self) -> LayerOps: ...


class FusedBackend(KernelBackend, Protocol):
    """A backend with capabilities.fused."""

    def accept_logits(
        self,
        logits: Tensor,  # [num_rows, vocab_size], a dtype of capabilities.dtypes
        row_start: Tensor,  # int32 [B], the first of the 1 + num_draft logits rows of each batch row
        params: RowParams,  # [B]
        draft_token_ids: Tensor,  # int64 [B, K]
        num_draft: Tensor,  # int32 [B]
        draft_probs: Tensor | None,  # [B, K, vocab_size]
        streams: Streams,
        *,
        rule: AcceptanceRule,
        scratch: SpecScratch,
    ) -> SpecAccept:
        """`verify_probs` and then the acceptance rule, in one.

        Same law, same coins, same tokens, without the probabilities in memory. Does not wait for the device: values
        that it refuses are told in `refusal` of the result.
        """
        ...


Residual = Any
"""The residual stream of a forward's rows, [num_rows, hidden_size], in a form that only its backend's LayerOps know."""


class LayerOps(Protocol):
    """The products and pointwise steps of a transformer layer. Arithmetic and its order are those of Hugging Face
    transformers (RMSNorm in float32 and cast back before the weight, half-rotation RoPE), or more exact.

    Weights are what `linear` made of [out_features, in_features].
    """

    def linear(self, weight: Tensor, norm: Tensor | None = None) -> Any:
        """Lay a weight out for this machine, once. norm: [in_features], of the RMSNorm whose output it multiplies."""
        ...

    def head(self, x: Tensor, weight: Any) -> Tensor:
        """Logits x @ weight.T: [num_rows, out_features], in the dtype of x or in float32."""
        ...

    def residual(self, rows: Tensor) -> Residual:
        """Begin the residual stream with these rows, which it may keep and write to."""
        ...

    def rows(self, hidden: Residual) -> Tensor:
        """The residual stream as it is now, [num_rows, hidden_size] in the model's dtype: valid until `hidden` is
        handed to `add_linear`."""
        ...

    def rms_norm(self, hidden: Residual, norm: Tensor, eps: float) -> Tensor:
        """hidden / rms(hidden) over the last dimension, times norm: [num_rows, hidden_size] in the dtype of norm."""
        ...

    def normed_linear(self, hidden: Residual, eps: float, weight: Any) -> Tensor:
        """rms_norm(hidden) @ weight.T, `weight` made with its norm: [num_rows, out_features]."""
        ...

    def normed_gate(self, hidden: Residual, eps: float, weight: Any) -> Tensor:
        """SwiGLU of rms_norm(hidden): silu(gate) * up, gate over up in the rows of `weight`, which was made with its
        norm; [num_rows, out / 2]."""
        ...

    def add_linear(self, hidden: Residual, x: Tensor, weight: Any) -> Residual:
        """hidden + x @ weight.T; may write into `hidden`."""
        ...

    def rotate_and_store(
        self,
        heads: Tensor,  # [num_rows, num_heads + 2 * num_kv_heads, head_dim], queries (or none), keys, values
        rotary: tuple[Tensor, Tensor],  # cosines and sines, [max_position, head_dim] each
        positions: Tensor,  # int64 [num_rows]
        query_key_norm: Tensor | None,  # [num_heads + num_kv_heads, head_dim], RMSNorm weights before the rotation
        eps: float,
        kv_pages: Tensor,  # [num_pages, 2, page_size, num_kv_heads, head_dim]
        slots: Tensor,  # int64 [num_rows], page * page_size + offset
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to their slots.

        Returns queries [num_rows, num_heads, head_dim].
        """
        ...

    def markov_drafts(
        self,
        logits: Tensor,  # [B, K, vocab_size], what `head` made of each place's hidden state
        gates: Tensor,  # [B, K, hidden_size], in 0..1
        successors: Tensor,  # [vocab_size, hidden_size], what a token says of the one after it
        head: Tensor,  # [vocab_size, hidden_size], the head's weight as it was before `linear`
        law: RowParams | None = None,  # [B]
        streams: Streams | None = None,  # [B], of the first place
    ) -> BlockDrafts:
        """Fill places in turn, each behind the one before. Candidates v are the best tokens of the stripes (see
        markov.py) with logits + head[v] . (gate * successors[previous]) in float32; the logits of the first place know
        the token before it already.

        Without a law the draft is the likeliest. With one it is drawn, from what that law makes of the candidates
        alone, with the DRAFT coin of its position, by inverse distribution function in vocabulary order.
        """
        ...
