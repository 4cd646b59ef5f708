"""What may lie in a discovery directory and is no card."""

import os
import random
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def _directory(path: Path, random_: random.Random) -> None:
    path.mkdir()
    (path / "inner.json").write_bytes(b"{}")


def _fifo(path: Path, random_: random.Random) -> None:
    os.mkfifo(path)


def _socket(path: Path, random_: random.Random) -> None:
    folder = os.open(path.parent, os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")  # addresses of sockets are short
    finally:
        os.close(folder)


def _loop(path: Path, random_: random.Random) -> None:
    path.symlink_to(path.name)


def _dangling(path: Path, random_: random.Random) -> None:
    path.symlink_to("nowhere.json")


def _endless(path: Path, random_: random.Random) -> None:
    path.symlink_to("/dev/zero")


def _huge(path: Path, random_: random.Random) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # no page of it exists


def _garbage(path: Path, random_: random.Random) -> None:
    path.write_bytes(random_.randbytes(4096))


def _empty(path: Path, random_: random.Random) -> None:
    path.touch()


def _half(path: Path, random_: random.Random) -> None:
    for card in path.parent.glob("*.json"):
        with suppress(OSError):
            if card.is_file() and card.stat().st_size < 1 << 20:
                path.write_bytes(card.read_bytes()[:-20])
                return


def _forbidden(path: Path, random_: random.Random) -> None:
    path.write_bytes(b"{}")
    path.chmod(0)


def _many(path: Path, random_: random.Random) -> None:
    for number in range(200):
        path.with_name(f"{path.stem}{number}.json").write_bytes(b"{}")


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    _directory,
    _fifo,
    _socket,
    _loop,
    _dangling,
    _endless,
    _huge,
    _garbage,
    _empty,
    _half,
    _forbidden,
    _many,
)


def lay(directory: Path, stem: str, random_: random.Random) -> None:
    """One of them, under a name that begins with the stem and may be that of a worker's card."""
    form = random_.choice(("{stem}.json", "{stem}.{incarnation:016x}.json"))
    name = form.format(stem=stem, incarnation=random_.getrandbits(64))
    random_.choice(KINDS)(directory / name, random_)


def clear(directory: Path, stem: str) -> None:
    """Take away what was laid under a stem."""
    for path in directory.glob(f"{stem}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
