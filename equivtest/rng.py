"""Counter-based random streams: Philox4x32-10.

A draw is a pure function of (stream key, position, purpose, draw). A sample therefore never depends on its
batch-mates, on the batch size or on where a run was resumed, and two purposes never share a coin.

Source: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3 and
table 2 (rounds and multipliers); the known-answer vectors in the tests are the ones published with Random123.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_NUM_ROUNDS = 10
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


class Purpose(IntEnum):
    """What a coin is for. The value is a counter word: part of the stream's definition, never to be renumbered."""

    ACCEPT = 0
    """Accept or reject the draft at this position."""
    RECOVER = 1
    """Draw from the residual at this position."""
    BONUS = 2
    """Draw from the target after full acceptance."""
    DRAFT = 3
    """A sampled drafter's own draw."""
    PLAIN = 4
    """Draw from the target where no draft was offered."""
    SCORE = 5
    """Randomise the probability integral transforms of a finished sample; decides nothing in it."""


def philox4x32(counter: U32, key: U32) -> U32:
    """Philox4x32-10.

    counter: uint32 [..., 4]; key: uint32 [..., 2]. Returns uint32 [..., 4].
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (int_word.astype(np.uint64) for int_word in (key[..., 0], key[..., 1]))
    for round_index in range(_NUM_ROUNDS):
        round_k0 = (k0 + np.uint64(round_index * _WEYL_0 & 0xFFFFFFFF)) & _LOW_32
        round_k1 = (k1 + np.uint64(round_index * _WEYL_1 & 0xFFFFFFFF)) & _LOW_32
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT_32) ^ c1 ^ round_k0,
            product_1 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ c3 ^ round_k1,
            product_0 & _LOW_32,
        )
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniforms(
    keys: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    purpose: Purpose,
    draw: int = 0,
) -> npt.NDArray[np.float64]:
    """Uniform draws in [0, 1) with 53 random bits.

    keys: int64 [n], the 64-bit stream keys (low word first into Philox); positions: int64 [n], below 2**32.
    The counter is (position, purpose, draw, 0). Returns float64 [n].
    """
    keys, positions = np.broadcast_arrays(np.asarray(keys, np.int64), np.asarray(positions, np.int64))
    key_bits = keys.astype(np.uint64)
    key = np.stack([key_bits & _LOW_32, key_bits >> _SHIFT_32], axis=-1).astype(np.uint32)
    counter = np.zeros((*keys.shape, 4), np.uint32)
    counter[..., 0] = positions
    counter[..., 1] = int(purpose)
    counter[..., 2] = draw
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[..., 0] >> np.uint64(5)) << np.uint64(26)) | (words[..., 1] >> np.uint64(6))
    result: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return result


def stream_key(*parts: object) -> int:
    """A 64-bit stream key, as a signed integer, from whatever names the stream.

    The protocol uses (run seed, arm, config, prompt, seed); arms therefore have independent streams.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
