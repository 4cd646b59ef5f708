"""Media that a prompt only names, and what is kept under their names."""

from collections.abc import Mapping, Sequence

from common.identity import MmHash
from frontend.processing.batch import Processed
from frontend.processing.prompt_media import ByPlace, MediaData, Place, listed
from frontend.processing.store import ProcessedStore
from frontend.processing.uuids import MediaNames, Namespace, Uuids


class NamedMedia:
    """Finds media by the names under which they were shown. For one event loop."""

    def __init__(self, store: ProcessedStore) -> None:
        """
        Args:
            store: has the media.
        """
        self._store = store
        self._names = MediaNames()

    def find(self, mm_data: MediaData, mm_uuids: Uuids, namespace: Namespace) -> ByPlace:
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
                    found[modality, index] = self._kept(modality, index, uuid, namespace)
        return found

    def remember(
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
                        self._names.remember(namespace, modality, uuid, MmHash(mm_hash))

    def forget(self) -> None:
        """Know no names any more."""
        self._names.clear()

    def _kept(self, modality: str, index: int, uuid: str | None, namespace: Namespace) -> Processed:
        if uuid is None:
            raise ValueError(f"{modality} {index + 1} has neither content nor a uuid")
        mm_hash = self._names.recall(namespace, modality, uuid)
        kept = None if mm_hash is None else self._store.get(mm_hash)
        if kept is None:
            raise ValueError(
                f"{modality} {index + 1} is only named, and nothing is kept under its "
                "uuid: show it, together with the uuid"
            )
        return kept
