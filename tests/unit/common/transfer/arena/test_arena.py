import threading
from collections.abc import Callable

import pytest

from common.errors import ArenaFullError, ArenaUnavailableError, StaleSegmentError
from common.transfer.arena import access, layout
from common.transfer.arena.access import Lease
from common.transfer.arena.arena import Arena
from common.transfer.arena.file import SHARED_MEMORY
from common.transfer.arena.layout import check_header
from common.transfer.codec import encode
from tests.unit.common.transfer.items import image, image_hash

MakeArena = Callable[..., Arena]


def put(arena: Arena, seed: int, rows: int = 64) -> Lease:
    return arena.put(image_hash(seed), encode(image(seed, rows)))


def check(arena: Arena, lease: Lease) -> None:
    header = arena.memory[lease.offset : lease.offset + 64]
    check_header(header, arena.offer.key, lease.generation, lease.mm_hash, lease.layout)


def test_put_then_lease(make_arena: MakeArena) -> None:
    arena = make_arena()
    assert arena.lease(image_hash(1)) is None
    assert not arena.contains(image_hash(1))
    first = put(arena, 1)
    second = arena.lease(image_hash(1))
    assert second is not None
    assert arena.contains(image_hash(1))
    check(arena, first)
    assert (first.offset, first.generation) == (second.offset, second.generation)
    figures = arena.statistics()
    assert (figures.leases, figures.writes) == (2, 1)
    assert figures.bytes_leased == figures.bytes_used > first.layout.nbytes
    first.release()
    second.release()
    figures = arena.statistics()
    assert (figures.leases, figures.bytes_leased) == (0, 0)


def test_put_of_an_item_that_is_there_writes_nothing(make_arena: MakeArena) -> None:
    arena = make_arena()
    first, second = put(arena, 1), put(arena, 1)
    assert (first.offset, first.generation) == (second.offset, second.generation)
    assert arena.statistics().writes == 1


def test_release_counts_once(make_arena: MakeArena) -> None:
    arena = make_arena()
    first, second = put(arena, 1), put(arena, 1)
    first.release()
    first.release()
    assert arena.statistics().leases == 1
    with second:
        pass
    assert arena.statistics().leases == 0


def test_full_of_leased_items(make_arena: MakeArena) -> None:
    arena = make_arena(300_000)
    leases = [put(arena, 1), put(arena, 2), put(arena, 3)]
    with pytest.raises(ArenaFullError, match="leased"):
        put(arena, 4)
    leases[1].release()
    put(arena, 4)
    assert arena.statistics().evictions == 1
    assert not arena.contains(image_hash(2))


def test_an_evicted_segments_header_is_no_longer_valid(make_arena: MakeArena) -> None:
    arena = make_arena(300_000)
    leases = [put(arena, seed) for seed in range(3)]
    for lease in leases:
        lease.release()
    # Larger than one of them, so that headers in its middle are overwritten too.
    put(arena, 9, rows=120)
    for lease in leases[:2]:
        with pytest.raises(StaleSegmentError):
            check(arena, lease)
    check(arena, leases[2])


def test_generations_differ_between_two_writes_of_one_item(make_arena: MakeArena) -> None:
    arena = make_arena(100_000)
    first = put(arena, 1)
    first.release()
    put(arena, 2).release()
    again = put(arena, 1)
    assert again.generation > first.generation


def test_what_is_forgotten_is_written_anew_and_its_leases_go_on(make_arena: MakeArena) -> None:
    arena = make_arena(300_000)
    before = put(arena, 1)
    put(arena, 2).release()
    arena.forget()
    assert arena.lease(image_hash(1)) is None
    again = put(arena, 1)
    assert again.offset != before.offset
    check(arena, before)
    before.release()
    for seed in (3, 4, 5):  # in the place of what was forgotten
        put(arena, seed).release()
    check(arena, again)
    assert arena.contains(image_hash(1))


def test_a_failed_write_leaves_room_and_no_item(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(access, "write_parts", fail)
        with pytest.raises(MemoryError):
            put(arena, 1)
    figures = arena.statistics()
    assert (figures.bytes_used, figures.leases) == (0, 0)
    put(arena, 1)


def test_each_byte_is_copied_once(make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena()
    copied: list[int] = []
    copy_bytes = layout.copy_bytes

    def count(target: memoryview, source: bytes | memoryview) -> None:
        copied.append(len(source))
        copy_bytes(target, source)

    monkeypatch.setattr(layout, "copy_bytes", count)
    lease = put(arena, 1)
    assert sum(copied) == lease.layout.nbytes
    put(arena, 1)
    assert sum(copied) == lease.layout.nbytes


def test_two_threads_with_one_item_write_it_once(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena()
    writing, go_on = threading.Event(), threading.Event()
    write_parts = layout.write_parts

    def slowly(*arguments: object) -> None:
        writing.set()
        assert go_on.wait(10)
        write_parts(*arguments)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(access, "write_parts", slowly)
    leases: list[Lease] = []
    threads = [threading.Thread(target=lambda: leases.append(put(arena, 1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert writing.wait(10)
    # Neither blocks while the copy is under way, and the item isn't there yet.
    assert arena.lease(image_hash(1)) is None
    assert not arena.contains(image_hash(1))
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len({(lease.offset, lease.generation) for lease in leases}) == 1
    assert (arena.statistics().writes, arena.statistics().leases) == (1, 3)


def test_a_waiting_writer_takes_over_when_the_first_fails(
    make_arena: MakeArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = make_arena()
    writing, go_on = threading.Event(), threading.Event()
    write_parts = layout.write_parts

    def fail_once(*_: object) -> None:
        monkeypatch.setattr(access, "write_parts", write_parts)
        writing.set()
        assert go_on.wait(10)
        raise MemoryError

    monkeypatch.setattr(access, "write_parts", fail_once)
    failed: list[bool] = []

    def first() -> None:
        with pytest.raises(MemoryError):
            put(arena, 1)
        failed.append(True)

    leases: list[Lease] = []
    threads = [
        threading.Thread(target=first),
        threading.Thread(target=lambda: leases.append(put(arena, 1))),
    ]
    threads[0].start()
    assert writing.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert failed
    check(arena, leases[0])


def test_close(make_arena: MakeArena) -> None:
    arena = make_arena()
    lease = put(arena, 1)
    path = SHARED_MEMORY / arena.offer.name
    assert path.stat().st_mode & 0o777 == 0o600
    arena.close()
    assert not path.exists()
    arena.close()
    lease.release()
    assert arena.lease(image_hash(1)) is None
    assert not arena.contains(image_hash(1))
    with pytest.raises(ArenaUnavailableError, match="closed"):
        put(arena, 2)


def test_more_than_there_is_of_shared_memory() -> None:
    with pytest.raises(ArenaUnavailableError, match="not that much room"):
        Arena(1 << 50)


def test_a_directory_that_is_not_there() -> None:
    with pytest.raises(ArenaUnavailableError, match="can't create"):
        Arena(1 << 20, directory=SHARED_MEMORY / "mmrouter-none")


def test_without_prefault(make_arena: MakeArena) -> None:
    arena = make_arena(prefault=False)
    check(arena, put(arena, 1))
