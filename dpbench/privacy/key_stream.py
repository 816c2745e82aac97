"""Random words that nobody can tell in advance or take back."""

from __future__ import annotations

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

# To a double in [0, 1), which has 53 bits, of the upper bits of a word.
SPARE_BITS, UNIT = np.uint64(11), 2.0**-53


class KeyStream:
    """Words of ChaCha20 under a key of the operating system's, which never leaves the process."""

    def __init__(self) -> None:
        # A nonce names one stream of a key, and the key is used for one stream alone.
        self._stream = Cipher(ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Uniform words, uint64, shape (count,)."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype=np.uint64)

    def multiples(self, count: int) -> np.ndarray:
        """Uniform whole numbers in [0, 2^53) as float64, shape (count,)."""
        return (self.words(count) >> SPARE_BITS).astype(np.float64)
