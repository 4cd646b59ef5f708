"""What is told again is what is held, parents first."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from backend_worker.kv_events.held_blocks import MAX_IN_RUN, Hash, HeldBlocks, Kind, Shelf

SHELF = Shelf(0, offloaded=False)
TIER = Shelf(0, offloaded=True)
KIND = Kind([], None, [], 16, None, "GPU", None, None, 0, "full_attention")


def told(held: HeldBlocks) -> Counter[Hash]:
    """Copies of each block."""
    found: Counter[Hash] = Counter()
    for run, times in held.told():
        assert len(run.hashes) <= MAX_IN_RUN
        for _ in range(times):
            found.update(run.hashes)
    return found


def store(held: HeldBlocks, *hashes: int, parent: int | None = None, chained: bool = True) -> None:
    held.store(SHELF, list(hashes), parent, KIND, chained=chained)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "loose", "remove", "clear"]),
        st.lists(st.integers(0, 12), max_size=6),
        st.none() | st.integers(0, 12),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(OPERATIONS, st.booleans())
def test_what_is_told_is_what_is_held(
    operations: list[tuple[str, list[int], int | None]], offloaded: bool
) -> None:
    held, copies = HeldBlocks(), Counter[Hash]()
    shelf = Shelf(0, offloaded)
    for what, hashes, parent in operations:
        if what == "clear":
            held.clear()
            copies.clear()
        elif what == "remove":
            held.remove(shelf, hashes)
            for one in hashes:
                copies[one] = max(0, copies[one] - 1)
        else:
            held.store(shelf, list(hashes), parent, KIND, chained=what == "store")
            for one in hashes:
                copies[one] = 1 if offloaded else copies[one] + 1
    assert told(held) == +copies
    assert len(held) == len(+copies)


def test_prompts_that_grow_block_by_block_are_few_runs() -> None:
    held = HeldBlocks()
    for number in range(1_000):
        store(held, number, parent=number - 1 if number else None)
    assert [len(run.hashes) for run, _ in held.told()] == [256, 256, 256, 232]
    assert [run.parent for run, _ in held.told()] == [None, 255, 511, 767]


def test_a_parent_that_was_stored_again_comes_first_all_the_same() -> None:
    held = HeldBlocks()
    store(held, 1, 2, 3)
    held.remove(SHELF, [1, 2])
    store(held, 2, parent=1)
    store(held, 1)
    seen: set[Hash] = set()
    for run, _ in held.told():
        assert run.parent is None or run.parent in seen
        seen.update(run.hashes)
    assert seen == {1, 2, 3}


def test_a_block_taken_from_the_middle_leaves_two_chains() -> None:
    held = HeldBlocks()
    store(held, 1, 2, 3, 4)
    held.remove(SHELF, [2])
    assert [(run.parent, run.hashes) for run, _ in held.told()] == [(None, [1]), (2, [3, 4])]


def test_blocks_without_a_chain_have_no_parents() -> None:
    held = HeldBlocks()
    store(held, 5, 9, parent=1, chained=False)
    assert [(run.parent, run.hashes) for run, _ in held.told()] == [(None, [5]), (None, [9])]


def test_what_differs_stands_apart() -> None:
    held = HeldBlocks()
    store(held, 1)
    held.store(SHELF, [2], 1, replace(KIND, lora_name="a"), chained=True)
    held.store(Shelf(1, offloaded=False), [1], None, replace(KIND, group_idx=1), chained=True)
    held.store(TIER, [1], None, replace(KIND, medium="CPU"), chained=True)
    held.remove(TIER, [1])
    found = [(run.kind.lora_name, run.kind.group_idx, run.hashes) for run, _ in held.told()]
    # The empty run tells of a tier that was used.
    assert found == [(None, 0, [1]), ("a", 0, [2]), (None, 1, [1]), (None, 0, [])]
    held.remove(Shelf(7, offloaded=False), [1])
    assert len(held) == 3
