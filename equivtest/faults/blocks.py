"""What faults of several kinds do to a draft block: find the rows that have one, keep another number of its drafts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.stages import Drafts, Int64Array
from equivtest.kernels.contract import PADDING, SpecAccept


def drafted(drafts: Drafts) -> Int64Array:
    """Batch rows with num_draft > 0."""
    return np.flatnonzero(drafts.num_draft > 0)


def on_device(array: npt.NDArray[np.int64] | npt.NDArray[np.int32], like: Tensor) -> Tensor:
    """The array on the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)


def recounted(accepted: SpecAccept, drafts: Drafts, counts: Tensor) -> SpecAccept:
    """The same step with another number of drafts kept: so many, then the token that was drawn to follow the block.

    counts: int32 [B], 0..num_draft, on the device. Nothing is changed in place. A row's own count gives the row itself.
    """
    output = accepted.output_token_ids
    slots = torch.arange(output.shape[1], device=output.device)
    drawn = output.gather(1, accepted.emitted.long()[:, None])
    block = torch.full_like(output, PADDING)
    block[:, : drafts.token_ids.shape[1]] = on_device(drafts.token_ids, output)
    tokens = torch.where(slots < counts[:, None], block, PADDING)
    return SpecAccept(torch.where(slots == counts[:, None], drawn, tokens), counts, accepted.acceptance_telemetry)
