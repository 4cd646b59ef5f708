"""What a client's own name for a medium (``uuid``) means.

vLLM takes the name for the medium's hash: whoever knows it finds what anybody showed under
it, and whatever else comes under that name is not looked at. Here a name is its API key's
own, within a ``cache_salt``, and it is no hash: media are always known by what they are.
What comes under a name is processed and hashed like any other medium, and the name alone
stands for the last that came under it, while that is kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from common.media.cache_partition import Partition
from frontend.processing.batch import MediaOptions
from frontend.request_context import Tenant

Uuids = Mapping[str, Sequence[str | None]]

NAMES_PER_TENANT: Final = 10_000
"""Names remembered for an API key; the one used longest ago goes first."""


@dataclass(frozen=True)
class Namespace:
    """Where a request's names are looked up.

    Attributes:
        tenant: whose they are.
        partition: of the request's salt.
        options: of the request. Like vLLM's hashes of names, a name stands for a medium
            processed in one way.
    """

    tenant: Tenant
    partition: Partition
    options: MediaOptions

    def name(self, modality: str, uuid: str) -> bytes | None:
        """A name of fixed length, None if the options can't be compared."""
        try:
            # ASCII, so lone surrogates, which JSON can carry, do no harm.
            text = json.dumps([self.partition, modality, uuid, self.options], sort_keys=True)
        except (TypeError, ValueError):
            return None
        return blake3(text.encode()).digest()


def check_uuids(mm_uuids: Uuids | None) -> None:
    """Raises ValueError if a name is no string; not all of vLLM's routes look."""
    for modality, uuids in (mm_uuids or {}).items():
        if not all(uuid is None or isinstance(uuid, str) for uuid in uuids):
            raise ValueError(f"the uuid of a medium ({modality}) must be a string")
