"""Files are read below one directory, and nothing else is."""

import os
from pathlib import Path

import pytest
from yarl import URL

from frontend.fetch.local_file import read_local_file
from frontend.media_limits.policy import MediaError, RefusedError, TooLargeError, UnfetchableError
from tests.open_files import open_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with files, beside one with a secret."""
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "open" / "deep" / "a b.png").write_bytes(b"picture")
    (tmp_path / "open" / "x.png").write_bytes(b"picture")
    (tmp_path / "open-not").mkdir()
    (tmp_path / "open-not" / "secret").write_bytes(b"secret")
    return tmp_path / "open"


def read(url: str, root: Path | None, max_bytes: int = 100) -> bytes:
    return read_local_file(URL(url), root, max_bytes).data


def open_below(root: Path) -> list[Path]:
    """What this process has open there."""
    return [path for path in open_files().values() if path.is_relative_to(root)]


def test_files_below_the_root(root: Path) -> None:
    for url in (
        f"file://{root}/x.png",
        f"FILE://{root}/x.png",
        f"file://localhost{root}/x.png",
        f"file://{root}/deep/../x.png",
        f"file://{root}//x.png",
        f"file://{root}/deep/a%20b.png",
        f"file://{root}/deep/a b.png",
        f"file://{root}/x.png?query#part",
    ):
        assert read(url, root) == b"picture"


def test_no_files_without_a_root(root: Path) -> None:
    with pytest.raises(RefusedError, match="--allowed-local-media-path"):
        read(f"file://{root}/x.png", None)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file://ROOT/../open-not/secret",
        "file://ROOT/%2e%2e/open-not/secret",
        "file://ROOT/..%2fopen-not%2fsecret",
        "file://ROOT-not/secret",
        "file://ROOT/deep/../../open-not/secret",
        "file://ROOT",
        "file://ROOT/",
        "file://ROOT/.",
        "file:///proc/self/environ",
        "file:///nowhere/at/all",
        "file:relative",
        "file:x.png",
        "file://",
        "file://elsewhereROOT/x.png",
        "file://127.0.0.1ROOT/x.png",
        "file://ROOT/x.png%00.jpg",
    ],
)
def test_nothing_else(root: Path, url: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read(url.replace("ROOT", str(root)), root)
    assert str(root) not in caught.value.reason


def test_links_are_followed_within_the_root(root: Path) -> None:
    (root / "inside").symlink_to(root / "deep" / "a b.png")
    (root / "folder").symlink_to("deep")
    assert read(f"file://{root}/inside", root) == b"picture"
    assert read(f"file://{root}/folder/a b.png", root) == b"picture"


def test_links_are_not_followed_out_of_it(root: Path) -> None:
    (root / "outside").symlink_to(root.parent / "open-not" / "secret")
    (root / "folder").symlink_to(root.parent / "open-not")
    for name in ("outside", "folder/secret"):
        with pytest.raises(RefusedError):
            read(f"file://{root}/{name}", root)


@pytest.mark.parametrize("name", ["x.png", "deep/a b.png"])
def test_a_link_put_in_place_after_the_check(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever step is exchanged, the file opened is not the secret."""
    secret = root.parent / "open-not" / "secret"
    resolve = os.path.realpath

    def resolve_then_exchange(path: str) -> str:
        resolved = resolve(path)
        step = root / name.split("/")[0]
        if step.is_dir():
            step.rename(root / "moved")
            step.symlink_to(secret.parent)
            (secret.parent / "a b.png").write_bytes(b"secret")
        else:
            step.unlink()
            step.symlink_to(secret)
        return resolved

    monkeypatch.setattr(os.path, "realpath", resolve_then_exchange)
    with pytest.raises(UnfetchableError, match="no such file"):
        read(f"file://{root}/{name}", root)


def test_what_is_no_file(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to(root / "loop")
    (root / "dead").symlink_to(root / "nowhere")
    for name in ("pipe", "deep", "nothing", "x.png/below", "loop", "dead", "a" * 300):
        with pytest.raises(MediaError) as caught:
            read(f"file://{root}/{name}", root)
        assert isinstance(caught.value, UnfetchableError)
        assert str(root) not in caught.value.reason


def test_size(root: Path) -> None:
    assert read(f"file://{root}/x.png", root, 7) == b"picture"
    with pytest.raises(TooLargeError):
        read(f"file://{root}/x.png", root, 6)


def test_descriptors_are_closed(root: Path) -> None:
    with (root / "x.png").open():
        assert open_below(root) == [root / "x.png"]
    read(f"file://{root}/deep/a b.png", root)
    for name in ("deep/none", "deep"):
        with pytest.raises(UnfetchableError):
            read(f"file://{root}/{name}", root)
    assert not open_below(root)
