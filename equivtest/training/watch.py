"""What training tells whoever watches."""

from __future__ import annotations

from typing import Protocol


class Watcher(Protocol):
    """Receives progress. The command line shows it; a library user passes `Silent()`."""

    def stage(self, label: str, total: float, done: float = 0.0) -> None:
        """Work begins of which there is so much, in a unit of its own; some may be done from an earlier sitting."""
        ...

    def advance(self, done: float, line: str) -> None:
        """So much of the stage is done, and how it stands."""
        ...

    def message(self, text: str) -> None:
        """A line that stays."""
        ...


class Silent:
    """Nobody watches."""

    def stage(self, label: str, total: float, done: float = 0.0) -> None:
        pass

    def advance(self, done: float, line: str) -> None:
        pass

    def message(self, text: str) -> None:
        pass
