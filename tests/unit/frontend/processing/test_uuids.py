"""A client's name for a medium is its API key's own, and no hash of anything."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from common.identity import MmHash
from common.media.cache_partition import SHARED, Partition, partition_of
from frontend.processing.batch import MediaOptions
from frontend.processing.uuids import MediaNames, Namespace, check_uuids
from frontend.request_context import Tenant

MINE = Namespace(Tenant("me"), SHARED, MediaOptions({}, {}))
H, OTHER = MmHash("h"), MmHash("other")


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
        {"options": MediaOptions({"max_pixels": 9}, {})},
        {"options": MediaOptions({}, {"image": {"image_mode": "L"}})},
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
    odd = replace(MINE, options=MediaOptions({"a": object()}, {}))
    names.remember(odd, "image", "logo", H)
    assert names.recall(odd, "image", "logo") is None
