"""Every distinct prefix is one node, and every sample finds its own path."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from equivtest.decoder.shared_prefixes import SharedPrefixes, lexicographic


@given(
    arrays.arrays(np.int64, st.tuples(st.integers(1, 12), st.integers(1, 6)), elements=st.integers(0, 3)),
    st.booleans(),
)
def test_samples_share_a_node_where_and_only_where_they_share_a_prefix(token_ids: np.ndarray, stops: bool) -> None:
    """With `stops` token 3 ends a text, whatever stands after it."""
    token_ids = token_ids[lexicographic(token_ids)]
    ends = (token_ids == 3) & stops
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, token_ids.shape[1])
    prefixes = SharedPrefixes.of(token_ids, lengths)
    assert ((prefixes.node >= 0) == (np.arange(token_ids.shape[1]) < lengths[:, None])).all()
    of_node: dict[int, tuple[int, ...]] = {}
    for sample, row in enumerate(token_ids):
        for position in range(lengths[sample]):
            prefix = tuple(row[:position].tolist())
            assert of_node.setdefault(int(prefixes.node[sample, position]), prefix) == prefix
    assert sorted(of_node) == list(range(prefixes.num_nodes))
    assert len(set(of_node.values())) == prefixes.num_nodes
    fed = prefixes.fed(token_ids, 9)
    assert all(fed[node] == (prefix[-1] if prefix else 9) for node, prefix in of_node.items())
    # Rows that a sequence feeds are its last ones, as a ragged forward has them, and each node is fed once.
    batch = prefixes.batch(3)
    for index in range(len(batch.kv_lens)):
        own = slice(int(batch.query_start[index]), int(batch.query_start[index + 1]))
        length = int(batch.kv_lens[index])
        assert np.array_equal(batch.page_table[index, length - (own.stop - own.start) : length], batch.slots[own])
    assert batch.slots.tolist() == list(range(3, 3 + prefixes.num_nodes))
