"""What encoders keep is modelled by room and by use."""

import pytest

from common.identity import MmHash, Target, WorkerId
from frontend.router import Router
from frontend.router.selection import media_placement
from frontend.router.selection.media_placement import EncodedMedia
from tests.fakes.routing import Clock, image, request, worker

A, B = (Target(WorkerId(name), 0) for name in "ab")
ONE, TWO, THREE = (MmHash(name) for name in ("one", "two", "three"))


def held(encoded: EncodedMedia, target: Target = A) -> set[str]:
    return {one for one in (ONE, TWO, THREE) if encoded.holds(target, one)}


def test_what_was_used_last_is_kept() -> None:
    encoded = EncodedMedia()
    encoded.add(A, 64)
    encoded.used(A, [image("one"), image("two")])
    assert held(encoded) == {"one", "two"} and not held(encoded, B)
    encoded.used(A, [image("one")])
    encoded.used(A, [image("three")])
    assert held(encoded) == {"one", "three"}


def test_one_item_always_has_room() -> None:
    encoded = EncodedMedia()
    encoded.add(A, 10)
    encoded.used(A, [image("one"), image("two")])
    assert held(encoded) == {"two"}


def test_who_is_emptied_or_gone_or_unknown() -> None:
    encoded = EncodedMedia()
    encoded.add(A, 64)
    encoded.used(A, [image("one")])
    encoded.used(B, [image("one")])
    encoded.emptied(A)
    encoded.emptied(B)
    assert not held(encoded) and not held(encoded, B)
    encoded.used(A, [image("one")])
    encoded.drop(A)
    encoded.drop(A)
    assert not held(encoded) and not encoded.knows(A)
    encoded.add(B, 0)
    assert not encoded.knows(B)


async def media_tokens(encoder_tokens: int) -> list[int]:
    """What three questions about one picture have to encode, another picture before the last."""
    router = Router(clock=Clock())
    await router.roster.add(worker("a", encoder_tokens=encoder_tokens))
    found = []
    for name, question in (("x", 1), ("x", 2), ("y", 3), ("x", 4)):
        # The picture ends within a block, which the question fills.
        tokens = [7] * 40 + [100 * question + i for i in range(30)]
        one = request(tokens, media=[image(name, 8, 32)])
        decision = router.route(one)
        router.in_flight.first_token(one.request_id)
        router.media.acked(WorkerId("a"), [MmHash(name)])
        router.in_flight.finished(one.request_id, served=True)
        found.append(decision.work.media_tokens)
    router.roster.media_emptied(WorkerId("a"))
    assert not router.roster.encoded.holds(A, MmHash("x"))
    await router.close()
    return found


async def test_a_picture_that_made_way_is_encoded_again() -> None:
    assert await media_tokens(32) == [32, 0, 32, 32]
    assert await media_tokens(64) == [32, 0, 32, 0]


async def test_where_the_room_is_unknown_what_was_sent_counts_as_encoded() -> None:
    assert await media_tokens(0) == [32, 0, 32, 0]


def test_no_card_makes_it_keep_all_there_ever_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_placement, "_MAX_ITEMS", 3)
    encoded = EncodedMedia()
    encoded.add(A, 1 << 32)
    for number in range(5):
        encoded.used(A, [image(str(number), 0, 1)])
    assert not any(encoded.holds(A, MmHash(name)) for name in "01")
    assert all(encoded.holds(A, MmHash(name)) for name in "234")
