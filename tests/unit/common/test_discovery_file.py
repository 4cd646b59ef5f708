import asyncio
import os
import stat
import time
from pathlib import Path

import pytest

from common.card import WorkerState
from common.discovery.base import CardChange, CardGone, CardPresent
from common.discovery.file import LEASE_S, FileCardPublisher, FileCardWatcher
from common.errors import DiscoveryError
from common.telemetry import MALFORMED_CARDS
from tests.unit.common.cards import make_card


async def next_changes(watcher: FileCardWatcher, count: int) -> list[CardChange]:
    changes: list[CardChange] = []
    async with asyncio.timeout(60):
        async for change in watcher.changes():
            changes.append(change)
            if len(changes) == count:
                break
    return changes


async def test_a_published_card_is_seen_and_a_withdrawn_one_goes(tmp_path: Path) -> None:
    watcher = FileCardWatcher(tmp_path / "not-yet-there")
    card = make_card()
    async with FileCardPublisher(tmp_path / "not-yet-there") as publisher:
        await publisher.publish(card)
        assert await next_changes(watcher, 1) == [CardPresent(card)]
    assert await next_changes(watcher, 1) == [CardGone(card.worker_id)]
    assert list((tmp_path / "not-yet-there").iterdir()) == []


async def test_a_changed_card_is_seen_again(tmp_path: Path) -> None:
    watcher = FileCardWatcher(tmp_path)
    async with FileCardPublisher(tmp_path) as publisher:
        await publisher.publish(make_card())
        await next_changes(watcher, 1)
        draining = make_card(state=WorkerState.DRAINING)
        await publisher.publish(draining)
        assert await next_changes(watcher, 1) == [CardPresent(draining)]


async def test_only_the_owner_can_read_a_card(tmp_path: Path) -> None:
    directory = tmp_path / "cards"
    async with FileCardPublisher(directory) as publisher:
        await publisher.publish(make_card())
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.fixture(params=[0o777, 0o1777, 0o702])
def open_directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tmp_path.chmod(request.param)
    return tmp_path


async def test_a_directory_that_others_can_write_is_not_trusted(open_directory: Path) -> None:
    with pytest.raises(DiscoveryError, match="can't be trusted"):
        await FileCardPublisher(open_directory).publish(make_card())
    assert not any(open_directory.iterdir())  # noqa: ASYNC240  # a test
    with pytest.raises(DiscoveryError, match="can't be trusted"):
        await next_changes(FileCardWatcher(open_directory), 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_directory_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    theirs = tmp_path / "cards"
    theirs.mkdir(0o700)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(DiscoveryError, match="belongs to user 12345"):
        await next_changes(FileCardWatcher(theirs), 1)


async def test_an_ended_lease_is_a_gone_worker(tmp_path: Path) -> None:
    watcher = FileCardWatcher(tmp_path)
    (tmp_path / "w0.json").write_bytes(make_card().to_json())
    await next_changes(watcher, 1)
    long_ago = time.time() - LEASE_S - 1
    os.utime(tmp_path / "w0.json", (long_ago, long_ago))
    assert await next_changes(watcher, 1) == [CardGone(make_card().worker_id)]


@pytest.mark.parametrize("content", [b"", b"{}", make_card("somebody-else").to_json()])
async def test_a_malformed_card_is_counted_once_and_hides_no_other(
    tmp_path: Path, content: bytes
) -> None:
    watcher = FileCardWatcher(tmp_path)
    before = MALFORMED_CARDS._value.get()
    (tmp_path / "w1.json").write_bytes(content)
    for _ in range(3):
        assert watcher._scan() == []
    (tmp_path / "w0.json").write_bytes(make_card().to_json())
    assert await next_changes(watcher, 1) == [CardPresent(make_card())]
    assert MALFORMED_CARDS._value.get() == before + 1


async def test_a_name_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match="can't name a file"):
        await FileCardPublisher(tmp_path).publish(make_card("../elsewhere"))


async def test_an_unwritable_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiscoveryError, match="can't be written"):
        await FileCardPublisher(tmp_path / "file").publish(make_card())
