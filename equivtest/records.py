"""Frozen records that cross rooms. Torch-free: everything here can be read on a machine that only analyses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from equivtest.errors import InvalidSetting


class Arm(StrEnum):
    """One of the four ways a prompt is decoded."""

    OFF = "off"
    """Plain decoding."""
    ON = "on"
    """Speculative decoding: the subject of the test."""
    ON_NULL = "on_null"
    """Speculative decoding again with other seeds: the A/A control, which must agree with `on`."""
    BIASED = "biased"
    """Speculative decoding with a planted fault: the teeth, which must differ from `off`."""


class Comparison(StrEnum):
    """Which two arms are compared, and what for."""

    OFF_ON = "off_on"
    """The gate: is speculative decoding the same as plain decoding?"""
    ON_ON_NULL = "on_on_null"
    """The A/A control: does speculative decoding agree with itself under other seeds?"""
    OFF_BIASED = "off_biased"
    """The teeth: is a planted fault seen?"""

    @property
    def arms(self) -> tuple[Arm, Arm]:
        """The two arms, in the order in which the statistics take them."""
        return _COMPARED[self]

    @property
    def words(self) -> str:
        """For people: `off vs on`."""
        return " vs ".join(self.arms)


_COMPARED: Mapping[Comparison, tuple[Arm, Arm]] = {
    Comparison.OFF_ON: (Arm.OFF, Arm.ON),
    Comparison.ON_ON_NULL: (Arm.ON, Arm.ON_NULL),
    Comparison.OFF_BIASED: (Arm.OFF, Arm.BIASED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKey:
    """Consecutive seeds of one arm, config and prompt: what one file of samples holds."""

    arm: str
    """Name of the arm."""
    config: str
    """Name of the sampling configuration."""
    prompt_id: str
    """Id of the prompt."""
    seed_start: int
    """First seed."""
    seed_stop: int
    """One past the last seed."""

    def __post_init__(self) -> None:
        for field in ("arm", "config", "prompt_id"):
            if not getattr(self, field):
                raise InvalidSetting(
                    setting=f"ShardKey.{field}", value=getattr(self, field), requirement="must not be empty"
                )
        if not 0 <= self.seed_start < self.seed_stop:
            raise InvalidSetting(
                setting="ShardKey seeds",
                value=(self.seed_start, self.seed_stop),
                requirement="must satisfy 0 <= seed_start < seed_stop",
            )

    @property
    def num_seeds(self) -> int:
        return self.seed_stop - self.seed_start


class Origin(StrEnum):
    """How a token came to be put out."""

    ACCEPTED = "accepted"
    """A draft token that was kept."""
    RECOVERED = "recovered"
    """Drawn from the residual after the first rejection."""
    BONUS = "bonus"
    """Drawn from the target after every draft of the round was accepted."""
    PLAIN = "plain"
    """Drawn from the target in a step where no draft was offered."""
    ENDED = "ended"
    """No token: the text had stopped before. Samples on disk repeat the stop token there, so that every sample has
    every position."""
    UNKNOWN = "unknown"
    """The engine does not say: servers of other people do not, nor do recordings with a planted fault."""


class Nature(StrEnum):
    """What a gate has to make of an altered decoder."""

    CONTROL = "control"
    """Nothing was altered: must pass."""
    FAULT = "fault"
    """Wrong: must be found."""
    VARIANT = "variant"
    """Unusual and right, though somebody called it a bug: must pass."""
    LOSSY = "lossy"
    """Trades the law for speed by design: must be found."""

    @property
    def must_be_found(self) -> bool:
        return self in (Nature.FAULT, Nature.LOSSY)


class Family(StrEnum):
    """Kinds of evidence, each of which may find a faulty decoder."""

    MARGINAL = "marginal"
    """Histograms of each position against plain decoding: the protocol of record."""
    JOINT = "joint"
    """Whole samples against plain decoding."""
    LAW = "law"
    """Every token against the target's law, by sums and transforms."""
    SUPPORT = "support"
    """A token that the law does not hold, or a draft put out that had been rejected."""
    DUPLICATES = "duplicates"
    """Samples that repeat."""
    REPLAY = "replay"
    """The same seed gives the same text, alone, in any batch and in any order."""
    DRAFTS = "drafts"
    """Sampled drafts are drawn from the law that they are handed on with, by the decoder's own coins."""
    IDENTITY = "identity"
    """Greedy text is the same with and without speculation."""
    LOGPROBS = "logprobs"
    """Reported log-probabilities are those of the law."""


