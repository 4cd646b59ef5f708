from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from common.errors import ArenaUnavailableError, CorruptSegmentError
from common.transfer.arena.arena import Arena
from common.transfer.arena.file import SHARED_MEMORY, ArenaMapping
from common.transfer.arena.layout import SEGMENTS_START, ArenaOffer

MakeArena = Callable[..., Arena]


def test_the_probe_is_found(make_arena: MakeArena) -> None:
    offer = ArenaOffer.model_validate_json(make_arena().offer.model_dump_json())
    mapping = ArenaMapping.open(offer)
    assert mapping.memory.nbytes == offer.size


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": "00" * 32},
        {"generation": 5},
        {"size": (1 << 20) + 4096},
        {"size": 1 << 19},
        {"name": f"mmrouter-arena-1-1-{'0' * 16}"},
    ],
)
def test_an_arena_that_is_not_the_one_offered(
    make_arena: MakeArena, change: dict[str, object]
) -> None:
    """What a worker in another IPC namespace, or of an earlier frontend, would find."""
    offer = make_arena().offer.model_copy(update=change)
    with pytest.raises(ArenaUnavailableError):
        ArenaMapping.open(offer)


@pytest.mark.parametrize(
    "name", ["../etc/passwd", "/etc/passwd", "psm_1", "", "mmrouter-arena-1-1-0000000000000000/x"]
)
def test_an_offer_names_nothing_but_arenas(make_arena: MakeArena, name: str) -> None:
    values = make_arena().offer.model_dump() | {"name": name}
    with pytest.raises(ValidationError):
        ArenaOffer.model_validate(values)


def test_permissions_and_kind_of_file(make_arena: MakeArena, tmp_path: Path) -> None:
    arena = make_arena()
    path = SHARED_MEMORY / arena.offer.name
    path.chmod(0o644)
    with pytest.raises(ArenaUnavailableError, match="open to other users"):
        ArenaMapping.open(arena.offer)
    (tmp_path / arena.offer.name).symlink_to(path)
    with pytest.raises(ArenaUnavailableError, match="can't open"):
        ArenaMapping.open(arena.offer, tmp_path)
    (tmp_path / arena.offer.name).unlink()
    (tmp_path / arena.offer.name).mkdir(mode=0o700)
    with pytest.raises(ArenaUnavailableError, match="not a file"):
        ArenaMapping.open(arena.offer, tmp_path)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 64),
        (SEGMENTS_START - 64, 64),
        (SEGMENTS_START + 64, 64),
        (SEGMENTS_START, 1 << 20),
        (1 << 20, 64),
        (1 << 62, 64),
    ],
)
def test_segments_outside_the_arena(make_arena: MakeArena, offset: int, length: int) -> None:
    mapping = ArenaMapping.open(make_arena().offer)
    with pytest.raises(CorruptSegmentError):
        mapping.segment(offset, length)


def test_a_reader_cannot_change_the_arena(make_arena: MakeArena) -> None:
    arena = make_arena()
    mapping = ArenaMapping.open(arena.offer)
    mapping.memory[SEGMENTS_START] = 99
    assert arena.memory[SEGMENTS_START] == 0
