"""Discovery in a directory: leases, and everything that can lie in a directory."""

import asyncio
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.discovery import watcher as watcher_module
from common.discovery.base import CardChange, CardGone, CardPresent, CardRefused
from common.discovery.file import LEASE_S, CardDirectory, FileCardPublisher, files
from common.discovery.watcher import PollingWatcher
from common.errors import CardError, CardKeyError, DiscoveryError
from common.fleet_key import FleetKey, new
from common.identity import Incarnation, WorkerId
from common.observability.telemetry import DISCOVERY_ERRORS
from common.request_plane.card import WorkerCard, WorkerState
from tests.fakes.cards import make_card
from tests.open_files import open_files
from tests.unit.common.discovery.contract import RENEW_S, counted, gone, watching
from tests.waiting import until


class Reader:
    """A watcher whose every look and whose clock are the test's."""

    def __init__(self, directory: Path, key: FleetKey | None = None) -> None:
        self.now = 1000.0
        self.watcher = PollingWatcher(CardDirectory(directory), key, clock=lambda: self.now)

    def look(self, later_s: float = 0.0) -> list[CardChange]:
        self.now += later_s
        try:
            with ThreadPoolExecutor(1) as aside:  # tests may have a loop of their own
                aside.submit(asyncio.run, self.watcher._look()).result()
        except DiscoveryError as error:
            self.watcher._note_problem(error)
        changes = list(self.watcher._pending)
        self.watcher._pending.clear()
        return changes

    def wait(self, seconds: float) -> list[CardChange]:
        """Look four times a second."""
        return [change for _ in range(int(seconds * 4)) for change in self.look(0.25)]


@pytest.fixture
def cards(tmp_path: Path) -> Path:
    directory = tmp_path / "cards"
    directory.mkdir(0o700)
    return directory


@pytest.fixture
def reader(cards: Path) -> Reader:
    reader = Reader(cards)
    assert reader.look() == []
    return reader


def path_of(directory: Path, card: WorkerCard) -> Path:
    return directory / f"{card.worker_id}.{card.incarnation}.json"


def put(directory: Path, card: WorkerCard) -> Path:
    path = path_of(directory, card)
    path.write_bytes(card.to_json())
    return path


def touch(path: Path, when: float | None = None) -> None:
    os.utime(path, None if when is None else (when, when))


# Leases


def test_an_ended_lease_is_a_gone_worker_and_a_renewal_brings_it_back(
    cards: Path, reader: Reader
) -> None:
    path = put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    assert reader.wait(LEASE_S) == []
    touch(path)
    assert reader.wait(LEASE_S) == []
    assert reader.wait(LEASE_S) == [gone(make_card())]
    assert reader.wait(LEASE_S) == []
    touch(path)
    assert reader.look() == [CardPresent(make_card())]


@pytest.mark.parametrize("jump", [-1e6, 1e6, pytest.param(-time.time(), id="to 1970")])
def test_a_clock_that_jumps_drops_nobody(cards: Path, reader: Reader, jump: float) -> None:
    """The file's time stamps come from another clock than the reader's, and from a jumping one."""
    path = put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    for number in range(100):
        touch(path, time.time() + jump + number)
        assert reader.wait(1) == []


def test_whoever_died_before_the_first_look_is_not_there(cards: Path) -> None:
    dead, alive = make_card("dead"), make_card("alive")
    put(cards, dead)
    living = put(cards, alive)
    reader = Reader(cards)
    assert reader.look() == []
    touch(living)
    assert reader.look(0.25) == [CardPresent(alive)]
    assert reader.wait(2 * LEASE_S) == [gone(alive)]


def test_a_reader_that_stood_still_drops_nobody(cards: Path, reader: Reader) -> None:
    path = put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    assert reader.look(later_s=3600) == [], "worker and reader may have been stopped together"
    touch(path)
    assert reader.wait(LEASE_S) == []


# Listings that fail


@pytest.mark.parametrize("number", [5, 13, 24, 116])  # EIO, EACCES, EMFILE, ESTALE
def test_a_listing_that_fails_keeps_the_last_view(
    cards: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    before = counted("listing")

    def fails(*_: Any, **__: Any) -> list[str]:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fails)
        assert reader.wait(3 * LEASE_S) == []
    assert counted("listing") > before
    touch(path)
    assert reader.wait(LEASE_S) == []
    path.unlink()
    assert reader.look() == [gone(make_card())]


