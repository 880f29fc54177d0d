"""What an engine is: whoever turns requests into generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from equivtest.errors import InvalidSetting
from equivtest.records import Generation, LawColumns, Request

if TYPE_CHECKING:
    from equivtest.decoder.scorer import FinishedSamples, Law

Messages = Sequence[Mapping[str, str]]
"""A conversation: each message has a role and a content."""

StagesWrap = Callable[[Any], Any]
"""A fault as an engine sees it: takes the stages of a decoder step and gives faulty ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to run and how; passed whole."""

    model: str = "smollm2-135m"
    """Registered name, hub id, GGUF file or safetensors folder."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 where the device multiplies it natively, else float32."""
    device: str = "cpu"
    """Where weights, cache and kernels live: cpu or cuda."""
    kernels: str = "auto"
    """Kernel backend; auto takes the first that works here, and the record says which."""
    drafter: str = "early_exit"
    draft_len: int = 2
    """Most drafts a row is offered in one step."""
    early_exit_layers: int | None = None
    """Layers of the drafters early_exit and sampled_exit; None: all but one in fifteen of the model's."""
    draft_model: str | None = None
    """The small model of the `model` drafter, or the network of the `dflash` drafter: named as `model` is. None with
    `dflash`: the one that comes with the model."""
    acceptance: str = "chain"
    """Acceptance rule: chain or match."""
    max_batch: int = 256
    """Requests decoded at once; more wait for a free row."""
    threads: int | None = field(default=None)
    """Processor threads; None leaves torch's choice."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidSetting("dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise InvalidSetting("device", self.device, f"must be one of {', '.join(DEVICES)}")
        if self.draft_len < 1:
            raise InvalidSetting("draft_len", self.draft_len, "must be at least 1")
        for option, value, drafters in (
            ("early_exit_layers", self.early_exit_layers, ("early_exit", "sampled_exit")),
            ("draft_model", self.draft_model, ("model", "dflash")),
        ):
            if value is not None and self.drafter not in drafters:
                words = " or ".join(drafters)
                raise InvalidSetting(option, value, f"goes with the {words} drafter, not with {self.drafter}")
        if self.max_batch < 1:
            raise InvalidSetting("max_batch", self.max_batch, "must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise InvalidSetting("threads", self.threads, "must be at least 1")


DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("cpu", "cuda")


class LawScorer(Protocol):
    """Says what the target's law says of every token of finished samples."""

    def score(self, samples: FinishedSamples, *, on_tokens: Callable[[int], None] | None = None) -> LawColumns:
        """The law columns, [num_samples, num_positions] each. `on_tokens` hears of every batch's tokens."""
        ...

    def score_as(self, samples: FinishedSamples, laws: Sequence[Law]) -> list[LawColumns]:
        """What other laws than the samples' own say of them."""
        ...


class Engine(Protocol):
    """Generates with and without speculation."""

    def encode_prompt(self, messages: Messages) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the model's answer."""
        ...

    def token_text(self, token_id: int) -> str:
        """A token as text, for people."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculative: bool,
        fault: StagesWrap | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """One generation per request, in their order. `on_tokens` hears the tokens of every step."""
        ...

    def scorer(self) -> LawScorer | None:
        """What holds finished samples against the target's law; None where that law cannot be reached."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What generates, in enough detail to do it again; values that JSON can hold."""
        ...
