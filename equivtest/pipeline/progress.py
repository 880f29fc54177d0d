"""What long work tells whoever watches. The command line shows it; a library user passes nothing."""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
    """Receives progress. `total` and `num_tokens` count generated tokens."""

    def start(self, label: str, total: int) -> None: ...

    def advance(self, num_tokens: int) -> None: ...

    def skip(self, num_tokens: int) -> None:
        """Tokens that were already on disk, or are not needed: done, but not part of the rate."""
        ...

    def finish(self) -> None: ...

    def message(self, text: str) -> None: ...


class Silent:
    """The default listener."""

    def start(self, label: str, total: int) -> None:
        pass

    def advance(self, num_tokens: int) -> None:
        pass

    def skip(self, num_tokens: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def message(self, text: str) -> None:
        pass
