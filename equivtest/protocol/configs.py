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
    if params.greedy:
        return "greedy"
    parts = [f"temperature {params.temperature:g}"]
    if params.top_k:
        parts.append(f"top_k {params.top_k}")
    if params.top_p < 1:
        parts.append(f"top_p {params.top_p:g}")
    if params.min_p > 0:
        parts.append(f"min_p {params.min_p:g}")
    return ", ".join(parts)
