"""equivtest: a merge gate for speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equivtest.battery import check_sampler

__version__ = "0.1.0"
__all__ = ["__version__", "check_sampler"]


def __getattr__(name: str) -> Any:
    """`check_sampler` is imported when it is asked for: most of the package works without torch."""
    if name == "check_sampler":
        from equivtest.battery import check_sampler

        return check_sampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
