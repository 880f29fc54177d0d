"""What a chat template puts around a question: it lets a model ask itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.engines.base import Engine
from equivtest.errors import UnsupportedModel

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """The tokens before and after the user's words in a chat of one question, the header of the answer included."""

    opening: TokenIds
    closing: TokenIds

    @classmethod
    def of(cls, engine: Engine) -> ChatFrame:
        """What chats with different words have in common. Raises UnsupportedModel where that is not enough to tell the
        user from the assistant, as with a model that has no chat template."""
        chats = [engine.encode_prompt([{"role": "user", "content": words}]) for words in ("A", "B7")]
        opening, closing = _common(*chats), _common(*(chat[::-1] for chat in chats))[::-1]
        if not opening or not closing:
            raise UnsupportedModel(
                str(engine.describe()["model"]), "it has no chat template in which it could ask itself questions"
            )
        return cls(opening=opening, closing=closing)

    def prompt(self, question: Sequence[int]) -> TokenIds:
        """A chat that asks the question, ready for the answer."""
        return (*self.opening, *question, *self.closing)


def _common(one: Sequence[int], other: Sequence[int]) -> TokenIds:
    """Their longest common beginning."""
    pairs = list(zip(one, other, strict=False))
    length = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return tuple(one[:length])
