"""Text columns as integer codes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def sorted_codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Codes [num_rows] into the sorted distinct values, so that nothing depends on the order of files or rows."""
    array = column.combine_chunks()
    encoded = array if isinstance(array, pa.DictionaryArray) else array.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), dtype=np.int64)
    rank[order] = np.arange(len(names))
    return rank[encoded.indices.to_numpy()], [names[index] for index in order]
