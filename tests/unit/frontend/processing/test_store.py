from contextlib import closing

import torch

from common.transfer.arena.arena import Arena
from common.transfer.codec import encode
from frontend.processing.store import ArenaStore, PrivateStore
from tests.unit.frontend.processing.media import made_up, same


def test_an_item_is_read_where_workers_read_it(arena: Arena) -> None:
    store = ArenaStore(arena)
    original = made_up("a")
    kept = store.put(original)
    assert same(kept.item, original.item)
    again = store.get(original.mm_hash)
    assert again is not None
    assert again.item["pixels"].data.data_ptr() == kept.item["pixels"].data.data_ptr()
    assert again.prompt_updates == original.prompt_updates
    assert arena.statistics().writes == 1


def test_an_item_is_leased_for_as_long_as_a_tensor_of_it_lives(arena: Arena) -> None:
    store = ArenaStore(arena)
    kept = store.put(made_up("a"))
    tensor = kept.item["pixels"].data[:16]
    del kept
    assert arena.statistics().leases == 1
    del tensor
    assert arena.statistics().leases == 0


def test_what_is_in_use_is_not_evicted_and_what_is_not_may_be() -> None:
    with closing(Arena(1 << 20, prefault=False)) as arena:
        store = ArenaStore(arena)
        used = store.put(made_up("used", 400_000))
        store.put(made_up("unused", 400_000))
        store.put(made_up("newest", 400_000))
        assert store.get(made_up("unused").mm_hash) is None
        assert store.get(used.mm_hash) is not None
        assert int(used.item["pixels"].data[0]) == len("used")


def test_without_room_an_item_serves_its_request_only() -> None:
    with closing(Arena(1 << 20, prefault=False)) as arena:
        store = ArenaStore(arena)
        big = made_up("big", 2 << 20)
        assert store.put(big) is big
        assert store.get(big.mm_hash) is None


def test_an_item_that_a_sender_wrote_gets_its_prompt_updates_later(arena: Arena) -> None:
    store = ArenaStore(arena)
    original = made_up("a")
    arena.put(original.mm_hash, encode(original.item)).release()
    assert store.get(original.mm_hash) is None
    store.put(original)
    assert store.get(original.mm_hash) is not None
    assert arena.statistics().writes == 1


def test_a_finalizer_may_run_while_the_arena_is_locked(arena: Arena) -> None:
    kept = ArenaStore(arena).put(made_up("a"))
    with arena._changed:
        del kept
    assert arena.statistics().leases == 0


def test_cleared_means_processed_anew(arena: Arena) -> None:
    for store in (ArenaStore(arena), PrivateStore(1.0)):
        kept = store.put(made_up("a"))
        store.clear()
        assert store.get(kept.mm_hash) is None
        store.put(made_up("a"))
        assert store.get(kept.mm_hash) is not None


def test_private_memory_has_a_budget() -> None:
    store = PrivateStore(1e6 / 2**30)
    store.put(made_up("a", 400_000))
    store.put(made_up("b", 400_000))
    store.put(made_up("c", 400_000))
    kept = [name for name in "abc" if store.get(made_up(name).mm_hash)]
    assert kept == ["b", "c"]
    assert torch.is_tensor(store.put(made_up("d", 2_000_000)).item["pixels"].data)
