"""Keyed checksum of a segment, for networks with untrusted writers.

AES-256-GCM as a message authentication code: bytes without the key never pass, and it costs less
than copying them. Each piece of a segment has its own tag, so that pieces can be checked in any
order; the checksum is the tag over these tags. A nonce must be unique per key: it is the
generation, unique in an arena, and the number of the piece, and each arena has its own key.
"""

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.identity import MmHash

KEY_SIZE: Final = 32
TAG_SIZE: Final = 16

PIECE: Final = 2 << 20  # bytes under one tag

_ALL_PIECES: Final = 2**32 - 1
"""Stands in the nonce of the tag over all tags, where others have the number of their piece."""

_POOL: Final = ThreadPoolExecutor(thread_name_prefix="checksum")


class Checksum:
    """Checksum of one segment, header included. Thread-safe; works without the GIL."""

    def __init__(self, key: bytes, generation: int, mm_hash: MmHash) -> None:
        self._cipher = AESGCM(key)
        self._generation = generation
        self._hash = mm_hash
        self._tags: dict[int, bytes] = {}

    def add(self, start: int, piece: memoryview) -> None:
        """Add the piece that begins at ``start``, a multiple of :data:`PIECE`."""
        number = start // PIECE
        self._tags[number] = self._tag(number, b"", piece)

    def digest(self, length: int) -> bytes:
        """Return :data:`TAG_SIZE` bytes for a segment's length, once all pieces were added."""
        # The length in front, so that no two segments have the same text.
        text = length.to_bytes(8, "little") + self._hash.encode()
        tags = b"".join(tag for _, tag in sorted(self._tags.items()))
        return self._tag(_ALL_PIECES, text, tags)

    def _tag(self, number: int, text: bytes, covered: bytes | memoryview) -> bytes:
        nonce = self._generation.to_bytes(8, "little") + number.to_bytes(4, "little")
        return self._cipher.encrypt(nonce, text, covered)[-TAG_SIZE:]


def checksum(key: bytes, generation: int, mm_hash: MmHash, segment: memoryview) -> bytes:
    """Compute the checksum of a whole segment, half of it in another thread."""
    pieces = Checksum(key, generation, mm_hash)
    starts = piece_starts(segment.nbytes)

    def add(starts: range) -> None:
        for start in starts:
            pieces.add(start, segment[start : start + PIECE])

    # An item of one piece wakes no thread.
    others = _POOL.submit(add, starts[1::2]) if len(starts) > 1 else None
    add(starts[::2])
    if others is not None:
        others.result()
    return pieces.digest(segment.nbytes)


def piece_starts(length: int) -> range:
    return range(0, length, PIECE)


def new_key() -> bytes:
    return secrets.token_bytes(KEY_SIZE)
