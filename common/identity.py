"""Names that every part of the system uses for the same things.

Only types, so that a worker id is never taken for a hash.
"""

from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", str)
"""Name of a worker, stable over restarts when the operator gives one."""

Incarnation = NewType("Incarnation", str)
"""One run of a process. A worker that restarts in place gets a new one."""

RequestId = NewType("RequestId", str)
"""Name of one ``generate`` call, made by the frontend so that no other call anywhere has it
and no client can guess it. Never the id that a client chose."""

MmHash = NewType("MmHash", str)  # vLLM's content hash of one media item and its processor settings

MmIdentifier = NewType("MmIdentifier", str)
"""The name under which a media item enters block hashes and the encoder cache:
the :data:`MmHash`, prefixed by the LoRA name where LoRA changes the encoder."""

BlockHash = NewType("BlockHash", bytes)
"""vLLM's chained hash of one full KV block, 32 bytes under ``sha256_cbor``."""


class Target(NamedTuple):
    """A place where a request can run: one data-parallel rank of one worker."""

    worker_id: WorkerId
    rank: int