KILL_LEVEL = 1e-3
"""Adjusted p-value of a family at or below which a decoder counts as found: of a thousand correct decoders that one
family looks at, it finds one by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What one family of evidence said of one decoder."""

    family: Family
    test: str
    """The test with the smallest p-value."""
    p_value: float
    """Adjusted for every test of the family."""
    num_tokens: int | None
    """Tokens of the decoder with which the family finds it, as with all larger numbers that were tried, each twice the
    one before; None where it does not."""

    @property
    def found(self) -> bool:
        return self.p_value <= KILL_LEVEL


class Word(StrEnum):
    """The four verdicts."""

    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"


EXIT_CODES: Mapping[Word, int] = {Word.EQUIVALENT: 0, Word.DIFFERENT: 1, Word.INCONCLUSIVE: 3, Word.INVALID: 4}
"""Exit code of each verdict; 2 is a usage error, and nothing else ever exits 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling law.

    First the logits are processed: repetition, frequency and presence penalty, logit bias, then the stop tokens are
    masked while fewer than `min_tokens` are put out. Then temperature, top-k, softmax, top-p, min-p, renormalise.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy (argmax, lowest id on a tie)."""
    top_k: int = 0
    """Keep the k largest logits and all ties at the cut; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens with at least this mass, and all ties at the cut."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the largest probability."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in prompt or text (Keskar et al. 2019)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time the text has it; the prompt does not count."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the text has; the prompt does not count."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit) pairs, each id once."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the text; they are part of it."""
    ignore_eos: bool = True
    """Whether the model's own end-of-text tokens are tokens like any other. The protocol wants every position of every
    sample, so this is the default."""
    min_tokens: int = 0
    """Nothing that stops a text is put out before so many tokens are."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidSetting("temperature", self.temperature, "must be finite and at least 0")
        if self.top_k < 0:
            raise InvalidSetting("top_k", self.top_k, "must be at least 0 (0 keeps all)")
        if not 0 < self.top_p <= 1:
            raise InvalidSetting("top_p", self.top_p, "must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise InvalidSetting("min_p", self.min_p, "must be between 0 and 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InvalidSetting("repetition_penalty", self.repetition_penalty, "must be finite and above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidSetting(name, getattr(self, name), "must be finite")
        ids = [token_id for token_id, _ in self.logit_bias]
        if len(set(ids)) < len(ids) or not all(math.isfinite(bias) for _, bias in self.logit_bias):
            raise InvalidSetting("logit_bias", self.logit_bias, "must be finite and name each token id once")
        if self.min_tokens < 0:
            raise InvalidSetting("min_tokens", self.min_tokens, "must be at least 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


class Route(NamedTuple):
    """Whether a request is decoded speculatively, decided before it starts."""

    speculative: bool
    reason: str
    """Why the request goes plain; empty on the speculative path."""

    def __str__(self) -> str:
        return "spec" if self.speculative else f"plain: {self.reason}"


SPEC = Route(True, "")


LogprobKind = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation to make."""

    prompt_token_ids: tuple[int, ...]
    """The prompt as token ids; requests with the same prompt share its KV pages."""
    params: SamplingParams
    """The sampling law."""
    stream_key: int
    """64-bit key of this request's random streams (`rng.stream_key`)."""
    max_tokens: int
    """Most tokens to generate; a stop token ends the request before that."""
    seed: int | None = None
    """The user's wish for replay: the same seed gives the same text in any batch. None for protocol samples."""
    logprobs: LogprobKind | None = None
    """Report every token's log-probability: raw, of the model's softmax, or processed, of the law it is drawn from."""
    label: str = ""
    """What it is for, in words that an error can name it by: arm, config, prompt and seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One finished request: parallel arrays of length num_tokens, one entry per generated position.

    num_tokens is below the request's max_tokens where a stop token ended the text; that token is the last one.
    """

    token_ids: npt.NDArray[np.int32]
    origins: tuple[Origin, ...]
    slots: npt.NDArray[np.int8]
    """Index in the draft block the token came out at: 0..K-1, num_draft for bonus, -1 for plain."""
    draft_token_ids: npt.NDArray[np.int32]
    """The draft offered at this position; -1 where none was (bonus and plain)."""
    steps: npt.NDArray[np.int32]
    """Index of the batch step that put the token out."""
    batch_rows: npt.NDArray[np.int32]
    """Row of the request in the batch at that step."""
    num_drafts: npt.NDArray[np.int8]
    """Drafts offered to the request at that step."""
    route: Route
    logprobs: npt.NDArray[np.float32] | None = None
    """Log-probability of each token, nats, as the request asked for it; None where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawColumns:
    """What the target's law p says at each token y of finished samples: arrays [num_samples, num_positions].

    q is the law the draft was drawn from, a point mass at the draft of a greedy drafter. Nothing is NaN: where no draft
    was offered `has_draft` is False and the columns of the draft are 0.
    """

    p_token: npt.NDArray[np.float64]
    """p(y); 0 where a filter removes y."""
    has_draft: npt.NDArray[np.bool_]
    """Whether a draft was offered at the token."""
    p_draft: npt.NDArray[np.float64]
    """p(draft)."""
    q_token: npt.NDArray[np.float64]
    """q(y)."""
    q_mean: npt.NDArray[np.float64]
    """Mean of q over p: p(draft) for a greedy drafter."""
    q_variance: npt.NDArray[np.float64]
    """Variance of q over p."""
    pit_rank: npt.NDArray[np.float64]
    """Mass of the tokens above y in descending p, plus a random part of the mass of y and its ties; in [0, 1]."""
    pit_vocab: npt.NDArray[np.float64]
    """Mass of the ids below y, plus a random part of p(y); in [0, 1]."""
    entropy: npt.NDArray[np.float64]
    """Mean of -ln p over p, nats."""
    var_surprisal: npt.NDArray[np.float64]
    """Variance of -ln p over p, squared nats."""
    support_violation: npt.NDArray[np.bool_]
    """p(y) = 0, beyond the scorer's tolerance at the cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One test's result. Fields that a test does not define are None; no field is ever NaN."""

    family: str
    """marginal, joint or law."""
    name: str
    """The test within its family."""
    stratum: str
    """What it was computed on, for instance "off vs on / topp95"."""
    statistic: float
    df: float | None = None
    p_value: float
    adjusted_p: float | None = None
    """p-value adjusted for every test that it was made with; None where nothing was adjusted."""
    estimate: float | None = None
    """Effect size in the unit that `method` names."""
    ci_low: float | None = None
    ci_high: float | None = None
    margin: float | None = None
    """Equivalence margin that the interval must lie inside, if the test bears one."""
    num_tokens: int
    method: str
    """How the p-value and the estimate were computed, in one phrase."""

    def __post_init__(self) -> None:
        for field in ("statistic", "df", "p_value", "adjusted_p", "estimate", "ci_low", "ci_high", "margin"):
            value = getattr(self, field)
            if value is not None and math.isnan(value):
                raise InvalidSetting(f"Evidence.{field}", value, f"{self.family}/{self.name} must not be NaN")
        for field in ("p_value", "adjusted_p"):
            value = getattr(self, field)
            if value is not None and not 0 <= value <= 1:
                raise InvalidSetting(f"Evidence.{field}", value, f"{self.family}/{self.name} must be in [0, 1]")
