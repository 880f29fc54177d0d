"""What assisted generation of transformers did, heard through its public hooks."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from equivtest.records import SPEC, Generation, Origin


class AssistedRounds:
    """A logits processor that changes nothing and a streamer, in one.

    In every round transformers drafts, shows every prefix of the drafted text to the logits processors, the longest
    last, and hands what it puts out to the streamer. So the last text seen before that holds the drafts.
    """

    def __init__(self) -> None:
        self._seen: list[int] = []
        self._rounds: list[tuple[list[int], list[int]]] = []
        self._length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._seen = input_ids[0].tolist()
        return scores

    def put(self, value: Tensor) -> None:
        token_ids = value.flatten().tolist()
        if self._length is None:  # the prompt comes first
            self._length = len(token_ids)
            return
        self._rounds.append((self._seen[self._length :], token_ids))
        self._length += len(token_ids)

    def end(self) -> None:
        pass

    def generation(self, *, batch_row: int) -> Generation:
        """The text with the origin of every token.

        A round that puts out fewer tokens than it drafted has recovered the last of them. Only the last round may have
        been cut off instead, by the length or the end of the text: there a token that is the draft was kept.
        """
        token_ids: list[int] = []
        origins: list[Origin] = []
        slots: list[int] = []
        draft_ids: list[int] = []
        steps: list[int] = []
        num_drafts: list[int] = []
        last = len(self._rounds) - 1
        for step, (drafts, put_out) in enumerate(self._rounds):
            for slot, token in enumerate(put_out):
                is_last = slot == len(put_out) - 1
                kept = not is_last or (step == last and token in drafts[slot : slot + 1])
                if not drafts:
                    origins.append(Origin.PLAIN)
                elif slot == len(drafts):
                    origins.append(Origin.BONUS)
                else:
                    origins.append(Origin.ACCEPTED if kept else Origin.RECOVERED)
                token_ids.append(token)
                slots.append(slot if drafts else -1)
                draft_ids.append(drafts[slot] if slot < len(drafts) else -1)
                steps.append(step)
                num_drafts.append(len(drafts))
        return Generation(
            token_ids=np.array(token_ids, np.int32),
            origins=tuple(origins),
            slots=np.array(slots, np.int8),
            draft_token_ids=np.array(draft_ids, np.int32),
            steps=np.array(steps, np.int32),
            batch_rows=np.full(len(token_ids), batch_row, np.int32),
            num_drafts=np.array(num_drafts, np.int8),
            route=SPEC,
        )
