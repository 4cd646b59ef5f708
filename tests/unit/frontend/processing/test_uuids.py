"""A client's name for a medium is its API key's own, and no hash of anything."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from common.media.cache_partition import SHARED, Partition, partition_of
from frontend.processing import prompt_media
from frontend.processing.batch import MediaOptions
from frontend.processing.prompt_media import NamedMedia, Namespace, check_uuids, media_apart
from frontend.processing.store import PrivateStore
from frontend.request_context import Tenant
from tests.unit.frontend.processing.media import made_up

MINE = Namespace(Tenant("me"), SHARED, MediaOptions({}, {}))
H, OTHER = "h", "other"


class Names:
    """The names of media that are kept, whose hashes are "h" and "other"."""

    def __init__(self) -> None:
        store = PrivateStore(0.01)
        for mm_hash in ("h", "other"):
            store.put(made_up(mm_hash))
        self.media = NamedMedia(store)

    async def remember(self, at: Namespace, modality: str, uuid: str, mm_hash: str) -> None:
        await self.media.remember({modality: [mm_hash]}, {modality: [uuid]}, at)

    async def recall(self, at: Namespace, modality: str, uuid: str) -> str | None:
        try:
            found = await self.media.find({modality: [None]}, {modality: [uuid]}, at)
        except ValueError as error:
            assert "only named" in str(error)
            return None
        return found[modality, 0].mm_hash


async def test_a_name_stands_for_what_was_last_shown_under_it() -> None:
    names = Names()
    assert await names.recall(MINE, "image", "logo") is None
    for mm_hash in (H, OTHER):
        await names.remember(MINE, "image", "logo", mm_hash)
        assert await names.recall(MINE, "image", "logo") == mm_hash
    names.media.forget()
    assert await names.recall(MINE, "image", "logo") is None


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"tenant": Tenant("you")},
        {"partition": partition_of("salt")},
        {"options": MediaOptions({"max_pixels": 9}, {})},
        {"options": MediaOptions({}, {"image": {"image_mode": "L"}})},
    ],
    ids=lambda elsewhere: next(iter(elsewhere)),
)
async def test_a_name_means_nothing_elsewhere(elsewhere: Mapping[str, Any]) -> None:
    names = Names()
    await names.remember(MINE, "image", "logo", H)
    other = replace(MINE, **elsewhere)
    assert await names.recall(other, "image", "logo") is None
    await names.remember(other, "image", "logo", OTHER)
    assert await names.recall(MINE, "image", "logo") == H


async def test_names_of_two_modalities_are_two_names() -> None:
    names = Names()
    await names.remember(MINE, "image", "x", H)
    assert await names.recall(MINE, "audio", "x") is None


async def test_names_do_not_run_into_what_stands_beside_them() -> None:
    names = Names()
    await names.remember(replace(MINE, partition=Partition("a")), "image", "b", H)
    assert (
        await names.recall(replace(MINE, partition=Partition("")), "image", 'a", "image", "b')
        is None
    )
    assert (
        await names.recall(replace(MINE, partition=Partition('a", "image')), "image", "b") is None
    )


@pytest.mark.parametrize("uuid", ["", "\ud800", "é" * 8192, "a" * 64])
async def test_any_string_is_a_name(uuid: str) -> None:
    names = Names()
    check_uuids({"image": [uuid, None]})
    await names.remember(MINE, "image", uuid, H)
    assert await names.recall(MINE, "image", uuid) == H
    assert await names.recall(MINE, "image", uuid + "x") is None


@pytest.mark.parametrize("uuid", [1, [], {"a": 1}, True, "é" * 8193])
def test_nothing_else_is_a_name(uuid: Any) -> None:
    with pytest.raises(ValueError, match="must be a string of at most 8192"):
        check_uuids({"image": [None, uuid]})


async def test_one_tenants_names_push_out_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_media, "NAMES_PER_TENANT", 3)
    names = Names()
    greedy = replace(MINE, tenant=Tenant("greedy"))
    await names.remember(MINE, "image", "logo", H)
    for n in range(10):
        await names.remember(greedy, "image", str(n), OTHER)
    assert await names.recall(MINE, "image", "logo") == H
    assert [n for n in range(10) if await names.recall(greedy, "image", str(n))] == [7, 8, 9]


async def test_options_that_can_not_be_compared_are_no_place_for_names() -> None:
    names = Names()
    odd = replace(MINE, options=MediaOptions({"a": object()}, {}))
    await names.remember(odd, "image", "logo", H)
    assert await names.recall(odd, "image", "logo") is None


def test_a_video_with_its_sound_is_shown() -> None:
    """The name brought its pictures without the sound, and the engine ended."""
    options = MediaOptions({"use_audio_in_video": True}, {})
    with pytest.raises(ValueError, match="use_audio_in_video: show it"):
        media_apart({"video": [None]}, {("video", 0): made_up(H)}, options)
    assert media_apart({"audio": [None]}, {("audio", 0): made_up(H)}, options) is None
