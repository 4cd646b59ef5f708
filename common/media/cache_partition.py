"""Which requests share what is kept of media: those with the same ``cache_salt``.

vLLM mixes the salt into block hashes, but keeps media by hash of their content, whoever
sends them: by the time that a picture takes, one user could find out that another has sent
it. Here a salt names a partition, which is mixed into the hashes themselves. All that keeps
or finds media by hash (the caches, the arena, the router, workers, their engines' encoder
caches) then keeps partitions apart and knows nothing of them.
"""

from typing import Final, NewType

from blake3 import blake3

from common.identity import MmHash

Partition = NewType("Partition", str)
"""Names a salt without telling it: 64 hexadecimal digits, or :data:`SHARED`."""

SHARED: Final = Partition("")  # of all requests without a salt. Hashes in it are vLLM's own


def partition_of(salt: str | None, owner: str = "") -> Partition:
    """The partition of a salt, and of an owner (without NUL) if others' salts are not the same."""
    if not salt and not owner:
        return SHARED
    # JSON can carry lone surrogates.
    name = f"cache salt\0{owner}\0{salt or ''}".encode(errors="surrogatepass")
    return Partition(blake3(name).hexdigest())


def hash_within(mm_hash: MmHash, partition: Partition) -> MmHash:
    """The hash of a medium in a partition, of its content's hash."""
    if partition == SHARED:
        return mm_hash
    return MmHash(blake3(f"media\0{partition}\0{mm_hash}".encode()).hexdigest())
