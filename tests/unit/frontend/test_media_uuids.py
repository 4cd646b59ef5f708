"""A client's name for a medium is its API key's own, and no hash of anything."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from common.cache_partition import SHARED, Partition, partition_of
from common.identity import MmHash
from frontend.processing.uuids import HashedItems, MediaNames, Namespace, check_uuids, content_hash
from frontend.tenancy.tenant import Tenant

MINE = Namespace(Tenant("me"), SHARED, ({}, {}))
H, OTHER = MmHash("h"), MmHash("other")


def item(value: float, size: int = 4) -> MultiModalKwargsItem:
    tensor = torch.full((size,), value)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(tensor, MultiModalBatchedField())})


def test_a_name_stands_for_what_was_last_shown_under_it() -> None:
    names = MediaNames()
    assert names.recall(MINE, "image", "logo") is None
    for mm_hash in (H, OTHER):
        names.remember(MINE, "image", "logo", mm_hash)
        assert names.recall(MINE, "image", "logo") == mm_hash
    names.clear()
    assert names.recall(MINE, "image", "logo") is None


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"tenant": Tenant("you")},
        {"partition": partition_of("salt")},
        {"options": ({"max_pixels": 9}, {})},
        {"options": ({}, {"image": {"image_mode": "L"}})},
    ],
    ids=lambda elsewhere: next(iter(elsewhere)),
)
def test_a_name_means_nothing_elsewhere(elsewhere: Mapping[str, Any]) -> None:
    names = MediaNames()
    names.remember(MINE, "image", "logo", H)
    other = replace(MINE, **elsewhere)
    assert names.recall(other, "image", "logo") is None
    names.remember(other, "image", "logo", OTHER)
    assert names.recall(MINE, "image", "logo") == H


def test_names_of_two_modalities_are_two_names() -> None:
    names = MediaNames()
    names.remember(MINE, "image", "x", H)
    assert names.recall(MINE, "audio", "x") is None


def test_names_do_not_run_into_what_stands_beside_them() -> None:
    names = MediaNames()
    names.remember(replace(MINE, partition=Partition("a")), "image", "b", H)
    assert names.recall(replace(MINE, partition=Partition("")), "image", 'a", "image", "b') is None
    assert names.recall(replace(MINE, partition=Partition('a", "image')), "image", "b") is None


@pytest.mark.parametrize("uuid", ["", "\ud800", "é" * 10_000, "a" * 64])
def test_any_string_is_a_name(uuid: str) -> None:
    names = MediaNames()
    check_uuids({"image": [uuid, None]})
    names.remember(MINE, "image", uuid, H)
    assert names.recall(MINE, "image", uuid) == H
    assert names.recall(MINE, "image", uuid + "x") is None


@pytest.mark.parametrize("uuid", [1, [], {"a": 1}, True])
def test_nothing_else_is_a_name(uuid: Any) -> None:
    with pytest.raises(ValueError, match="must be a string"):
        check_uuids({"image": [None, uuid]})


def test_one_tenants_names_push_out_no_others() -> None:
    names = MediaNames(most=3)
    greedy = replace(MINE, tenant=Tenant("greedy"))
    names.remember(MINE, "image", "logo", H)
    for n in range(10):
        names.remember(greedy, "image", str(n), OTHER)
    assert names.recall(MINE, "image", "logo") == H
    assert [n for n in range(10) if names.recall(greedy, "image", str(n))] == [7, 8, 9]


def test_options_that_can_not_be_compared_are_no_place_for_names() -> None:
    names = MediaNames()
    odd = replace(MINE, options=({"a": object()}, {}))
    names.remember(odd, "image", "logo", H)
    assert names.recall(odd, "image", "logo") is None


def test_items_are_told_apart_by_what_they_are_made_of() -> None:
    hashes = {
        content_hash("image", item(1.0), "blake3"),
        content_hash("image", item(2.0), "blake3"),
        content_hash("image", item(1.0, size=5), "blake3"),
        content_hash("audio", item(1.0), "blake3"),
    }
    assert len(hashes) == 4
    assert content_hash("image", item(1.0), "blake3") in hashes


def test_only_the_very_item_is_one_that_we_hashed() -> None:
    hashed, ours = HashedItems(), item(1.0)
    hashed.add(ours)
    assert ours in hashed
    assert item(1.0) not in hashed
    del ours
    gc.collect()
    assert not any(item(1.0) in hashed for _ in range(100))  # which may get its address
