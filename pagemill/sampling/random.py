"""Random numbers that depend on nothing but (seed, sample index, position).

Philox4x32-10 is a counter-based generator: a keyed function of a counter, without state (J. K. Salmon,
M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). One draw:

    key      seed, low and high 32 bits
    counter  position low, position high, sample index, 0
    result   53 bits of the first two words, as a float64 in [0, 1)

Called by the sampler with one lane a draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the four words of each lane.

    counter [4, lanes], key [2, lanes], result [4, lanes]: uint64 arrays of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + np.uint64(_WEYL[0])) & _LOW
        k1 = (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(
    seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int]
) -> NDArray[np.float64]:
    """Return one float64 in [0, 1) a lane; seeds are any int64, the others non-negative."""
    seed = np.asarray(seeds, np.int64).astype(np.uint64)
    position = np.asarray(positions, np.uint64)
    index = np.asarray(sample_indices, np.uint64)
    counter = np.stack([position & _LOW, position >> _SHIFT, index, np.zeros_like(index)])
    words = philox4x32(counter, np.stack([seed & _LOW, seed >> _SHIFT]))
    bits = ((words[0] << _SHIFT) | words[1]) >> np.uint64(11)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