def test_a_failing_listing_is_said_once(
    cards: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> list[str]:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "listdir", fails)
    reader.wait(LEASE_S)
    assert len([one for one in caplog.records if "discovery unavailable" in one.message]) == 1


def test_a_directory_that_others_may_write_to_from_now_on_keeps_the_last_view(
    cards: Path, reader: Reader
) -> None:
    put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    cards.chmod(0o777)
    put(cards, make_card("stranger"))
    assert reader.wait(2 * LEASE_S) == []
    (cards / "stranger.i0.json").unlink()
    cards.chmod(0o700)
    assert reader.look() == []


def test_a_removed_directory_is_an_empty_one_until_it_is_there_again(
    cards: Path, reader: Reader
) -> None:
    put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    shutil.rmtree(cards)
    assert reader.look() == [gone(make_card())]
    assert reader.wait(2) == []
    cards.mkdir(0o700)
    put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]


# Odd entries


def a_directory(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_link_to_a_card(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(make_card("odd").to_json())
    path.symlink_to(target)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path.relative_to(Path.cwd())) if len(str(path)) > 100 else str(path))


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def a_file_that_others_may_write(path: Path) -> None:
    path.write_bytes(make_card("odd").to_json())
    path.chmod(0o666)


ODD: list[Callable[[Path], None]] = [
    a_directory,
    a_loop,
    a_link_to_a_card,
    a_pipe,
    a_socket,
    a_huge_file,
    a_file_that_others_may_write,
]


@pytest.mark.parametrize("name", ["odd.i0.json", "x.json", "...json", "a b.i0.json", "é.i0.json"])
@pytest.mark.parametrize("make", ODD)
def test_an_odd_entry_is_skipped_and_said_once(
    cards: Path,
    reader: Reader,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
    name: str,
) -> None:
    if name.startswith("."):
        name = "x" + name
    before = sum(counted(reason) for reason in ("name", "kind", "unreadable", "size", "owner"))
    make(cards / name)
    card = make_card()
    put(cards, card)
    assert reader.look() == [CardPresent(card)]
    assert reader.wait(5) == []
    after = sum(counted(reason) for reason in ("name", "kind", "unreadable", "size", "owner"))
    assert after == before + 1
    assert len([one for one in caplog.records if "is skipped" in one.message]) == 1
    # A watcher that begins with it does as well.
    other = Reader(cards)
    assert other.look() == []


def test_a_name_that_is_no_text_is_skipped(cards: Path, reader: Reader) -> None:
    Path(os.fsdecode(os.fsencode(cards) + b"/\xff.i0.json")).touch()
    put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]


