"""Media that a prompt only names, and what a client's own name for a medium (``uuid``) means.

vLLM takes the name for the medium's hash: whoever knows it finds what anybody showed under
it, and whatever else comes under that name is not looked at. Here a name is its API key's
own, within a ``cache_salt``, and it is no hash: media are always known by what they are.
What comes under a name is processed and hashed like any other medium, and the name alone
stands for the last that came under it, while that is kept.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from common.identity import MmHash
from common.media.cache_partition import Partition
from common.transfer.shared_arena import MediaNames
from frontend.processing.batch import MediaOptions, Processed
from frontend.processing.prompt_media import ByPlace, MediaData, Place, listed
from frontend.processing.store import ArenaStore, ProcessedStore
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


class NamedMedia:
    """Finds media by the names under which they were shown. For one event loop."""

    def __init__(self, store: ProcessedStore) -> None:
        """
        Args:
            store: has the media.
        """
        self._store = store
        self._names = MediaNames()
        # Names are asked for where all processes of this frontend know them: what a client showed
        # to one of them it may name to another.
        self._directory = store.directory if isinstance(store, ArenaStore) else None

    async def find(self, mm_data: MediaData, mm_uuids: Uuids, namespace: Namespace) -> ByPlace:
        """What is kept of media that come without content.

        Raises:
            ValueError: nothing is kept under a name, or there is no name either; a 400.
        """
        found: dict[Place, Processed] = {}
        for modality, media in mm_data.items():
            uuids = mm_uuids.get(modality) or []
            for index, medium in enumerate(listed(media)):
                if medium is None:
                    uuid = uuids[index] if index < len(uuids) else None
                    found[modality, index] = await self._kept(modality, index, uuid, namespace)
        return found

    async def remember(
        self, hashes: Mapping[str, Sequence[str]], mm_uuids: Uuids, namespace: Namespace
    ) -> None:
        """Which names the media of a prompt had.

        Args:
            hashes: of its media, for each modality in the order of the prompt.
        """
        for modality, of_modality in hashes.items():
            uuids = mm_uuids.get(modality) or []
            if len(uuids) == len(of_modality):
                for mm_hash, uuid in zip(of_modality, uuids, strict=True):
                    if uuid is not None:
                        await self._remember(namespace, modality, uuid, MmHash(mm_hash))

    def forget(self) -> None:
        """Know no names any more."""
        self._names.clear()

    async def _remember(
        self, namespace: Namespace, modality: str, uuid: str, mm_hash: MmHash
    ) -> None:
        if (name := namespace.name(modality, uuid)) is None:
            return
        space = namespace.tenant.encode()
        if self._directory is None:
            self._names.remember(space, name, mm_hash, NAMES_PER_TENANT)
        else:
            await self._directory.remember(space, name, mm_hash, NAMES_PER_TENANT)

    async def _named(self, namespace: Namespace, modality: str, uuid: str) -> Processed | None:
        if (name := namespace.name(modality, uuid)) is None:
            return None
        space = namespace.tenant.encode()
        if self._directory is None:
            mm_hash = self._names.recall(space, name)
            return None if mm_hash is None else self._store.get(mm_hash)
        mm_hash = await self._directory.recall(space, name)
        if mm_hash is None:
            return None
        return self._store.get_now(mm_hash) or await asyncio.to_thread(self._store.get, mm_hash)

    async def _kept(
        self, modality: str, index: int, uuid: str | None, namespace: Namespace
    ) -> Processed:
        if uuid is None:
            raise ValueError(f"{modality} {index + 1} has neither content nor a uuid")
        kept = await self._named(namespace, modality, uuid)
        if kept is None:
            raise ValueError(
                f"{modality} {index + 1} is only named, and nothing is kept under its "
                "uuid: show it, together with the uuid"
            )
        return kept
