"""A client's name for a medium never reaches workers; what they know it by is its content."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from frontend.media_uuids import content_hash, name_by_content, own_names

ALGORITHM = "blake3"


def item(value: float, size: int = 4) -> MultiModalKwargsItem:
    tensor = torch.full((size,), value)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(tensor, MultiModalBatchedField())})


class Renderer:
    """Has what the real one has, and remembers the names that it was given."""

    def __init__(self, **items: list[MultiModalKwargsItem]) -> None:
        self.items = items
        self.names: Any = None
        config = SimpleNamespace(mm_hasher_algorithm=ALGORITHM)
        self.model_config = SimpleNamespace(get_multimodal_config=lambda: config)

    async def _process_multimodal_async(
        self, prompt: list[int], data: Any, names: Any, *_: Any, skip_mm_cache: bool
    ) -> dict[str, Any]:
        self.names = names
        hashes = {
            modality: [
                (names or {}).get(modality, [None] * len(items))[index] or f"hash-{index}"
                for index in range(len(items))
            ]
            for modality, items in self.items.items()
        }
        return {"mm_hashes": hashes, "mm_kwargs": self.items}


async def hashes(uuids: Any, **items: list[MultiModalKwargsItem]) -> tuple[Any, Any]:
    renderer = Renderer(**items)
    name_by_content(renderer)
    rendered = await renderer._process_multimodal_async([], {}, uuids, None, None)  # type: ignore[call-arg]
    return rendered["mm_hashes"], renderer.names


async def test_a_name_gives_way_to_the_content() -> None:
    found, _ = await hashes({"image": ["logo", None]}, image=[item(1.0), item(2.0)])
    assert found == {"image": [content_hash("image", item(1.0), ALGORITHM), "hash-1"]}


async def test_one_name_for_two_contents_is_two_items() -> None:
    """Two frontends, or one that has forgotten the first."""
    one, _ = await hashes({"image": ["logo"]}, image=[item(1.0)])
    for other in (item(2.0), item(1.0, size=5)):
        assert (await hashes({"image": ["logo"]}, image=[other]))[0] != one


async def test_names_of_two_modalities_are_two_names() -> None:
    uuids = {"image": ["x"], "audio": ["x"]}
    found, names = await hashes(uuids, image=[item(1.0)], audio=[item(1.0)])
    assert names["image"] != names["audio"]
    assert found["image"] != found["audio"]


async def test_without_names_nothing_changes() -> None:
    for uuids in (None, {"image": [None]}):
        found, names = await hashes(uuids, image=[item(1.0)])
        assert found == {"image": ["hash-0"]}
        assert names is uuids


@pytest.mark.parametrize("uuid", ["", "\ud800", "é" * 10_000, "a" * 64])
def test_any_string_is_a_name(uuid: str) -> None:
    names = own_names({"image": [uuid]})
    assert names is not None
    assert len(str(names["image"][0])) == 69
    assert names["image"][0] != uuid