def test_a_card_that_can_not_be_opened_keeps_its_lease_and_no_other_suffers(
    cards: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, healthy = put(cards, make_card("stale")), put(cards, make_card("healthy"))
    assert len(reader.look()) == 2
    real = os.open

    def opens(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == stale.name:
            raise OSError(116, os.strerror(116))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opens)
    changes = []
    for _ in range(int(LEASE_S) + 2):
        touch(healthy)
        touch(stale)
        changes += reader.wait(1)
    assert changes == [gone(make_card("stale"))]
    monkeypatch.undo()
    assert reader.look() == [CardPresent(make_card("stale"))]


def test_of_more_files_than_there_is_room_for_those_that_are_known_stay(
    cards: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watcher_module, "MAX_CARDS", 3)
    known = put(cards, make_card("known"))
    assert reader.look() == [CardPresent(make_card("known"))]
    before = counted("size")
    paths = [put(cards, make_card(f"a{number}")) for number in range(50)]
    assert len(reader.look(0.25)) == 2
    for _ in range(3):
        assert reader.look(0.25) == []
    assert counted("size") == before + 1
    assert sum("no room" in record.message for record in caplog.records) == 1
    for path in paths:
        path.unlink()
    put(cards, make_card("late"))
    touch(known)
    assert {type(change) for change in reader.look(0.25)} == {CardGone}
    assert reader.look(0.25) == [CardPresent(make_card("late"))]


def test_large_cards_share_a_limit(
    cards: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [make_card(f"w{number}", supported_tasks=["x" * 10_000] * 10) for number in range(5)]
    monkeypatch.setattr(watcher_module, "MAX_CARD_BYTES_IN_ALL", 250_000)
    for card in large:
        put(cards, card)
    assert len(reader.look()) == 2
    put(cards, make_card("small"))
    assert reader.look() == [CardPresent(make_card("small"))]


async def test_looking_leaves_no_handle_open(cards: Path, reader: Reader) -> None:
    for number, make in enumerate(ODD):
        make(cards / f"odd{number}.i0.json")
    put(cards, make_card())
    before = open_files()
    reader.wait(5)
    assert {n for n, path in open_files().items() if str(cards) in str(path)} <= set(before)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", make_card("somebody-else").to_json(), make_card(incarnation="i9").to_json()],
)
def test_a_malformed_card_is_counted_once_and_hides_no_other(
    cards: Path, reader: Reader, content: bytes
) -> None:
    before = DISCOVERY_ERRORS.labels("malformed")._value.get()
    path = cards / "w1.i0.json"
    path.write_bytes(content)
    (refused,) = reader.look()
    assert isinstance(refused, CardRefused) and refused.worker_id == "w1"
    assert isinstance(refused.error, CardError)
    for _ in range(50):
        touch(path)  # it is renewed like any other
        assert reader.wait(1) == []
    put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    assert DISCOVERY_ERRORS.labels("malformed")._value.get() == before + 1
    path.unlink()
    assert reader.look() == [CardGone(WorkerId("w1"), Incarnation("i0"))]


def test_a_card_that_gets_damaged_is_believed_until_its_lease_ends(
    cards: Path, reader: Reader
) -> None:
    path = put(cards, make_card())
    assert reader.look() == [CardPresent(make_card())]
    path.write_bytes(b"damaged")
    assert reader.wait(LEASE_S) == []
    put(cards, make_card())
    assert reader.look() == []
    path.write_bytes(b"damaged")
    assert reader.wait(LEASE_S + 1) == [gone(make_card())]


# Keys


@pytest.fixture
def key(tmp_path: Path) -> FleetKey:
    new(tmp_path / "key")
    return FleetKey.read(tmp_path / "key")


async def test_with_a_key_only_cards_with_its_mac_are_taken(
    cards: Path, tmp_path: Path, key: FleetKey
) -> None:
    new(tmp_path / "other")
    other = FleetKey.read(tmp_path / "other")
    reader = Reader(cards, key)
    assert reader.look() == []
    good = make_card("good", fleet_key=key.fingerprint)
    async with (
        FileCardPublisher(cards, key) as ours,
        FileCardPublisher(cards, other) as theirs,
        FileCardPublisher(cards) as nobodys,
    ):
        await ours.publish(good)
        await theirs.publish(make_card("wrong", fleet_key=key.fingerprint))
        await nobodys.publish(make_card("without", fleet_key=key.fingerprint))
        changes = reader.look()
    assert CardPresent(good) in changes
    refused = {str(c.worker_id): c.error for c in changes if isinstance(c, CardRefused)}
    assert len(changes) == 3 and refused.keys() == {"wrong", "without"}
    assert all(isinstance(error, CardKeyError) for error in refused.values())
    assert "no MAC" in str(refused["without"]) and "--fleet-key-file" in str(refused["wrong"])


# Publishing


async def test_only_the_owner_can_read_a_card(tmp_path: Path) -> None:
    directory = tmp_path / "cards"
    async with FileCardPublisher(directory) as publisher:
        await publisher.publish(make_card())
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("harm", ["removed", "changed", "emptied", "replaced by a link"])
async def test_a_harmed_card_is_written_again_as_it_was(cards: Path, harm: str) -> None:
    card = make_card()
    before = counted("lost")
    async with FileCardPublisher(cards, renew_s=RENEW_S) as publisher:
        await publisher.publish(card)
        path = path_of(cards, card)
        if harm in ("removed", "replaced by a link"):
            path.unlink()
        if harm == "changed":
            path.write_bytes(make_card("w0", request_endpoint="tcp://127.0.0.1:666").to_json())
        if harm == "emptied":
            os.truncate(path, 0)
        if harm == "replaced by a link":
            path.symlink_to("/etc/hostname")
        await until(lambda: counted("lost") > before)
        assert path.read_bytes() == card.to_json() and not path.is_symlink()


async def test_what_can_not_be_said_now_is_said_with_the_next_renewal(cards: Path) -> None:
    draining = make_card(state=WorkerState.DRAINING)
    async with FileCardPublisher(cards, renew_s=RENEW_S) as publisher:
        await publisher.publish(make_card())
        cards.chmod(0o777)  # noqa: ASYNC240  # a test
        with pytest.raises(DiscoveryError, match="can't be trusted"):
            await publisher.publish(draining)
        cards.chmod(0o700)  # noqa: ASYNC240  # a test
        await until(lambda: path_of(cards, draining).read_bytes() == draining.to_json())


async def test_a_renewal_that_fails_is_tried_again(
    cards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counted("renewal")
    async with FileCardPublisher(cards, renew_s=RENEW_S) as publisher:
        await publisher.publish(make_card())
        with monkeypatch.context() as patch:
            patch.setattr(files, "open_private", raises(OSError(24, "Too many open files")))
            await until(lambda: counted("renewal") > before + 2)
        path = path_of(cards, make_card())
        path.unlink()
        await until(path.exists)


def raises(error: Exception) -> Callable[..., int]:
    def fails(*_: Any, **__: Any) -> int:
        raise error

    return fails


async def test_a_pipe_in_the_way_of_a_new_card_is_not_waited_for(cards: Path) -> None:
    card = make_card()
    async with FileCardPublisher(cards, renew_s=RENEW_S) as publisher:
        await publisher.publish(card)
        path = path_of(cards, card)
        os.mkfifo(cards / f".{path.name}.new")
        path.unlink()
        await until(path.exists)


async def test_a_working_directory_that_was_removed_hides_no_card(
    cards: Path, reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "release-1"
    here.mkdir()
    monkeypatch.chdir(here)
    async with FileCardPublisher(cards, renew_s=RENEW_S) as publisher:
        await publisher.publish(make_card())
        assert reader.look() == [CardPresent(make_card())]
        here.rmdir()
        assert reader.look() == []
        path = path_of(cards, make_card())
        path.unlink()
        await until(path.exists)  # written again


async def test_files_of_the_dead_are_removed_and_nobody_elses(cards: Path) -> None:
    dead = put(cards, make_card("dead"))
    unfinished = cards / f".{dead.name}.new"
    unfinished.touch()
    (cards / "notes.txt").touch()
    (cards / "x.json").mkdir()
    living = make_card("living")
    async with (
        FileCardPublisher(cards, renew_s=RENEW_S) as other,
        FileCardPublisher(cards, renew_s=RENEW_S, sweep_s=10 * RENEW_S) as publisher,
    ):
        await other.publish(living)
        await publisher.publish(make_card())
        await until(lambda: not dead.exists() and not unfinished.exists())
        # A sweep may also meet a worker that stood still; it writes its card again.
        await until(path_of(cards, living).exists)
        assert (cards / "notes.txt").exists() and (cards / "x.json").exists()


@pytest.mark.parametrize("worker_id", ["../elsewhere", "", ".w0", "a b", "x" * 200, "a\nb"])
async def test_a_name_that_leaves_the_directory_is_refused(tmp_path: Path, worker_id: str) -> None:
    with pytest.raises(DiscoveryError, match="can't name a file"):
        # Some of these no card would have; whoever publishes does not rely on that.
        card = make_card().model_copy(update={"worker_id": worker_id})
        await FileCardPublisher(tmp_path).publish(card)


async def test_an_unwritable_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiscoveryError, match="can't be written"):
        await FileCardPublisher(tmp_path / "file").publish(make_card())
    async with watching(PollingWatcher(CardDirectory(tmp_path / "file"), None)) as changes:
        with pytest.raises(DiscoveryError, match="no cards can be read"):
            await changes.next()


async def test_withdrawing_never_raises(cards: Path) -> None:
    publisher = FileCardPublisher(cards)
    await publisher.withdraw()
    publisher = FileCardPublisher(cards)
    await publisher.publish(make_card())
    cards.chmod(0o777)  # noqa: ASYNC240  # a test
    await publisher.withdraw()
    await publisher.withdraw()
