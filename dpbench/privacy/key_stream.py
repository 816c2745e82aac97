"""Random words that nobody can tell in advance or take back."""

from __future__ import annotations

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

# To a double in [0, 1), which has 53 bits, of the upper bits of a word.
SPARE_BITS, UNIT = np.uint64(11), 2.0**-53

# Words of one key, 1 GiB of them: ChaCha20 counts blocks of 64 bytes in 32 bits, which ends after 256 GiB.
WORDS_OF_A_KEY = 2**27


class KeyStream:
    """Words of ChaCha20 under keys of the operating system's, one after the other, which never leave the process."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        # A nonce names one stream of a key, and each key is used for one stream alone.
        self._stream = Cipher(ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
        self._left = WORDS_OF_A_KEY

    def words(self, count: int) -> np.ndarray:
        """Uniform words, uint64, shape (count,)."""
        words = np.empty(count, dtype=np.uint64)
        start = 0
        while start < count:
            if self._left == 0:
                self._begin()
            part = words[start : start + self._left]
            self._stream.update_into(bytes(part.nbytes), part.data.cast("B"))
            self._left -= len(part)
            start += len(part)
        return words

    def multiples(self, count: int) -> np.ndarray:
        """Uniform whole numbers in [0, 2^53) as float64, shape (count,)."""
        return (self.words(count) >> SPARE_BITS).astype(np.float64)
