"""Read files below the one directory that an operator opened to requests."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from yarl import URL

from frontend.fetch.allowance import HeldBytes
from frontend.fetch.content import Content
from frontend.media_limits import RefusedError, TooLargeError, UnfetchableError

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking, or a named pipe would hold the thread forever.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def read_local_file(
    url: URL, root: Path | None, max_bytes: int, held: HeldBytes | None = None
) -> Content:
    """Read a ``file:`` URL. Blocks.

    Symbolic links are followed if they end below the root, which is resolved already (None if no
    files may be read). Their target is then opened step by step without following links, so a race
    by exchanging one only fails.

    Raises:
        RefusedError: the file is not allowed, or more bytes than may be held.
        OverloadedError: no room for it now.
        UnfetchableError: it does not exist, can't be read or is too large.
    """
    if root is None:
        raise RefusedError("local files are not read (see --allowed-local-media-path)")
    if url.raw_host not in (None, "", "localhost") or "\0" in url.path:
        raise RefusedError("its path is malformed")
    try:
        steps = Path(os.path.realpath(url.path)).relative_to(root).parts
    except ValueError:
        steps = ()
    if not url.path.startswith("/") or not steps:
        raise RefusedError("it is outside the directory of --allowed-local-media-path")
    try:
        return Content.of(_read(root, steps, max_bytes, held))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise _no_such_file() from error
        raise UnfetchableError("the file can't be read", "file") from error


def _read(root: Path, steps: tuple[str, ...], max_bytes: int, held: HeldBytes | None) -> bytes:
    with contextlib.ExitStack() as opened:

        def keep(descriptor: int) -> int:
            opened.callback(os.close, descriptor)
            return descriptor

        here = keep(os.open(root, _OPEN_DIRECTORY))
        for step in steps[:-1]:
            here = keep(os.open(step, _OPEN_DIRECTORY, dir_fd=here))
        descriptor = keep(os.open(steps[-1], _OPEN_FILE, dir_fd=here))
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _no_such_file()
        if found.st_size > max_bytes:
            raise TooLargeError(max_bytes)
        if held is not None:
            held.grow(found.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(found.st_size + 1)  # it may have grown
    if len(data) > found.st_size:
        raise UnfetchableError("the file is being written to", "file")
    return data


def _no_such_file() -> UnfetchableError:
    return UnfetchableError("there is no such file", "file")
