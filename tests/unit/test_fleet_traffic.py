"""The traffic of the benchmark of several frontends: blocks of one shape, and nothing in common."""

from tests.benchmarks.fleet_traffic import Ask, Message, Traffic


def said(asks: list[Ask]) -> set[str]:
    """All that is shown in a block."""
    return {content for ask in asks for message in ask.messages for content in message.content}


def test_blocks_of_a_number_have_one_shape_and_nothing_else_in_common() -> None:
    traffic = Traffic(seed=1, rate=5.0, seconds=30.0)
    one, other = traffic.block("a", 3), traffic.block("b", 3)
    assert [(ask.at, ask.user, ask.turn) for ask in one] == [
        (ask.at, ask.user, ask.turn) for ask in other
    ]
    assert not said(one) & said(other)
    assert [ask.at for ask in traffic.block("a", 4)] != [ask.at for ask in one]


def test_a_block_is_the_same_each_time() -> None:
    assert Traffic(1, 5.0, 30.0).block("a", 3) == Traffic(1, 5.0, 30.0).block("a", 3)


def test_a_turn_begins_with_the_turn_before() -> None:
    turns: dict[int, tuple[Message, ...]] = {}
    later = 0
    for ask in Traffic(1, 5.0, 30.0).block("a", 0):
        if ask.turn:
            later += 1
            before = turns[ask.user]
            assert ask.messages[: len(before)] == before
        turns[ask.user] = ask.messages
    assert later
