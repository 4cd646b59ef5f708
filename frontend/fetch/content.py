"""The encoded bytes of a medium, under the digest that names them.

Where they came from plays no part: a picture is the same by URL, data URL or file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NewType, Self

from blake3 import blake3

from common.media.cache_partition import SHARED, Partition

Digest = NewType("Digest", bytes)


@dataclass(frozen=True)
class Content:
    """Encoded bytes.

    Attributes:
        data: the bytes.
        digest: BLAKE3 of the bytes, of ``jpeg_frames`` and of the partition.
        jpeg_frames: the bytes are vLLM's ``video/jpeg``: pictures, each in base64, with
            commas between them.
    """

    data: bytes = field(repr=False)
    digest: Digest
    jpeg_frames: bool = False

    @classmethod
    def of(cls, data: bytes, *, jpeg_frames: bool = False) -> Self:
        """Digest bytes: about 1 ms per megabyte or two, so not on the event loop."""
        hasher = blake3(b"jpeg frames" if jpeg_frames else b"medium")
        hasher.update(data)
        return cls(data, Digest(hasher.digest()), jpeg_frames)

    @classmethod
    def joined(cls, chunks: Sequence[bytes]) -> Self:
        """Digest bytes that came in pieces."""
        return cls.of(chunks[0] if len(chunks) == 1 else b"".join(chunks))

    def within(self, partition: Partition) -> Self:
        """The same bytes under a digest of that partition. To be asked for once."""
        if partition == SHARED:
            return self
        hasher = blake3(f"partition {partition} ".encode())
        hasher.update(self.digest)
        return replace(self, digest=Digest(hasher.digest()))
