"""One arena for several processes: what one knows all know, and one that is killed takes
nothing along."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from unittest.mock import Mock

import pytest

from common.errors import ArenaFullError, ArenaUnavailableError
from common.identity import MmHash
from common.transfer.arena import Arena, Lease, ReservedSegment, SegmentLayout, check_header
from common.transfer.shared_arena import ArenaKeeper, MediaClaims, SharedArena, connection
from common.transfer.shared_arena import keeper as keeper_module
from common.transfer.shared_arena.messages import GiveBack
from tests.waiting import until

PAGE = 4096
SIZE = 9 * PAGE
LAYOUT = SegmentLayout(8, (PAGE - 128,))
"""Of a segment that takes one page."""

Attach = Callable[[], Awaitable[SharedArena]]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with closing(Arena(SIZE)) as arena:
        yield arena


@pytest.fixture
def keeper(arena: Arena) -> ArenaKeeper:
    return ArenaKeeper(arena, quarantine_s=0.0)


@pytest.fixture
async def attach(keeper: ArenaKeeper) -> AsyncIterator[Attach]:
    users = []

    async def attached() -> SharedArena:
        ours, theirs = socket.socketpair()
        await keeper.attach(ours)
        users.append(SharedArena(keeper.arena.offer, theirs, processes=2))
        return users[-1]

    yield attached
    for user in users:
        await asyncio.to_thread(user.close)
    await until(lambda: not keeper._sessions)


def write(arena: SharedArena, name: str, note: object = "note") -> Lease:
    room = arena.reserve(MmHash(name), LAYOUT)
    assert isinstance(room, ReservedSegment)
    with room:
        room.memory[64:72] = name.encode().ljust(8)
        return room.complete(bytes(room.memory[64:72]), note)


async def written(arena: SharedArena, name: str, note: object = "note") -> Lease:
    return await asyncio.to_thread(write, arena, name, note)


async def leased(arena: SharedArena, name: str) -> Lease | None:
    return await asyncio.to_thread(arena.lease, MmHash(name))


async def test_what_one_wrote_the_other_has(attach: Attach, arena: Arena) -> None:
    one, other = await attach(), await attach()
    mine = await written(one, "a", {"updates": [1, 2]})
    assert other.lease_now(MmHash("a")) is None  # would have to ask
    found = await leased(other, "a")
    assert found is not None
    assert (found.offset, found.generation) == (mine.offset, mine.generation)
    assert found.note == {"updates": [1, 2]}
    assert bytes(found.memory[64:72]) == b"a       "
    check_header(found.memory[:64], arena.offer.key, found.generation, MmHash("a"), LAYOUT)
    again = other.lease_now(MmHash("a"))
    assert again is not None
    assert await leased(other, "b") is None
    for each in (found, again, mine):
        each.release()
        each.release()
    assert other.statistics().leases == one.statistics().leases == 0


async def test_what_is_leased_for_later_is_given_back_when_somebody_needs_room(
    attach: Attach, arena: Arena
) -> None:
    one, other = await attach(), await attach()
    for number in range(8):
        (await written(one, f"a{number}")).release()
    # Within its limit it goes on leasing the last one.
    assert one.lease_now(MmHash("a0")) is None
    last = one.lease_now(MmHash("a7"))
    assert last is not None
    last.release()
    held = [await written(other, f"b{number}") for number in range(8)]
    assert arena.statistics().evictions == 8
    assert await leased(one, "a7") is None
    for each in held:
        each.release()


async def test_full_of_what_is_in_use(attach: Attach) -> None:
    one, other = await attach(), await attach()
    held = [await written(one, f"a{number}") for number in range(8)]
    with pytest.raises(ArenaFullError, match="leased"):
        await written(other, "b")
    held[0].release()
    (await written(other, "b")).release()


async def test_a_user_that_gives_nothing_back_in_time_keeps_nobody_waiting(
    attach: Attach, keeper: ArenaKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "GIVE_BACK_S", 0.01)
    one = await attach()
    ours, hung = socket.socketpair()
    await keeper.attach(ours)
    held = [await written(one, f"a{number}") for number in range(8)]
    with pytest.raises(ArenaFullError):
        await written(one, "b")
    for each in held:
        each.release()
    hung.close()


async def test_an_answer_that_fails_ends_the_connection_of_who_waits_for_it(
    attach: Attach, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    one, other = await attach(), await attach()
    with monkeypatch.context() as broken:
        broken.setattr(arena, "reserve_now", fails)
        with pytest.raises(ArenaUnavailableError):
            await written(one, "a")
    (await written(other, "a")).release()


async def test_who_wants_what_another_is_writing_waits_and_gets_it(attach: Attach) -> None:
    one, other = await attach(), await attach()
    room = await asyncio.to_thread(one.reserve, MmHash("a"), LAYOUT)
    waiting = asyncio.create_task(asyncio.to_thread(other.reserve, MmHash("a"), LAYOUT))
    assert await leased(other, "a") is None  # asked after that, and not kept waiting by it
    assert isinstance(room, ReservedSegment)
    room.memory[64:72] = b"a       "
    mine = room.complete(b"a       ", "note")
    found = await waiting
    assert isinstance(found, Lease) and found.note == "note"
    mine.release()
    found.release()


async def test_who_waits_for_a_writer_that_gives_up_writes(attach: Attach) -> None:
    one, other = await attach(), await attach()
    room = await asyncio.to_thread(one.reserve, MmHash("a"), LAYOUT)
    waiting = asyncio.create_task(asyncio.to_thread(other.reserve, MmHash("a"), LAYOUT))
    assert await leased(other, "a") is None
    assert isinstance(room, ReservedSegment)
    room.release()
    found = await waiting
    assert isinstance(found, ReservedSegment)
    found.release()


async def test_two_that_write_two_items_crosswise_both_get_on(attach: Attach) -> None:
    """Waiting for one item does not keep a process from completing another."""
    one, other = await attach(), await attach()
    a = await asyncio.to_thread(one.reserve, MmHash("a"), LAYOUT)
    b = await asyncio.to_thread(other.reserve, MmHash("b"), LAYOUT)
    for_b = asyncio.create_task(asyncio.to_thread(one.reserve, MmHash("b"), LAYOUT))
    for_a = asyncio.create_task(asyncio.to_thread(other.reserve, MmHash("a"), LAYOUT))
    assert await leased(one, "a") is None and await leased(other, "b") is None
    assert isinstance(a, ReservedSegment) and isinstance(b, ReservedSegment)
    for room in (a, b):
        room.memory[64:72] = b"12345678"
        room.complete(b"12345678").release()
    for found in (await for_a, await for_b):
        assert isinstance(found, Lease)
        found.release()


async def test_notes_are_dropped_and_given_anew_everywhere(attach: Attach) -> None:
    one, other = await attach(), await attach()
    mine = await written(one, "a", "old")
    theirs = await leased(other, "a")
    assert theirs is not None and theirs.note == "old"
    one.drop_notes()

    async def note_of(arena: SharedArena) -> object:
        found = await leased(arena, "a")
        assert found is not None
        with found:
            return found.note

    await leased(one, "x")  # the keeper has it by then
    await leased(other, "x")  # and has told the other
    assert await note_of(other) is None
    mine.annotate("new")
    mine.release()
    theirs.release()
    third = await attach()
    assert await note_of(third) == "new"


async def test_leases_that_the_garbage_collector_ends_count_from_the_next_operation_on(
    attach: Attach,
) -> None:
    one = await attach()
    lease = await written(one, "a")
    lease.release_soon()
    assert one.statistics().leases == 0


async def test_one_medium_is_processed_by_one(attach: Attach) -> None:
    arenas = [await attach() for _ in range(3)]
    one, other, third = map(MediaClaims, arenas)
    assert await one.claim(b"key") is None
    waiting = [asyncio.create_task(each.claim(b"key")) for each in (other, third)]
    lease = await written(arenas[0], "a")
    one.landed(b"key", MmHash("a"))
    for task in waiting:
        found = await task
        assert found is not None and found.mm_hash == "a"
        found.release()
    again = await one.claim(b"key")
    assert again is not None
    again.release()
    lease.release()


async def test_what_nothing_came_of_is_the_next_ones_to_process(attach: Attach) -> None:
    one, other = MediaClaims(await attach()), MediaClaims(await attach())
    assert await one.claim(b"key") is None
    waiting = asyncio.create_task(other.claim(b"key"))
    one.landed(b"key", None)
    assert await waiting is None
    one.landed(b"key", MmHash("not its own"))  # nothing: it is at it no more
    other.landed(b"key", None)


async def test_names_are_of_a_space_and_limited(attach: Attach) -> None:
    one, other = MediaClaims(await attach()), MediaClaims(await attach())
    await one.remember(b"key 1", b"name", MmHash("a"), 2)
    assert await other.recall(b"key 1", b"name") == "a"
    assert await other.recall(b"key 2", b"name") is None
    await other.remember(b"key 1", b"second", MmHash("b"), 2)
    assert await one.recall(b"key 1", b"name") == "a"
    await other.remember(b"key 1", b"third", MmHash("c"), 2)
    assert await one.recall(b"key 1", b"second") is None
    assert await one.recall(b"key 1", b"name") == "a"


async def test_without_the_keeper_each_is_for_itself(attach: Attach, keeper: ArenaKeeper) -> None:
    one = await attach()
    lease = await written(one, "a")
    for session in keeper._sessions:
        session.protocol.close()
    await until(lambda: one.connection.lost)
    assert one.lease_now(MmHash("a")) is None
    assert await leased(one, "a") is None
    with pytest.raises(ArenaUnavailableError, match="gone"):
        await written(one, "b")
    directory = MediaClaims(one)
    assert await directory.claim(b"key") is None
    assert await directory.recall(b"", b"name") is None
    await directory.remember(b"", b"name", MmHash("a"), 1)
    assert bytes(lease.memory[64:65]) == b"a"  # readers keep what they have
    lease.release()


async def test_a_keeper_that_stands_still_is_not_waited_for_and_asked_again_once_it_answers(
    keeper: ArenaKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.01)
    ours, theirs = socket.socketpair()
    one = SharedArena(keeper.arena.offer, theirs)
    directory = MediaClaims(one)
    with pytest.raises(ArenaUnavailableError, match="does not answer"):
        await written(one, "a")
    assert await directory.claim(b"key") is None
    assert await directory.recall(b"", b"name") is None
    await directory.remember(b"", b"name", MmHash("a"), 1)
    assert await leased(one, "a") is None
    await keeper.attach(ours)  # which reads what was asked meanwhile, and has room for it
    await until(lambda: not one.connection._silent)
    (await written(one, "a")).release()
    await asyncio.to_thread(one.close)


async def test_a_keeper_that_answers_is_waited_for(
    attach: Attach, keeper: ArenaKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ANSWER_S", 0.5)
    probes = Mock(wraps=keeper.names.recall)
    monkeypatch.setattr(keeper.names, "recall", probes)
    one, other = await attach(), await attach()
    room = await asyncio.to_thread(one.reserve, MmHash("a"), LAYOUT)
    assert isinstance(room, ReservedSegment)
    waiting = asyncio.create_task(written(other, "a"))
    await until(lambda: probes.call_count > 1)
    assert not waiting.done()
    room.release()
    (await waiting).release()


async def test_a_claim_that_is_not_waited_for_any_more_keeps_nobody_waiting(
    attach: Attach,
) -> None:
    one, other = MediaClaims(await attach()), MediaClaims(await attach())
    assert await one.claim(b"key") is None
    leaves = asyncio.create_task(other.claim(b"key"))
    await one.recall(b"", b"name")
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    one.landed(b"key", None)
    assert await one.claim(b"key") is None


async def test_more_than_a_socket_holds_is_sent_when_the_keeper_reads(
    keeper: ArenaKeeper,
) -> None:
    ours, theirs = socket.socketpair()
    one = SharedArena(keeper.arena.offer, theirs)
    directory = MediaClaims(one)
    for number in range(3000):  # nobody reads yet
        directory.landed(b"x" * 1000 + str(number).encode(), MmHash("a"))
    await keeper.attach(ours)
    await directory.remember(b"", b"name", MmHash("a"), 1)
    assert await directory.recall(b"", b"name") == "a"
    await asyncio.to_thread(one.close)


async def test_nonsense_ends_the_connection(keeper: ArenaKeeper) -> None:
    for nonsense in (b"\xff\xff\xff\xff", b"\x03\0\0\0abc"):
        ours, theirs = socket.socketpair()
        await keeper.attach(ours)
        theirs.send(nonsense)
        await until(lambda: not keeper._sessions)
        theirs.close()


async def test_many_threads_of_several_processes(attach: Attach, arena: Arena) -> None:
    """Each finds under a name what was written under it, and in the end nothing is in use."""
    users = [await attach(), await attach()]
    wrong: list[str] = []

    def work(user: SharedArena, seed: int) -> None:
        for step in range(60):
            name = f"n{(seed * 7 + step * step) % 12}"
            try:
                lease = user.lease(MmHash(name)) or user.reserve(MmHash(name), LAYOUT)
            except ArenaFullError:
                continue
            if isinstance(lease, ReservedSegment):
                with lease as room:
                    room.memory[64:72] = name.encode().ljust(8)
                    lease = room.complete(bytes(room.memory[64:72]), name)
            if bytes(lease.memory[64:72]) != name.encode().ljust(8):
                wrong.append(name)
            lease.release()

    threads = [
        threading.Thread(target=work, args=(user, seed)) for seed, user in enumerate(users * 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert not wrong
    assert all(user.statistics().leases == 0 for user in users)


class Killable:
    """A user in a process of its own."""

    def __init__(self, offer: str, end: socket.socket) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.unit.common.transfer.shared_arena.user_process",
                str(end.fileno()),
                offer,
            ],
            pass_fds=[end.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        end.close()

    async def do(self, command: str) -> str:
        def ask() -> str:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline().strip()

        return await asyncio.to_thread(ask)

    def kill(self) -> None:
        self._process.kill()
        with self._process:
            self._process.wait()


async def killable(keeper: ArenaKeeper) -> Killable:
    ours, theirs = socket.socketpair()
    await keeper.attach(ours)
    return Killable(keeper.arena.offer.model_dump_json(), theirs)


async def test_what_a_killed_process_leased_comes_back(
    attach: Attach, keeper: ArenaKeeper, arena: Arena
) -> None:
    one = await attach()
    (await written(one, "a")).release()
    victim = await killable(keeper)
    assert await victim.do("lease a") == "leased note"
    assert arena.statistics().leases >= 1
    victim.kill()
    await until(lambda: len(keeper._sessions) == 1)
    found = await leased(one, "a")
    assert found is not None
    found.release()
    one._ordered(GiveBack())
    await until(lambda: arena.statistics().leases == 0)


async def test_what_a_killed_process_was_writing_others_write(
    attach: Attach, keeper: ArenaKeeper, arena: Arena
) -> None:
    one = await attach()
    victim = await killable(keeper)
    assert await victim.do("reserve a") == "room"
    assert await victim.do("claim key") == "claimed"
    writing = asyncio.create_task(written(one, "a"))
    claiming = asyncio.create_task(MediaClaims(one).claim(b"key"))
    assert await leased(one, "a") is None
    victim.kill()
    (await writing).release()
    assert await claiming is None
    one._ordered(GiveBack())
    await until(lambda: arena.statistics().bytes_leased == 0)


async def test_memory_of_a_killed_process_is_nobodys_for_a_while(arena: Arena) -> None:
    """Its workers may still read, and its helpers write."""
    keeper = ArenaKeeper(arena, quarantine_s=3600)
    victim = await killable(keeper)
    assert await victim.do("reserve a") == "room"
    ours, theirs = socket.socketpair()
    await keeper.attach(ours)
    one = SharedArena(arena.offer, theirs)
    lease = await written(one, "b")
    assert await victim.do("lease b") == "leased note"
    victim.kill()
    await until(lambda: len(keeper._sessions) == 1)
    lease.release()
    one._ordered(GiveBack())
    elsewhere = await written(one, "a")  # not where the helper may still be writing
    elsewhere.release()
    assert arena.statistics().bytes_leased >= 2 * PAGE
    for number in range(5):
        (await written(one, f"c{number}")).release()
    held = [await written(one, f"d{number}") for number in range(6)]
    with pytest.raises(ArenaFullError):
        await written(one, "e")
    assert arena.contains(MmHash("b"))
    for each in held:
        each.release()
    await asyncio.to_thread(one.close)
