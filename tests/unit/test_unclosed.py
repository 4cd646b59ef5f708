"""The helper that tells what nobody closed."""

import asyncio
import socket
from pathlib import Path

import pytest

from tests.unclosed import closes_all


def test_what_is_closed_is_no_complaint(tmp_path: Path) -> None:
    with closes_all(), (tmp_path / "a").open("w"), socket.socket():
        pass


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_socket_that_nobody_closed(in_a_cycle: bool) -> None:
    def leave() -> None:
        holder: list[object] = [socket.socket()]
        if in_a_cycle:
            holder.append(holder)

    with pytest.raises(AssertionError, match="unclosed"), closes_all():
        leave()


def test_a_connection_whose_loop_is_gone() -> None:
    async def leave(address: tuple[str, int]) -> None:
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, *address)

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(AssertionError, match="unclosed"),
        closes_all(),
    ):
        asyncio.run(leave(server.getsockname()))


def test_what_was_left_before_does_not_count() -> None:
    holder: list[object] = [socket.socket()]
    holder.append(holder)
    del holder
    with closes_all():
        pass
