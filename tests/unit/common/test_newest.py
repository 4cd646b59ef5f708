"""Tables that keep what was put into them last."""

from common.aio.newest import keep_newest


def test_the_oldest_go_and_what_comes_again_is_new() -> None:
    table: dict[str, int] = {}
    for number, name in enumerate("abac"):
        keep_newest(table, name, number, 2)
    assert table == {"a": 2, "c": 3}
    keep_newest(table, "d", 4, 1)
    assert table == {"d": 4}
