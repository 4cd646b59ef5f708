"""A question of one process to all others: who answers, who is left out."""

import msgspec
import pytest

from frontend.processes import messages
from frontend.processes.listeners import ConnectionCounts
from frontend.processes.messages import Answered, Answers, Ask, Asked, Asker, Questions
from tests.waiting import until


class Process:
    def __init__(self, name: str) -> None:
        self.name = name
        self.got: list[msgspec.Struct] = []

    def send(self, message: msgspec.Struct) -> None:
        self.got.append(message)

    def asked(self) -> Asked:
        message = self.got.pop()
        assert isinstance(message, Asked)
        return message


class Trio:
    def __init__(self) -> None:
        self.a, self.b, self.c = Process("a"), Process("b"), Process("c")
        everybody: set[Asker] = {self.a, self.b, self.c}
        self.questions = Questions(
            lambda: everybody, lambda topic: b"parent" if topic == "all" else None
        )


@pytest.fixture
def trio() -> Trio:
    return Trio()


async def test_all_answers_reach_who_asked(trio: Trio) -> None:
    trio.questions.ask(trio.a, Ask(7, "all", b"x"))
    for each in (trio.b, trio.c):
        asked = each.asked()
        assert (asked.topic, asked.argument) == ("all", b"x")
        assert not trio.a.got
        trio.questions.answered(each, Answered(asked.number, each.name.encode()))
    assert trio.a.got == [Answers(7, {"b": b"b", "c": b"c", "parent": b"parent"}, 0)]


async def test_who_can_not_answer_yet_is_not_silent(trio: Trio) -> None:
    trio.questions.ask(trio.a, Ask(1, "other", b""))
    for each, body in ((trio.b, None), (trio.c, b"c")):
        trio.questions.answered(each, Answered(each.asked().number, body))
    assert trio.a.got == [Answers(1, {"c": b"c"}, 0)]


async def test_who_is_gone_is_waited_for_no_more(trio: Trio) -> None:
    trio.questions.ask(trio.a, Ask(1, "other", b""))
    trio.questions.ask(trio.b, Ask(2, "other", b""))
    trio.questions.gone(trio.b)
    number = next(m.number for m in trio.c.got if isinstance(m, Asked))
    trio.questions.answered(trio.c, Answered(number, b"c"))
    assert trio.a.got[-1] == Answers(1, {"c": b"c"}, 0)
    trio.questions.answered(trio.c, Answered(number, b"again"))  # nothing


async def test_who_is_silent_is_counted(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "ANSWER_S", 0.01)
    trio.questions.ask(trio.a, Ask(1, "other", b""))
    late = trio.c.asked()
    await until(lambda: trio.a.got)
    assert trio.a.got == [Answers(1, {}, 2)]
    trio.questions.answered(trio.c, Answered(late.number, b"late"))
    trio.questions.answered(trio.a, Answered(99, b"to nothing"))
    assert len(trio.a.got) == 1


async def test_what_one_message_does_not_hold_is_left_out_and_counted(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 10)
    trio.questions.ask(trio.a, Ask(1, "other", b""))
    for each, body in ((trio.b, b"12345678"), (trio.c, b"123")):
        trio.questions.answered(each, Answered(each.asked().number, body))
    assert trio.a.got == [Answers(1, {"b": b"12345678"}, 1)]


async def test_nobody_else_is_there() -> None:
    only = Process("a")
    everybody: set[Asker] = {only}
    Questions(lambda: everybody, lambda _: None).ask(only, Ask(3, "other", b""))
    assert only.got == [Answers(3, {}, 0)]


def test_who_has_most_connections_leaves_the_next_to_others() -> None:
    counts = ConnectionCounts(ConnectionCounts.make(3), 3)
    counts.set(0, 4)
    assert not counts.another_has_fewer(0)  # the others accept none
    counts.set(1, 4)
    assert not counts.another_has_fewer(0)
    counts.set(2, 3)
    assert counts.another_has_fewer(0) and not counts.another_has_fewer(2)
    counts.not_accepting(2)
    assert not counts.another_has_fewer(0)
