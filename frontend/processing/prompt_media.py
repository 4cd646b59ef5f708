"""Media of a prompt: shown, or only named by a client (``uuid``).

vLLM takes the name for the medium's hash: a client that knows it gets the medium shown under it,
and later media under that name are ignored. Here a name belongs to its API key within a
``cache_salt`` and is no hash: media are identified by content. A medium shown under a name is
processed and hashed like any other. The name alone stands for the last medium shown under it, while
that is kept.
"""

import asyncio
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from blake3 import blake3

from common.identity import MmHash
from common.media.cache_partition import Partition
from common.transfer.shared_arena import MediaNames
from frontend.fetch import DeferredMedium, decoding_mode, freeze
from frontend.processing.batch import MediaOptions, Medium, Processed
from frontend.processing.store import ArenaStore, ProcessedStore
from frontend.request_context import Tenant

MediaData: TypeAlias = Mapping[str, Any]
"""vLLM's: for each modality a list of its media, None where one is only named. Embeddings may be a
single tensor instead of a list."""

Place: TypeAlias = tuple[str, int]
"""Position of a medium in a prompt: modality, and index within it."""

ByPlace: TypeAlias = Mapping[Place, Processed]
"""Kept media of a prompt that are only named."""

NAMES_PER_TENANT: Final = 10_000
"""LRU limit of names remembered for an API key."""

_MAX_NAME_CHARACTERS: Final = 8192
"""Limit of a name, which is written as JSON and hashed on the event loop."""

Uuids = Mapping[str, Sequence[str | None]]


@dataclass(frozen=True)
class Shown:
    """A medium that comes with its content. ``key`` is equal for media that are processed alike;
    ``place`` describes its origin to the user.
    """

    key: Hashable
    modality: str
    medium: Medium
    place: str


@dataclass(frozen=True)
class Kept:
    """A medium that is only named, and kept."""

    modality: str
    processed: Processed


def listed(media: Any) -> list[Any]:
    """Return the media of a modality one by one; none if it is embeddings in a single tensor."""
    return media if isinstance(media, list) else []


def with_shown(mm_data: MediaData, mm_uuids: Uuids) -> MediaData:
    """Return a prompt's media, where an earlier one of a name replaces one that is only named."""
    made = dict(mm_data)
    for modality, media in mm_data.items():
        shown: dict[str, Any] = {}
        uuids = mm_uuids.get(modality) or []
        for index, (medium, uuid) in enumerate(zip(listed(media), uuids, strict=False)):
            if uuid is None:
                continue
            if medium is not None:
                shown[uuid] = medium
            elif uuid in shown:
                made[modality] = [*made[modality]]
                made[modality][index] = shown[uuid]
    return made


def media_apart(
    mm_data: MediaData, named: ByPlace, options: MediaOptions
) -> list[Shown | Kept] | None:
    """Return a prompt's media one by one, or None if some can't be processed apart: embeddings, and
    the sound of a video, which some models process together with its pictures. Raises ValueError
    (400) for such a video that is only named: without its sound it would end an engine.
    """
    if options.mm_processor_kwargs.get("use_audio_in_video"):
        if any(modality == "video" for modality, _ in named):
            raise ValueError("a video can't be only named with use_audio_in_video: show it")
        return None
    frozen = freeze([*options])
    found: list[Shown | Kept] = []
    for modality, media in mm_data.items():
        if not listed(media):
            return None
        for index, medium in enumerate(media):
            if (kept := named.get((modality, index))) is not None:
                found.append(Kept(modality, kept))
            elif isinstance(medium, DeferredMedium):
                place = f"{medium.place}, {modality} {index + 1} of {len(media)}"
                found.append(_shown(modality, medium, frozen, place if len(media) > 1 else ""))
            else:
                return None
    return found


def _shown(modality: str, medium: DeferredMedium, options: Hashable | None, place: str) -> Shown:
    content, mode = medium.content, decoding_mode(medium.media_io)
    key: Hashable = (modality, content.digest, mode, options)
    if mode is None or options is None:
        key = object()  # unique
    return Shown(key, modality, Medium(content, medium.media_io), place or medium.place)


@dataclass(frozen=True)
class Namespace:
    """Scope of a request's names. It includes the options: like vLLM's hashes of names, a name
    stands for a medium processed in one way.
    """

    tenant: Tenant
    partition: Partition
    options: MediaOptions

    def name(self, modality: str, uuid: str) -> bytes | None:
        """Return a name of fixed length, None if the options can't be compared."""
        try:
            # ASCII, so lone surrogates, which JSON can carry, do no harm.
            text = json.dumps([self.partition, modality, uuid, self.options], sort_keys=True)
        except (TypeError, ValueError):
            return None
        return blake3(text.encode()).digest()


def check_uuids(mm_uuids: Uuids | None) -> None:
    """Raise ValueError if a name is no string, which not all of vLLM's routes check, or long."""
    for modality, uuids in (mm_uuids or {}).items():
        strings = all(uuid is None or isinstance(uuid, str) for uuid in uuids)
        if not strings or any(len(uuid or "") > _MAX_NAME_CHARACTERS for uuid in uuids):
            raise ValueError(
                f"the uuid of a medium ({modality}) must be a string of at most "
                f"{_MAX_NAME_CHARACTERS} characters"
            )


class NamedMedia:
    """Finds media by the names under which they were shown. For one event loop."""

    def __init__(self, store: ProcessedStore) -> None:
        self._store = store
        self._names = MediaNames()
        # Shared by all processes of this frontend: a client may show a medium to one and name it to
        # another.
        self._directory = store.directory if isinstance(store, ArenaStore) else None

    async def find(self, mm_data: MediaData, mm_uuids: Uuids, namespace: Namespace) -> ByPlace:
        """Return kept media that come without content. Raises ValueError (400) if a name is missing
        or unknown.
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
        """Remember the names of a prompt's media; ``hashes`` are in the order of the prompt."""
        for modality, of_modality in hashes.items():
            uuids = mm_uuids.get(modality) or []
            if len(uuids) == len(of_modality):
                for mm_hash, uuid in zip(of_modality, uuids, strict=True):
                    if uuid is not None:
                        await self._remember(namespace, modality, uuid, MmHash(mm_hash))

    def forget(self) -> None:
        """Forget all names."""
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
