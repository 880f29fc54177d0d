"""Requests that an engine may answer in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivtest.records import Request


def alike(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    """Neighbours of one prompt, parameters and length, at most `size`, in order; a request with a seed is alone."""
    start = 0
    for stop in range(1, len(requests) + 1):
        first = requests[start]
        full = stop - start == size or stop == len(requests) or first.seed is not None
        if full or _asks(requests[stop]) != _asks(first):
            yield requests[start:stop]
            start = stop


def _asks(request: Request) -> tuple[object, ...]:
    return request.prompt_token_ids, request.params, request.max_tokens, request.seed
