"""Media that a prompt only names, and what is kept under their names."""

import asyncio
from collections.abc import Mapping, Sequence

from common.identity import MmHash
from common.transfer.shared_arena import MediaNames
from frontend.processing.batch import Processed
from frontend.processing.prompt_media import ByPlace, MediaData, Place, listed
from frontend.processing.store import ArenaStore, ProcessedStore
from frontend.processing.uuids import NAMES_PER_TENANT, Namespace, Uuids


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
