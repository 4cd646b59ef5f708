"""Which directories are trusted, and that no link leads elsewhere."""

import os
import stat
from pathlib import Path

import pytest

from common.discovery.file import CardDirectory, FileCardPublisher
from common.discovery.file.files import open_private
from common.discovery.watcher import PollingWatcher
from common.errors import DiscoveryError
from tests.fakes.cards import make_card
from tests.open_files import open_files
from tests.unit.common.discovery.contract import watching

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give things away")


def opened(path: Path, *, create: bool = False) -> Path:
    """Where the descriptor leads."""
    before = open_files()
    descriptor = open_private(path, create=create)
    try:
        assert set(open_files()) - set(before) == {str(descriptor)}
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    finally:
        os.close(descriptor)


def refused(path: Path, match: str = "can't be trusted") -> None:
    before = set(open_files())
    with pytest.raises(DiscoveryError, match=match):
        open_private(path, create=True)
    assert set(open_files()) == before


def test_a_directory_of_our_own(tmp_path: Path) -> None:
    assert opened(tmp_path) == tmp_path
    assert opened(tmp_path / "." / "..", create=False) == tmp_path.parent


def test_what_is_missing_is_made_for_us_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_private(tmp_path / "a", create=False)
    assert opened(tmp_path / "a" / "b", create=True) == tmp_path / "a" / "b"
    for made in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702, 0o720, 0o770, 0o1770])
async def test_a_directory_that_others_can_write_is_not_trusted(tmp_path: Path, mode: int) -> None:
    cards = tmp_path / "cards"
    cards.mkdir()
    cards.chmod(mode)
    refused(cards, "with mode")
    with pytest.raises(DiscoveryError, match="--discovery"):
        await FileCardPublisher(cards).publish(make_card())
    assert not any(cards.iterdir())  # a test
    async with watching(PollingWatcher(CardDirectory(cards), None)) as changes:
        with pytest.raises(DiscoveryError, match="can't be trusted"):
            await changes.next()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_nor_is_one_that_others_can_put_another_in_place_of(tmp_path: Path, mode: int) -> None:
    cards = tmp_path / "shared" / "cards"
    cards.mkdir(mode=0o700, parents=True)
    cards.parent.chmod(mode)
    refused(cards)
    cards.parent.chmod(0o1777)  # as /tmp: others can't touch what is ours
    assert opened(cards) == cards


@as_root
def test_nor_is_one_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "cards").mkdir(mode=0o700, parents=True)
    os.chown(theirs / "cards", 12345, 12345)
    refused(theirs / "cards", "belongs to user 12345")
    os.chown(theirs / "cards", 0, 0)
    os.chown(theirs, 12345, 12345)
    refused(theirs / "cards", "belongs to user 12345")


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    refused(tmp_path / "link", "symbolic link")
    (tmp_path / "dangling").symlink_to("nowhere")
    refused(tmp_path / "dangling", "symbolic link")
    assert not (tmp_path / "nowhere").exists()


def test_links_of_our_own_on_the_way_are(tmp_path: Path) -> None:
    cards = tmp_path / "real" / "cards"
    cards.mkdir(mode=0o700, parents=True)
    (tmp_path / "relative").symlink_to("real")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    (tmp_path / "real" / "up").symlink_to("../real")
    for name in ("relative", "absolute", "real/up", "relative/up/up"):
        assert opened(tmp_path / name / "cards") == cards
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "loop" / "cards", create=True)


@as_root
def test_links_of_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "real" / "cards").mkdir(mode=0o700, parents=True)
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    refused(tmp_path / "link" / "cards", "symbolic link of user 12345")


def test_where_a_link_leads_is_checked_too(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "cards").mkdir(mode=0o700, parents=True)
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared)
    refused(tmp_path / "link" / "cards")
