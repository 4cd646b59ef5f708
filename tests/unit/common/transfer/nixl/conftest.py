from collections.abc import AsyncIterator, Callable

import pytest

from common.transfer.arena.arena import Arena
from common.transfer.nixl_processes.network import NixlNetwork
from tests.unit.common.transfer.nixl.ends import Ends

MakeArena = Callable[..., Arena]
MakeEnds = Callable[..., Ends]


@pytest.fixture
async def make_ends(make_arena: MakeArena) -> AsyncIterator[MakeEnds]:
    made: list[Ends] = []

    def make(network: NixlNetwork, arena_size: int = 1 << 20) -> Ends:
        made.append(Ends(make_arena(arena_size), network))
        return made[-1]

    yield make
    for ends in made:
        await ends.receiver.close()
        ends.sender.close()
