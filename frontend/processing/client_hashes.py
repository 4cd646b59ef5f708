"""Whose hashes to believe: those that this frontend made, and none that a client sends.

vLLM's token-in, token-out route takes processed tensors from clients, with hashes.
"""

from weakref import WeakValueDictionary

from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalKwargsItem

from common.identity import MmHash


class HashedItems:
    """Items whose hashes this frontend made, and not a client."""

    def __init__(self) -> None:
        # By identity: they are mappings, so not hashable.
        self._items: WeakValueDictionary[int, MultiModalKwargsItem] = WeakValueDictionary()

    def add(self, item: MultiModalKwargsItem) -> None:
        """For as long as the item lives."""
        self._items[id(item)] = item

    def __contains__(self, item: MultiModalKwargsItem) -> bool:
        return self._items.get(id(item)) is item


def content_hash(modality: str, item: MultiModalKwargsItem, algorithm: str) -> MmHash:
    """A hash of processed tensors, about 1 ms for 2 MB."""
    return MmHash(
        MultiModalHasher.hash_kwargs(algorithm, modality=modality, processed=item.get_data())
    )
