"""The traffic of the serving benchmark: one shape, nothing in common, and what its names say."""

import itertools
from collections import Counter

import pytest

from tests.benchmarks.fleet_traffic import PICTURE, Message
from tests.benchmarks.serving.photos import Photos, picture
from tests.benchmarks.serving.traffic import (
    BURST,
    BURST_WORDS,
    GROUP,
    LONG,
    SHORT,
    Closed,
    Later,
    Load,
    Open,
    Session,
    load,
    pictures_of,
    plan,
)


def said(sessions: list[Session]) -> set[str]:
    """All that is shown in a block."""
    return {
        content
        for session in sessions
        for ask in session
        for message in ask.messages
        for content in message.content
    }


def shape(sessions: list[Session]) -> list[object]:
    """What is left of a block without its words: which pictures are the same, and the turns."""
    numbers: dict[str, int] = {}
    return [
        [
            (ask.user, ask.turn, [
                numbers.setdefault(content, len(numbers)) if content.startswith(PICTURE) else ""
                for message in ask.messages for content in message.content
            ])
            for ask in session
        ]
        for session in sessions
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["pictures-2@8", "chats@8", "documents@8", "groups@8", "bursts@8", "text@8", "streams@8"],
)
def test_blocks_of_a_number_have_one_shape_and_nothing_else_in_common(name: str) -> None:
    one, other = (load(name).block(1, 3, block, 24) for block in ("a", "b"))
    assert shape(one) == shape(other)
    assert not said(one) & said(other)
    assert one == load(name).block(1, 3, "a", 24)


def test_the_seed_changes_the_shape() -> None:
    kind = load("pictures-4@8")
    assert shape(kind.block(1, 0, "a", 24)) != shape(kind.block(2, 0, "a", 24))


@pytest.mark.parametrize("times", [1, 2, 4, 10])
def test_each_picture_is_asked_about_so_often(times: int) -> None:
    sessions = load(f"pictures-{times}@8").block(1, 0, "a", 40)
    shown = Counter(session[0].messages[0].content[0] for session in sessions)
    assert set(shown.values()) == {times}
    assert len(pictures_of(sessions)) == 40 // times
    assert len(said(sessions)) == 40 // times + 40, "each question is another one"


def test_a_turn_of_a_chat_begins_with_the_turn_before_and_pictures_are_shared() -> None:
    sessions = load("chats@8").block(1, 0, "a", 24)
    assert sum(map(len, sessions)) == 24
    for session in sessions:
        before: tuple[Message, ...] = ()
        for turn, ask in enumerate(session):
            assert ask.turn == turn
            assert ask.messages[: len(before)] == before
            before = ask.messages
    assert len(pictures_of(sessions)) == len(sessions) // 2


def test_the_name_of_a_load_says_its_pace_and_how_long_answers_are() -> None:
    assert load("text@8").pace == Closed(8)
    assert load("text@2.5/s").pace == Open(2.5)
    assert load("text@8").answer_tokens == SHORT
    assert load("streams@64").answer_tokens == LONG


@pytest.mark.parametrize(
    "name",
    ["", "text", "text@", "text@0", "text@0/s", "text@-1", "text@1.5", "text@nan/s", "text@inf/s",
     "pictures@8", "pictures-0@8", "pictures--1@8", "audio@8", "text@8 ", "text@8/s/s", "text@0%",
     "text@1.5%"],
)  # fmt: skip
def test_another_name_is_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match="is no load: KIND@CLIENTS, KIND@RATE/s or KIND@PERCENT%"):
        load(name)


def test_a_photo_is_a_jpeg_of_its_name() -> None:
    photos = Photos(56)
    assert photos.uri("one").startswith("data:image/jpeg;base64,")
    assert photos.uri("one") == Photos(56).uri("one") != photos.uri("another")
    assert photos.tokens("one") == 4


def test_a_picture_may_have_a_size_of_its_own() -> None:
    name = picture("some group", 1280, 720)
    assert Photos(56).size(name) == (1280, 720)
    assert Photos(56).tokens(name) == 46 * 26
    assert Photos(56).size(picture("3x4 groups")) == (56, 56)


def test_documents_have_several_pages_and_several_readers() -> None:
    shown = Counter(
        session[0].messages[0].content[:-1] for session in load("documents@8").block(1, 0, "a", 40)
    )
    assert set(shown.values()) == {4}
    assert {len(pages) for pages in shown} == {2, 3, 4}


def test_groups_share_three_pictures() -> None:
    shown = Counter(
        session[0].messages[0].content[:-1] for session in load("groups@8").block(1, 0, "a", 40)
    )
    assert set(shown.values()) == {GROUP}
    assert {len(pages) for pages in shown} == {3}


def test_a_burst_asks_one_long_new_text_in_a_row() -> None:
    texts = [session[0].messages[0].content for session in load("bursts@8").block(1, 0, "a", 40)]
    rows = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
    assert [count for _, count in rows] == [BURST, BURST, 40 - 2 * BURST]
    assert len({text for text, _ in rows}) == 3
    assert {len(text.split()) for (text,), _ in rows} == {BURST_WORDS}


def test_a_share_is_of_a_closed_loop_of_its_kind_that_came_before() -> None:
    closed, later = plan(["pictures-4@16", "pictures-4@70%"])
    assert isinstance(closed, Load) and isinstance(later, Later)
    known = later.at(10.0)
    assert known.name == "pictures-4@7/s"
    assert known.pace == Open(7.0)
    assert known.make.args == closed.make.args  # type: ignore[attr-defined]
    for names in (["text@70%"], ["text@2/s", "text@70%"], ["chats@4", "text@70%"]):
        with pytest.raises(ValueError, match="text@70%: nothing says what that is a share of"):
            plan(names)
    with pytest.raises(ValueError, match="nothing says"):
        load("text@70%")
