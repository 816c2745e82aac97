from collections import Counter

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from dpbench.privacy import key_stream
from dpbench.privacy.key_stream import WORDS_OF_A_KEY, KeyStream

LIMIT = 12  # not a whole number of blocks of eight words


@pytest.fixture
def emitted(monkeypatch):
    """Words that each key has given, by key, where a key gives few."""
    given = Counter()

    class Counted:
        def __init__(self, algorithm, mode):
            self.key, self.stream = algorithm.key, Cipher(algorithm, mode).encryptor()
            assert self.key not in given
            given[self.key] = 0

        def encryptor(self):
            return self

        def update_into(self, data, buffer):
            given[self.key] += len(data) // 8
            return self.stream.update_into(data, buffer)

    monkeypatch.setattr(key_stream, "Cipher", Counted)
    monkeypatch.setattr(key_stream, "WORDS_OF_A_KEY", LIMIT)
    return given


@pytest.mark.parametrize("counts", [(5 * LIMIT + 1,), (7,) * 9, (LIMIT, LIMIT, 1), (LIMIT - 1, 0, LIMIT + 2)])
def test_no_key_gives_more_than_its_share(counts, emitted):
    stream = KeyStream()
    words = np.concatenate([stream.words(count) for count in counts])
    assert words.dtype == np.uint64
    assert len(set(words.tolist())) == len(words) == sum(counts)
    of_keys = list(emitted.values())
    assert sum(of_keys) == len(words)
    assert of_keys[:-1] == [LIMIT] * (len(of_keys) - 1)
    assert of_keys[-1] <= LIMIT


def test_words_are_those_of_the_keys_in_turn(emitted):
    stream = KeyStream()
    words = np.concatenate([stream.words(count) for count in (5, 2 * LIMIT, 4)])
    given = [
        Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
        for key, count in emitted.items()
    ]
    assert len(given) == 3
    assert words.tobytes() == b"".join(given)


def test_a_key_is_all_that_the_operating_system_gives_for_it(emitted, monkeypatch):
    """256 bits at once, anew for each key."""
    given = []

    def urandom(count):
        given.append(bytes(range(len(given), len(given) + count)))
        return given[-1]

    monkeypatch.setattr(key_stream.os, "urandom", urandom)
    KeyStream().words(3 * LIMIT)
    assert [len(key) for key in given] == [32] * 3
    assert list(emitted) == given


def test_a_key_ends_before_its_counter_does():
    """It has 32 bits, and counts blocks of 64 bytes."""
    assert 8 * WORDS_OF_A_KEY < 64 * 2**32
