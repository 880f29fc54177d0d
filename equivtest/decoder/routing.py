"""Decides, before a request starts, whether it is decoded speculatively, and says why not."""

from __future__ import annotations

from equivtest.kernels.contract import Capabilities
from equivtest.records import SPEC, Request, Route, SamplingParams
from equivtest.rng import stream_key

SPECULATION_OFF = "speculation is off"


def unsupported_feature(params: SamplingParams, seed: int | None, capabilities: Capabilities) -> str | None:
    """What a backend with these capabilities cannot represent of the request; None when it can represent all of it."""
    if params.min_p > 0 and not capabilities.min_p:
        return "min_p"
    if seed is not None and not capabilities.per_request_seed:
        return "a per-request seed"
    return None


def route(
    params: SamplingParams,
    seed: int | None,
    capabilities: Capabilities,
    *,
    speculative: bool,
    backend: str = "the backend",
    plain_backend: str = "reference",
) -> Route:
    """`SPEC`, or a plain route with its reason.

    A request that the backend cannot represent is kept off the speculative path and its tokens are drawn by
    `plain_backend`; the reason names the feature and both backends, whether or not speculation was asked for.
    """
    missing = unsupported_feature(params, seed, capabilities)
    if missing is not None:
        return Route(False, f"{backend} does not support {missing}; sampled by {plain_backend}")
    return SPEC if speculative else Route(False, SPECULATION_OFF)


def request_stream_key(request: Request) -> int:
    """The key of the request's streams: from its own seed alone when it has one, so that it can be replayed."""
    return request.stream_key if request.seed is None else stream_key("request", request.seed)
