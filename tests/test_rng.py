"""Random streams: the published vectors, and what the counter keeps apart."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.rng import Purpose, philox4x32, stream_key, uniforms

KNOWN_ANSWERS = (  # Random123 1.14, tests/kat_vectors, philox4x32 10: counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter: str, key: str, expected: str) -> None:
    np.testing.assert_array_equal(philox4x32(words(counter), words(key)), words(expected))


def test_philox_of_many_counters_is_philox_of_each() -> None:
    counters = np.stack([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = np.stack([words(key) for _, key, _ in KNOWN_ANSWERS])
    np.testing.assert_array_equal(philox4x32(counters, keys), np.stack([words(out) for _, _, out in KNOWN_ANSWERS]))


def test_a_uniform_is_the_first_two_words_of_its_block() -> None:
    # Key 0, position 0, purpose 0, draw 0 is the all-zero known answer.
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniforms(np.array([0]), np.array([0]), Purpose.ACCEPT)[0] == expected


def test_key_position_purpose_and_draw_each_change_the_coin() -> None:
    key, position = np.array([stream_key("x")]), np.array([7])
    coins = {
        uniforms(key, position, Purpose.ACCEPT)[0],
        uniforms(key + 1, position, Purpose.ACCEPT)[0],
        uniforms(key + 2**32, position, Purpose.ACCEPT)[0],
        uniforms(key, position + 1, Purpose.ACCEPT)[0],
        uniforms(key, position, Purpose.ACCEPT, draw=1)[0],
        *(uniforms(key, position, purpose)[0] for purpose in Purpose if purpose != Purpose.ACCEPT),
    }
    assert len(coins) == 5 + len(Purpose) - 1


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    """Kolmogorov-Smirnov over 200,000 positions of one key; fixed key, false-alarm rate 1e-6 (critical value 2.69)."""
    num_draws = 200_000
    draws = np.sort(uniforms(np.array([stream_key("ks")]), np.arange(num_draws), Purpose.PLAIN))
    assert draws[0] >= 0
    assert draws[-1] < 1
    steps = np.arange(num_draws + 1) / num_draws
    distance = max((steps[1:] - draws).max(), (draws - steps[:-1]).max())
    assert distance * np.sqrt(num_draws) < 2.69


def test_purposes_of_one_position_are_uncorrelated() -> None:
    """Correlation of 200,000 pairs, each pair of purposes: |z| < 5.7 has a family-wise false-alarm rate of 1e-7."""
    positions = np.arange(200_000)
    coins = np.stack([uniforms(np.array([stream_key("pairs")]), positions, purpose) for purpose in Purpose])
    z = np.corrcoef(coins)[np.triu_indices(len(Purpose), 1)] * np.sqrt(len(positions))
    assert np.abs(z).max() < 5.7


def test_stream_keys_are_stable_across_releases() -> None:
    # A changed key would silently change every recorded run: these were recorded with version 0.1.0.
    assert stream_key(0, "off", "topp95", "chat", 0) == 5225589026435830477
    assert stream_key(0, "on", "topp95", "chat", 0) == -4784788513847219507


def test_parts_of_a_stream_key_do_not_run_together() -> None:
    assert stream_key("ab", "c") != stream_key("a", "bc")
