"""Partition cached media by ``cache_salt``: only requests with the same salt share them.

vLLM salts block hashes, but caches media by content hash for all users: the time that a picture
takes would reveal that another user has sent it. Here a salt names a partition, which is mixed into
the media hashes. Every cache keyed by them (arena, router, workers, encoder caches) then separates
partitions without knowing of them.
"""

from typing import Final, NewType

from blake3 import blake3

from common.identity import MmHash

Partition = NewType("Partition", str)
"""Names a salt without telling it: 64 hexadecimal digits, or :data:`SHARED`."""

SHARED: Final = Partition("")  # of all requests without a salt. Hashes in it are vLLM's own


def partition_of(salt: str | None, owner: str = "") -> Partition:
    """Return the partition of a salt, and of an owner (without NUL) with salts of its own."""
    if not salt and not owner:
        return SHARED
    # JSON can carry lone surrogates.
    name = f"cache salt\0{owner}\0{salt or ''}".encode(errors="surrogatepass")
    return Partition(blake3(name).hexdigest())


def hash_within(mm_hash: MmHash, partition: Partition) -> MmHash:
    """Combine a medium's content hash with its partition."""
    if partition == SHARED:
        return mm_hash
    return MmHash(blake3(f"media\0{partition}\0{mm_hash}".encode()).hexdigest())
