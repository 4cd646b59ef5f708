"""The keyed checksum of a segment, for networks on which others may write.

AES-256-GCM used as a message authentication code: nobody without the key can make bytes that
pass, and it costs less than copying them. A nonce must never come twice under one key: it is
made of the generation, which no two segments of an arena share, and each arena has its own key.
"""

import secrets
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from common.identity import MmHash

KEY_SIZE: Final = 32
TAG_SIZE: Final = 16

_PIECE: Final = 1 << 30
"""Bytes under one tag: the library takes less than 2 GiB at once."""


def new_key() -> bytes:
    """A key for one arena."""
    return secrets.token_bytes(KEY_SIZE)


def checksum(key: bytes, generation: int, mm_hash: MmHash, body: memoryview) -> bytes:
    """The checksum of one segment; the interpreter's lock is not held while it is computed.

    Args:
        generation: of the segment.
        body: all of the segment behind its header.

    Returns:
        :data:`TAG_SIZE` bytes for each GiB or part of it.
    """
    cipher = AESGCM(key)
    tags = []
    # A length in front of it, so that no two segments have the same text and pieces.
    text = body.nbytes.to_bytes(8, "little") + mm_hash.encode()
    for index, start in enumerate(range(0, max(body.nbytes, 1), _PIECE)):
        nonce = generation.to_bytes(8, "little") + index.to_bytes(4, "little")
        tags.append(cipher.encrypt(nonce, text, body[start : start + _PIECE])[-TAG_SIZE:])
    return b"".join(tags)
