"""The process that reads over NIXL: pieces in order, a few at a time, and failures at their end."""

from typing import cast

from common.errors import ArenaUnavailableError
from common.transfer.nixl_processes.agent import NixlAgent, NixlRead
from common.transfer.nixl_processes.messages import (
    Channel,
    Done,
    FromReader,
    NixlFailed,
    Read,
    ToReader,
)
from common.transfer.nixl_processes.reader import Reader

AT_ONCE = 8
ADDRESS = 1 << 20


class _Piece:
    """A read that ends when the test says so."""

    def __init__(self, local: int, remote: int, size: int) -> None:
        self.where = (local, remote, size)
        self.outcome: bool | str = False

    def poll(self) -> bool:
        if isinstance(self.outcome, str):
            raise ArenaUnavailableError(self.outcome)
        return self.outcome


class _Network:
    """Stands for an agent and for the channel to the worker."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.said: list[FromReader] = []
        self.done_at_once = False
        self.gone = False

    def read(self, peer: str, local: int, remote: int, size: int) -> NixlRead:
        if self.gone:
            raise ArenaUnavailableError(f"{peer} is gone")
        piece = _Piece(local, remote, size)
        piece.outcome = self.done_at_once
        self.pieces.append(piece)
        return cast(NixlRead, piece)

    def send(self, message: FromReader) -> None:
        self.said.append(message)

    def reader(self) -> Reader:
        return Reader(cast(NixlAgent, self), cast("Channel[FromReader, ToReader]", self), ADDRESS)


def begun(network: _Network, pieces: int) -> Reader:
    """A reader that was asked for some pieces, and has had time."""
    reader = network.reader()
    reader.handle(Read(5, "frontend", 7000, 300, 10 * pieces - 3, 10))
    for _ in range(20):
        reader.advance()
    return reader


def test_all_pieces_are_read_to_where_they_belong() -> None:
    network = _Network()
    network.done_at_once = True
    begun(network, 3)
    assert [piece.where for piece in network.pieces] == [
        (ADDRESS + 300, 7000, 10),
        (ADDRESS + 310, 7010, 10),
        (ADDRESS + 320, 7020, 7),
    ]
    assert network.said == [Done(5)] * 3


def test_a_piece_that_is_done_at_once_is_told_before_the_next_is_begun() -> None:
    network = _Network()
    network.done_at_once = True
    reader = network.reader()
    reader.handle(Read(5, "frontend", 7000, 300, 100, 10))
    for done in range(10):
        reader.advance()
        assert (len(network.pieces), len(network.said)) == (done + 1, done)


def test_slow_pieces_are_on_their_way_together_and_told_in_order() -> None:
    network = _Network()
    reader = begun(network, 12)
    assert len(network.pieces) == AT_ONCE
    for piece in network.pieces[1:]:
        piece.outcome = True
    reader.advance()
    assert not network.said, "the first one has not arrived"
    network.pieces[0].outcome = network.done_at_once = True
    for _ in range(20):
        reader.advance()
    assert network.said == [Done(5)] * 12


def test_a_failure_is_told_once_no_more_bytes_can_come() -> None:
    """Whoever hears of it gives the memory to another item."""
    network = _Network()
    reader = begun(network, 12)
    network.pieces[0].outcome = "broken"
    reader.advance()
    assert not network.said
    for piece in network.pieces[1:-1]:
        piece.outcome = True
    reader.advance()
    assert not network.said, "one is still on its way"
    network.pieces[-1].outcome = "broken too"
    for _ in range(3):
        reader.advance()
    assert len(network.pieces) == AT_ONCE, "no more are begun"
    assert [type(message) for message in network.said] == [NixlFailed]


def test_a_piece_that_cannot_be_begun_fails_the_read_at_its_end() -> None:
    network = _Network()
    reader = network.reader()
    reader.handle(Read(5, "frontend", 7000, 300, 100, 10))
    reader.advance()
    network.gone = True
    reader.advance()
    reader.advance()
    assert not network.said, "the first piece is still on its way"
    network.pieces[0].outcome = True
    reader.advance()
    assert network.said == [NixlFailed(5, "frontend is gone")]
