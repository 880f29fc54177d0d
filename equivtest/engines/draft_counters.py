"""What a server that is watched says of its drafts: vLLM's counters on GET /metrics.

Source: vllm/v1/spec_decode/metrics.py, `vllm:spec_decode_num_draft_tokens` and `..._num_accepted_tokens`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_COUNTER = re.compile(
    r"^vllm:spec_decode_num_(draft|accepted)_tokens(?:_total)?(?:\{[^}]*\})? ([-+.\deE]+)$", re.MULTILINE
)


class DraftCounters(NamedTuple):
    """Since the server started."""

    drafted: int
    accepted: int

    def since(self, before: DraftCounters) -> DraftCounters:
        return DraftCounters(self.drafted - before.drafted, self.accepted - before.accepted)


def read_counters(metrics: str) -> DraftCounters | None:
    """The counters on a page of metrics, over all of its engines; None where it is not vLLM's. A vLLM that does not
    speculate has no such counters, and has made no drafts."""
    if "\nvllm:" not in f"\n{metrics}":
        return None
    totals = {"draft": 0.0, "accepted": 0.0}
    for kind, value in _COUNTER.findall(metrics):
        totals[kind] += float(value)
    return DraftCounters(int(totals["draft"]), int(totals["accepted"]))
