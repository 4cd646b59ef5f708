"""Media of a prompt and the two caches of an engine: the worker's and that of its process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.cache.lru import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.engine.input_processor import InputProcessor

from backend_worker.engine.vllm_engine import Engine
from backend_worker.plane.request import MAX_NACKS
from common.errors import MediaMissingError
from common.identity import MmHash
from common.request_plane.protocol import MediaPart

ROOM = 20  # items in each cache


def item() -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {"pixels": MultiModalFieldElem(torch.zeros(1 << 18), MultiModalBatchedField())}
    )


class Caches:
    """An engine's own caches, and prompts that reach it as those of frontends do."""

    def __init__(self) -> None:
        settings = SimpleNamespace(mm_processor_cache_gb=ROOM / 1024 + 1e-6)  # of 1 MiB each
        model: Any = SimpleNamespace(get_multimodal_config=lambda: settings)
        self._sender = LruKeyReplicatedSenderCache(model)
        self._receiver = LruKeyReplicatedReceiverCache(model)
        processor = object.__new__(InputProcessor)
        processor.renderer = SimpleNamespace(
            mm_processor_cache=self._sender, update_mm_cache_stats=lambda: None
        )
        self._engine = object.__new__(Engine)
        self._engine._llm = SimpleNamespace(input_processor=processor)
        self._engine._cache = self._sender
        self._engine._copies_items = False

    def ask(self, *names: str) -> list[list[str]]:
        """Inject a prompt's media, supply what is asked for as a worker does, and return that."""
        parts = [MediaPart("image", MmHash(name), at, 1, None) for at, name in enumerate(names)]
        items: dict[MmHash, MultiModalKwargsItem] = {}
        asked: list[list[str]] = []
        for _ in range(MAX_NACKS):
            try:
                sent = self._engine._inject(parts, items)
            except MediaMissingError as error:
                wanted = names if asked else error.missing
                asked.append([each for each in wanted if each not in items])
                items |= {MmHash(each): item() for each in asked[-1]}
                continue
            self._receiver.get_and_update_features(
                [
                    MultiModalFeatureSpec(each, "image", name, PlaceholderRange(at, 1), name)
                    for at, (name, each) in enumerate(zip(names, sent, strict=True))
                ]
            )
            assert {*self._sender._cache} <= {*self._receiver._cache}, "no miss later"
            return asked
        raise AssertionError(f"asked for {asked}, and in vain")


@pytest.mark.parametrize("pictures", [2, 5, 8, ROOM])
def test_a_chat_of_which_one_picture_was_evicted_asks_for_that_one(pictures: int) -> None:
    chat = [f"chat-{n}" for n in range(pictures)]
    caches = Caches()
    caches.ask(*chat)
    for n in range(ROOM - pictures + 1):
        caches.ask(f"another-{n}")
    assert caches.ask(*chat) == [chat[:1]]
    assert caches.ask(*chat) == []


def test_a_prompt_larger_than_the_cache_is_answered() -> None:
    chat = [f"chat-{n}" for n in range(ROOM + 5)]
    caches = Caches()
    assert caches.ask(*chat) == [chat]
    evicted, held = caches.ask(*chat)
    assert sorted(evicted + held) == sorted(chat)
