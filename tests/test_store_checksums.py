"""Checks of many chunks at once: what they come to is that of each, computed slowly, and any flipped bit is seen."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from crc32c import crc32c

from dflash_offline.store import checksums


@pytest.mark.parametrize("seed", range(40))
def test_right_chunks_come_to_what_their_lengths_say_and_flipped_bits_do_not(seed: int) -> None:
    generator = random.Random(seed)
    contents = [generator.randbytes(generator.randrange(5000)) for _ in range(generator.randrange(1, 30))]
    chunks = [content + crc32c(content).to_bytes(4, "little") for content in contents]
    together = b"".join(chunks)
    expected = checksums.of_right_chunks([len(chunk) for chunk in chunks])
    assert crc32c(together) == expected
    for _ in range(20):
        bit, flipped = generator.randrange(8 * len(together)), bytearray(together)
        flipped[bit // 8] ^= 1 << bit % 8
        assert crc32c(bytes(flipped)) != expected


def test_chunks_too_long_for_the_table_are_left_to_be_checked_one_by_one() -> None:
    assert checksums.of_right_chunks([checksums.MOST_BYTES, 10]) == checksums.of_right_chunks([5, 10])  # 10 bytes behind the first
    assert checksums.of_right_chunks([10, checksums.MOST_BYTES]) is None


def test_chunks_of_one_size_come_to_the_same_without_a_table() -> None:
    right = checksums.EqualChunks(100)
    assert [right.of(count) for count in (7, 1, 3)] == [checksums.of_right_chunks([104] * count) for count in (7, 1, 3)]


def test_what_checks_say_of_chunks_joined_without_them() -> None:
    generator, right = random.Random(0), checksums.EqualChunks(1000)
    contents = [generator.randbytes(1000) for _ in range(9)]
    for count in (1, 2, 9, 4):
        checks = np.array([[crc32c(content), crc32c(content[::-1])] for content in contents[:count]], np.uint32).reshape(count, 2)
        backwards = b"".join(content[::-1] for content in contents[:count])
        assert right.joined(checks).tolist() == [crc32c(b"".join(contents[:count])), crc32c(backwards)]


def test_many_threads_may_be_the_first_to_join_chunks() -> None:
    """Each makes the table as far as it needs it, and none holds a lock meanwhile."""
    content = bytes(range(100))
    expected = [crc32c(content * count) for count in range(41)]
    checks = np.full((40, 1), crc32c(content), np.uint32)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(30):
            right = checksums.EqualChunks(100)
            counts = [random.randrange(1, 41) for _ in range(64)]
            found = pool.map(lambda count, right=right: int(right.joined(checks[:count])[0]), counts)
            assert list(found) == [expected[count] for count in counts]
