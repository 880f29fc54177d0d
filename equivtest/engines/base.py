"""What an engine is: whoever turns requests into generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from equivtest.errors import InvalidSetting
from equivtest.records import Generation, LawColumns, Request, SamplingParams

if TYPE_CHECKING:
    from equivtest.decoder.finished_samples import FinishedSamples
    from equivtest.decoder.scorer import Law

Messages = Sequence[Mapping[str, str]]
"""A conversation: each message has a role and a content."""

StagesWrap = Callable[[Any], Any]
"""A fault as an engine sees it: takes the stages of a decoder step and gives faulty ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where an OpenAI-compatible server answers, and how it is asked."""

    spec_off: str | None = None
    """Address of a server that does not speculate, such as http://localhost:8000; None: it cannot be had now."""
    spec_on: str | None = None
    """Address of one that does."""
    api: str = "completions"
    """How it is spoken to: completions (OpenAI's), or the own ways of llamacpp or sglang."""
    served_model: str | None = None
    """Name under which the server knows the model; None takes the only one that it lists."""
    tokenizer: str | None = None
    """What tokenises for a model whose weights are not at hand, named as a model is. Its law is then out of reach."""
    choices: int = 1
    """Samples asked for in one request, which share its seed."""
    concurrency: int = 8
    """Requests under way at once."""
    timeout_s: float = 120.0
    """Longest wait for an answer."""
    retries: int = 5
    """How often a request is repeated that got none, or none that can be read."""
    backoff_s: float = 0.5
    """Wait before the first repeat, doubled before each further one; a server that names a time is waited for."""
    seeded: bool = True
    """Send a seed of its own with every request; otherwise samples come from the server's own stream."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request beside ours, or in their place."""
    forbid_eos: bool = False
    """Forbid the end of text by a logit bias, in both arms and in the law: for servers that cannot ignore it."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as a bearer token, and kept nowhere."""

    def __post_init__(self) -> None:
        for option, low in (("choices", 1), ("concurrency", 1), ("retries", 0), ("timeout_s", 0.001), ("backoff_s", 0)):
            if not getattr(self, option) >= low:
                raise InvalidSetting(option, getattr(self, option), f"must be at least {low}")
        if not (self.spec_off or self.spec_on):
            raise InvalidSetting("spec_off", None, "the openai engine needs --spec-off URL, --spec-on URL or both")
        for option in ("spec_off", "spec_on"):
            url = urlsplit(getattr(self, option) or "http://none")
            if url.scheme not in ("http", "https") or not url.netloc:
                raise InvalidSetting(option, getattr(self, option), "must be an address such as http://localhost:8000")
            if "@" in url.netloc or url.query or url.fragment:
                # It is not repeated here either: it may hold a secret.
                raise InvalidSetting(option, "...", "must be a plain address; a key is read from the environment")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is loaded in this process."""

    speculative_config: Mapping[str, Any]
    """vLLM's own, such as {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's LLM in both arms beside ours, or in their place."""

    def __post_init__(self) -> None:
        if not self.speculative_config:
            example = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
            raise InvalidSetting("speculative_config", {}, f"the vllm engine needs vLLM's own as JSON: '{example}'")
        if "speculative_config" in self.engine_args:
            raise InvalidSetting("engine_args", dict(self.engine_args), "are of both arms: only one of them speculates")


AUTO = "auto"
"""The drafter that an engine chooses itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to run and how; passed whole."""

    engine: str = "decoder"
    """Who generates: decoder (the built-in one), transformers, vllm, openvino or openai (a server)."""
    model: str = "smollm2-135m"
    """Registered name, hub id, GGUF file or safetensors folder."""
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 where the device multiplies it natively, else float32."""
    device: str = "cpu"
    """Where weights, cache and kernels live: cpu or cuda."""
    kernels: str = "auto"
    """Kernel backend; auto takes the first that works here, and the record says which."""
    drafter: str = AUTO
    """What drafts; auto: the engine's choice for the model, see `settled`, and the record says which."""
    draft_len: int | None = 2
    """Most drafts a row is offered in one step; None: the decoder measures which length pays at `max_batch` requests,
    and keeps to it. On a CPU fewer are faster, but one would leave every later slot of a block untested."""
    early_exit_layers: int | None = None
    """Layers of the drafters early_exit and sampled_exit; None: all but one in fifteen of the model's."""
    draft_model: str | None = None
    """The small model of the `model` drafter, or the network of the `dflash` drafter: named as `model` is. None with
    `dflash`: the one that comes with the model."""
    drafts: str = "likeliest"
    """How a dflash drafter with a Markov head picks its drafts: likeliest, or drawn from the request's law. Drawn ones
    are accepted oftener under the chain rule."""
    acceptance: str = "chain"
    """Acceptance rule: chain or match."""
    max_batch: int = 256
    """Requests decoded at once; more wait for a free row."""
    threads: int | None = field(default=None)
    """Processor threads; None leaves torch's choice."""
    server: ServerOptions | None = None
    """Of the engine openai, and only of it."""
    vllm: VllmOptions | None = None
    """Of the engine vllm, and only of it."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidSetting("dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise InvalidSetting("device", self.device, f"must be one of {', '.join(DEVICES)}")
        if self.draft_len is None and self.engine != "decoder":
            raise InvalidSetting("draft_len", "auto", f"is for the built-in decoder, not for {self.engine}")
        if self.draft_len is not None and self.draft_len < 1:
            raise InvalidSetting("draft_len", self.draft_len, "must be at least 1")
        for option, value, drafters in (
            ("early_exit_layers", self.early_exit_layers, ("early_exit", "sampled_exit")),
            ("draft_model", self.draft_model, ("model", "dflash")),
        ):
            if value is not None and self.drafter not in (*drafters, AUTO):
                words = " or ".join(drafters)
                raise InvalidSetting(option, value, f"goes with the {words} drafter, not with {self.drafter}")
        if self.drafts not in DRAFTS:
            raise InvalidSetting("drafts", self.drafts, f"must be one of {', '.join(DRAFTS)}")
        if self.drafts == "drawn" and (self.drafter not in ("dflash", AUTO) or self.acceptance != "chain"):
            raise InvalidSetting("drafts", self.drafts, "goes with the dflash drafter and the chain rule")
        if self.max_batch < 1:
            raise InvalidSetting("max_batch", self.max_batch, "must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise InvalidSetting("threads", self.threads, "must be at least 1")

    def settled(self, drafter: str) -> EngineOptions:
        """With `drafter` where the choice was left to the engine, or early_exit where its layers are given.

        Raises InvalidSetting where `early_exit_layers` or `draft_model` are for another.
        """
        if self.drafter != AUTO:
            return self
        return replace(self, drafter=drafter if self.early_exit_layers is None else "early_exit")


DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("cpu", "cuda")
DRAFTS = ("likeliest", "drawn")


class LawScorer(Protocol):
    """Says what the target's law says of every token of finished samples."""

    def score(self, samples: FinishedSamples, *, on_tokens: Callable[[int], None] | None = None) -> LawColumns:
        """The law columns, [num_samples, num_positions] each. `on_tokens` hears of every batch's tokens."""
        ...

    def score_as(self, samples: FinishedSamples, laws: Sequence[Law]) -> list[LawColumns]:
        """What other laws than the samples' own say of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do. The pipeline asks for these, never for a kind of engine."""

    takes_faults: bool = False
    """`generate` plants the fault it is given. Elsewhere a bias is planted in the recordings of arm on."""
    replays: bool = False
    """A seeded request gives the same text alone, in any batch and in any order."""
    exact: bool = False
    """Greedy text is the same with and without speculation, but for a near tie in thousands of tokens: float32."""
    decodes_plain: bool = True
    decodes_speculatively: bool = True
    """Both, but for a server that can be had in one way at a time."""


class Engine(Protocol):
    """Generates with and without speculation."""

    @property
    def capabilities(self) -> Capabilities:
        """What can be asked of it."""
        ...

    def refusal(self, params: SamplingParams) -> str | None:
        """Why requests with these parameters cannot be decoded; None where they can."""
        ...

    def encode_prompt(self, messages: Messages) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the model's answer."""
        ...

    def token_text(self, token_id: int) -> str:
        """A token as text, for people."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer as text, without special tokens such as the one that ends it."""
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
        """What generates, in enough detail to do it again; values that JSON can hold. The same in every sitting of a
        run."""
        ...

    def notes(self) -> Mapping[str, str]:
        """What a reader must know of how the samples of this sitting came about so far: a line for each topic."""
        ...

    def close(self) -> None:
        """Give back connections and the like; nothing is asked of the engine afterwards."""
        ...
