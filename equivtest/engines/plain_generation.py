"""Token ids that an engine put out, as a generation: nothing is known of them but their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from equivtest.records import SPEC, Generation, Origin, Route

OFF = Route(False, "speculation is off")


def generation_of(token_ids: Sequence[int], *, batch_row: int, speculative: bool) -> Generation:
    """A finished text. Tokens of plain decoding are drawn one by one; how speculation came by its own is unknown."""
    num_tokens = len(token_ids)
    return Generation(
        token_ids=np.array(token_ids, np.int32),
        origins=(Origin.UNKNOWN if speculative else Origin.PLAIN,) * num_tokens,
        slots=np.full(num_tokens, -1, np.int8),
        draft_token_ids=np.full(num_tokens, -1, np.int32),
        steps=np.arange(num_tokens, dtype=np.int32),
        batch_rows=np.full(num_tokens, batch_row, np.int32),
        num_drafts=np.zeros(num_tokens, np.int8),
        route=SPEC if speculative else OFF,
    )
