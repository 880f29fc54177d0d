"""The sampling configurations that the protocol tests."""

from __future__ import annotations

from collections.abc import Mapping

from equivtest.errors import UnknownName
from equivtest.records import SamplingParams

CONFIGS: Mapping[str, SamplingParams] = {
    "topp95": SamplingParams(temperature=0.8, top_p=0.95),
    "topk50": SamplingParams(temperature=1.0, top_k=50),
    "topk20p90": SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    "greedy": SamplingParams(temperature=0.0),
    "minp05": SamplingParams(temperature=0.8, min_p=0.05),
    "penalties": SamplingParams(
        temperature=0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.6, presence_penalty=0.4
    ),
    # Ids that every vocabulary has, in a pattern that no vocabulary was made for: one in four forbidden, one favoured.
    "logitbias": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        logit_bias=tuple((i, -100.0 if i % 4 == 1 else 1.0) for i in range(1024) if i % 4 in (1, 2)),
    ),
    "processing": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=0.6,
        presence_penalty=0.4,
        logit_bias=tuple((i, -100.0) for i in range(1, 1024, 4)),
        stop_token_ids=tuple(range(6, 1024, 16)),
        min_tokens=4,
    ),
    "stops": SamplingParams(
        temperature=0.8, top_p=0.95, stop_token_ids=tuple(range(5, 1024, 16)), ignore_eos=False, min_tokens=4
    ),
}

ALL = ("topp95", "topk50", "topk20p90")
"""What `--config all` runs: the sampled configurations that every engine can represent."""


def resolve_configs(names: tuple[str, ...]) -> tuple[str, ...]:
    """Configuration names with `all` expanded, each once, in the order asked. Raises UnknownName."""
    expanded = [name for asked in names for name in (ALL if asked == "all" else (asked,))]
    for name in expanded:
        if name not in CONFIGS:
            raise UnknownName("config", name, (*CONFIGS, "all"))
    return tuple(dict.fromkeys(expanded))


def describe_params(params: SamplingParams) -> str:
    """The parameters in the order of the law, for people: `temperature 0.8, top_p 0.95`."""
    parts = ["greedy" if params.greedy else f"temperature {params.temperature:g}"]
    if params.top_k:
        parts.append(f"top_k {params.top_k}")
    if params.top_p < 1:
        parts.append(f"top_p {params.top_p:g}")
    if params.min_p > 0:
        parts.append(f"min_p {params.min_p:g}")
    for name, default in (("repetition_penalty", 1), ("frequency_penalty", 0), ("presence_penalty", 0)):
        if getattr(params, name) != default:
            parts.append(f"{name} {getattr(params, name):g}")
    if params.logit_bias:
        parts.append(f"logit_bias on {len(params.logit_bias)} tokens")
    if params.stop_token_ids or not params.ignore_eos:
        ends = [f"{len(params.stop_token_ids)} tokens"] * bool(params.stop_token_ids)
        parts.append("stops at " + " and ".join([*ends, *["end of text"] * (not params.ignore_eos)]))
    if params.min_tokens:
        parts.append(f"min_tokens {params.min_tokens}")
    return ", ".join(parts)
