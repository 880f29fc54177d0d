"""The bias that is planted in recordings."""

import numpy as np
import pytest

from equivtest.samples.planted import plant_likeliest


def test_tokens_give_way_to_the_most_frequent_one_of_their_position_and_no_other() -> None:
    tokens = np.random.default_rng(0).choice(5, size=(4000, 3), p=[0.4, 0.3, 0.1, 0.1, 0.1]).astype(np.int32)
    tokens[:, 1] = 4 - tokens[:, 1]
    planted = plant_likeliest(tokens, 0.25, np.random.default_rng(1))
    changed = planted != tokens
    assert set(planted[changed[:, 0], 0]) == {0}
    assert set(planted[changed[:, 1], 1]) == {4}
    # 0.25 x 0.6 of them are planted and not the likeliest already: 0.15 with a standard error of .0033.
    assert changed.mean(axis=0) == pytest.approx([0.15] * 3, abs=0.02)


def test_a_bias_of_one_leaves_nothing_else_and_the_samples_stay_as_they_were() -> None:
    tokens = np.array([[1, 2], [1, 3], [4, 3]], np.int32)
    before = tokens.copy()
    assert plant_likeliest(tokens, 1.0, np.random.default_rng(0)).tolist() == [[1, 3]] * 3
    assert (tokens == before).all()
