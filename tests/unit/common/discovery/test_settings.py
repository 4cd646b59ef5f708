import argparse
import os
import tempfile
from pathlib import Path

import pytest

from common.discovery.file import FileCardPublisher, FileDiscovery
from common.discovery.settings import (
    DiscoverySettings,
    check_place,
    default_discovery_dir,
)
from common.errors import DiscoveryError
from tests.fakes.cards import make_card


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that everybody may write to, and no runtime directory."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(shared))
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return shared


USER = os.geteuid()


def test_the_runtime_directory_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert default_discovery_dir() == runtime / "mmrouter"


@pytest.mark.parametrize("value", ["", "relative", "/nowhere/at/all", "/etc/hostname", "{theirs}"])
def test_else_a_directory_named_after_the_user(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    user = USER + 4_000_000  # who has no /run/user, and to whom nothing here belongs
    monkeypatch.setattr(os, "geteuid", lambda: user)
    (tmp_path / "theirs").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", value.format(theirs=tmp_path / "theirs"))
    assert default_discovery_dir() == temporary / f"mmrouter-{user}"


async def test_one_that_somebody_else_made_first_is_refused(temporary: Path) -> None:
    name = temporary / f"mmrouter-{USER}"
    name.mkdir()
    name.chmod(0o777)
    with pytest.raises(DiscoveryError, match="--discovery"):
        await FileCardPublisher(name).publish(make_card())
    name.rmdir()
    name.symlink_to(temporary.parent)
    with pytest.raises(DiscoveryError, match="--discovery"):
        await FileCardPublisher(name).publish(make_card())
    name.unlink()
    async with FileCardPublisher(name) as publisher:
        await publisher.publish(make_card())
        assert name.stat().st_mode & 0o777 == 0o700


def discovered(*argv: str) -> str:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    DiscoverySettings.add_arguments(parser)
    found = DiscoverySettings.from_args(parser.parse_args(argv)).open()
    assert isinstance(found, FileDiscovery)
    return str(found)


def test_where_cards_are_is_a_url_or_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    default = str(default_discovery_dir())
    assert discovered() == default
    assert discovered("--discovery", "file:///a%20b") == "/a b"
    assert discovered("--discovery", "here") == "here"
    monkeypatch.setenv("MMROUTER_DISCOVERY", "file:///environment")
    assert discovered() == "/environment"
    assert discovered("--discovery", "file:///flag") == "/flag"
    monkeypatch.setenv("MMROUTER_DISCOVERY", "/other")
    assert discovered() == "/other"
    assert discovered("--discovery", "/flag") == "/flag"
    monkeypatch.setenv("MMROUTER_DISCOVERY", "")
    assert discovered() == default


def test_a_directory_that_was_named_must_be_there_and_the_default_need_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    DiscoverySettings.add_arguments(parser)

    def opened(*argv: str) -> Path:
        found = DiscoverySettings.from_args(parser.parse_args(argv)).open()
        check_place(found)
        assert isinstance(found, FileDiscovery)
        return found.directory

    default = default_discovery_dir()
    assert not default.exists()
    assert opened() == opened("--discovery", str(default)) == default
    assert opened("--discovery", str(tmp_path)) == tmp_path
    slip = tmp_path / "card s"
    for argv in (("--discovery", str(slip)), ("--discovery", slip.as_uri())):
        with pytest.raises(DiscoveryError, match=f"make it with `mkdir -p -m 700 '{slip}'`"):
            opened(*argv)
    monkeypatch.setenv("MMROUTER_DISCOVERY", str(slip))
    with pytest.raises(DiscoveryError, match="there is no directory"):
        opened()
    assert not slip.exists()
