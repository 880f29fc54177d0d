"""What requests ask beyond the law of one row: rules that name tokens, or that look at the text so far.

Requests that share one `SamplingParams` object share its entry here, a kind: a biased list of a thousand tokens is
held once however many requests ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting
from equivtest.records import SamplingParams

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSets:
    """Sets of token ids, one after the other in one array."""

    starts: Int64Array
    """[num_sets + 1], first entry of each set and the end of the last."""
    token_ids: Int64Array
    """[num_entries], rising within a set."""
    vocab_size: int

    @classmethod
    def of(cls, name: str, sets: Sequence[Sequence[int]], vocab_size: int) -> TokenSets:
        """name: the setting that the ids come from. Raises InvalidSetting for an id outside the vocabulary."""
        distinct = [np.unique(np.asarray(ids, np.int64)) for ids in sets]
        for ids in distinct:
            if len(ids) and not 0 <= ids[0] <= ids[-1] < vocab_size:
                wrong = ids[(ids < 0) | (ids >= vocab_size)].tolist()
                raise InvalidSetting(name, wrong, f"ids must be in 0..{vocab_size - 1}, the vocabulary")
        return cls(
            starts=np.cumsum([0, *(len(ids) for ids in distinct)]),
            token_ids=np.concatenate([np.empty(0, np.int64), *distinct]),
            vocab_size=vocab_size,
        )

    @property
    def sizes(self) -> Int64Array:
        """[num_sets]"""
        return np.diff(self.starts)

    def entries(self, sets: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The entries of `sets` ([n], repeats allowed): the index into `sets` of each, and its index here."""
        sizes = self.sizes[sets]
        rows = np.repeat(np.arange(len(sets)), sizes)
        ranks = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return rows, self.starts[sets][rows] + ranks

    def contain(self, sets: Int64Array, token_ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each token is in its set; shapes broadcast. Ids below 0 are in none."""
        if not len(self.token_ids):
            return np.zeros(np.broadcast_shapes(sets.shape, token_ids.shape), np.bool_)
        keys = np.repeat(np.arange(len(self.sizes)), self.sizes) * self.vocab_size + self.token_ids
        wanted = sets * self.vocab_size + token_ids
        nearest = keys[np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)]
        found: npt.NDArray[np.bool_] = (nearest == wanted) & (token_ids >= 0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRules:
    """The rules of the requests of one call, host arrays."""

    kind: Int64Array
    """[num_requests], which entry of the arrays below holds for a request."""
    repetition_penalty: Float32Array
    """[num_kinds]"""
    frequency_penalty: Float32Array
    """[num_kinds]"""
    presence_penalty: Float32Array
    """[num_kinds]"""
    biased: TokenSets
    """[num_kinds] sets: the tokens that a logit bias names."""
    bias: Float32Array
    """[entries of `biased`], what is added to their logits."""
    stops: TokenSets
    """[num_kinds] sets: the tokens that end the text, end-of-text tokens included where they count."""
    min_tokens: Int64Array
    """[num_kinds], the length from which on a stop token may come; 0 where nothing stops a text."""
    asks_processing: bool
    """Whether any request wants logits other than the model's."""

    @property
    def reads_tokens(self) -> bool:
        """Whether a step must see the tokens of the one before it on the host."""
        return self.asks_processing or len(self.stops.token_ids) > 0

    @classmethod
    def of(cls, params: Sequence[SamplingParams], *, eos_token_ids: Sequence[int], vocab_size: int) -> TokenRules:
        """One request per entry of `params`. eos_token_ids: the model's end-of-text tokens.

        Raises InvalidSetting for a bias or a stop token outside the vocabulary, and for min_tokens where every token
        stops the text.
        """
        kinds = list({id(p): p for p in params}.values())
        index = {id(p): kind for kind, p in enumerate(kinds)}
        stops = TokenSets.of(
            "stop_token_ids",
            [(*p.stop_token_ids, *(() if p.ignore_eos else eos_token_ids)) for p in kinds],
            vocab_size,
        )
        for kind in np.flatnonzero(stops.sizes == vocab_size):
            if kinds[kind].min_tokens:
                raise InvalidSetting("min_tokens", kinds[kind].min_tokens, "needs a token that does not stop the text")
        min_tokens = np.where(stops.sizes > 0, np.array([p.min_tokens for p in kinds], np.int64), 0)
        return cls(
            kind=np.array([index[id(p)] for p in params], np.int64),
            repetition_penalty=np.array([p.repetition_penalty for p in kinds], np.float32),
            frequency_penalty=np.array([p.frequency_penalty for p in kinds], np.float32),
            presence_penalty=np.array([p.presence_penalty for p in kinds], np.float32),
            biased=TokenSets.of("logit_bias", [[token_id for token_id, _ in p.logit_bias] for p in kinds], vocab_size),
            bias=np.array([bias for p in kinds for _, bias in sorted(p.logit_bias)], np.float32),
            stops=stops,
            min_tokens=min_tokens,
            asks_processing=bool(min_tokens.any()) or any(p.penalised or p.logit_bias for p in kinds),
        )

    @property
    def penalised(self) -> npt.NDArray[np.bool_]:
        """[num_kinds], whether logits depend on the tokens before."""
        changed: npt.NDArray[np.bool_] = (
            (self.repetition_penalty != 1) | (self.frequency_penalty != 0) | (self.presence_penalty != 0)
        )
        return changed

    def stop(self, requests: Int64Array, token_ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether a token ([B, ...]) ends the text of its request ([B])."""
        kinds = self.kind[requests].reshape(-1, *(1,) * (token_ids.ndim - 1))
        return self.stops.contain(kinds, token_ids)
