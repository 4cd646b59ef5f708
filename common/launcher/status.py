"""``mmrouter status``: a table of the workers that a running frontend knows."""

import argparse
import os
import ssl
import sys
import time
from collections.abc import Sequence
from http.client import HTTPException, RemoteDisconnected
from pathlib import Path
from typing import Final, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import msgspec

from common.errors import ConfigurationError
from common.fleet_key import read_lines

_Answer = TypeVar("_Answer")

_TIMEOUT_S: Final = 10.0
_COLUMNS: Final = ("WORKER", "MODEL", "HEALTH", "RUNNING", "WAITING", "KV CACHE", "MEDIA", "VIA")


class _Rank(msgspec.Struct):
    busy: bool


class _Worker(msgspec.Struct):
    """Fields of ``/mmrouter/workers`` that are printed."""

    worker_id: str
    model: str
    state: str
    connected: bool
    gone_at: float | None
    gone_reason: str
    circuit: str
    circuit_reason: str
    drained: bool
    condition: str | None
    transport: str | None
    running: int | None
    waiting: int | None
    kv_usage: float | None
    media: int
    ranks: list[_Rank]

    @property
    def health(self) -> str:
        if self.gone_at is not None:
            passed = (time.time() - self.gone_at) / 60
            return f"{'left' if self.state == 'left' else 'lost'} {passed:.0f} min ago"
        if not self.connected:
            return "not connected"
        if self.drained:
            return "drained"
        if self.state != "ready":
            return "leaving"
        if self.condition not in (None, "serving"):
            return str(self.condition)
        if self.circuit != "closed":
            return f"ejected: {self.circuit_reason}" if self.circuit == "open" else "on trial"
        if not self.condition:
            return "joining"
        return "busy" if self.ranks and all(rank.busy for rank in self.ranks) else "healthy"

    @property
    def row(self) -> tuple[str, ...]:
        usage = "" if self.kv_usage is None else f"{self.kv_usage:.0%}"
        numbers = ("" if each is None else str(each) for each in (self.running, self.waiting))
        return (
            self.worker_id, self.model, self.health, *numbers, usage, str(self.media),
            self.transport or "",
        )  # fmt: skip


class _Refused(msgspec.Struct):
    """Fields of ``/mmrouter/workers/refused`` that are printed."""

    worker_id: str
    reason: str


def show_status(argv: Sequence[str]) -> int:
    """Print the table. Return 0 if a worker is healthy, 1 if none is, 2 if no frontend answered."""
    found = _parsed(argv)
    file = found.admin_key_file
    try:
        keys = [] if file is None else read_lines(file, "the admin keys in")[0]
        asking = _Asking(found.url, next(iter(keys), None), found.ca_file)
        workers = asking.get("/mmrouter/workers", list[_Worker])
        refused = asking.get("/mmrouter/workers/refused", list[_Refused])
    except HTTPError as error:
        print(_printable(f"{found.url} {_refusal(error, file)}"), file=sys.stderr)
        return 2
    except ConfigurationError as error:
        print(_printable(str(error)), file=sys.stderr)
        return 2
    except (OSError, HTTPException, ValueError, msgspec.DecodeError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        said = f"no frontend of mmrouter answers at {found.url}: {reason}"
        if isinstance(reason, ssl.SSLCertVerificationError):
            said = f"{found.url} can't be trusted: {reason.verify_message}; --ca-file names its CA"
        elif isinstance(reason, RemoteDisconnected):
            said += "; with --ssl-certfile a frontend is at https://"
        print(_printable(said), file=sys.stderr)
        return 2
    print(_table([_COLUMNS, *(each.row for each in workers)]) if workers else "no workers")
    for one in refused:
        reason = one.reason.removeprefix(f"worker {one.worker_id} refused: ")
        print(_printable(f"refused: {one.worker_id}: {reason}"))
    for each in workers:
        if each.gone_at is not None:
            print(_printable(f"{each.health}: {each.worker_id}: {each.gone_reason}"))
    return 0 if any(each.health in ("healthy", "busy") for each in workers) else 1


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "mmrouter status", description="Print the workers that a running frontend knows."
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the frontend (default %(default)s)"
    )
    parser.add_argument(
        "--admin-key-file",
        type=Path,
        default=os.environ.get("MMROUTER_ADMIN_KEY_FILE"),
        metavar="FILE",
        help="file whose first key is sent; needed where the frontend has one",
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", help="certificate that signed the frontend's, if not public"
    )
    return parser.parse_args(argv)


def _refusal(error: HTTPError, file: Path | None) -> str:
    if error.code in (401, 403) and file is not None:
        return f"refuses the first key of {file}: it must be one of the frontend's --admin-key-file"
    if error.code in (401, 403):
        return "needs a key: name a file with an admin key by --admin-key-file"
    return f"answers {error.code}: {error.read(2000).decode(errors='replace')}"


class _NoRedirects(HTTPRedirectHandler):
    """Send the admin key only to the named frontend; urllib would follow a redirect with it."""

    def redirect_request(self, *_: object) -> None:
        """See urllib."""


class _Asking:
    def __init__(self, url: str, key: str | None, ca_file: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError("a URL starts with http:// or https://")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # that of TLS is one
            raise ConfigurationError(f"--ca-file={ca_file} can't be used: {error}") from error
        self._opener = build_opener(HTTPSHandler(context=tls), _NoRedirects())

    def get(self, path: str, kind: type[_Answer]) -> _Answer:
        asked = Request(self._url + path, headers=self._headers)
        with self._opener.open(asked, timeout=_TIMEOUT_S) as answer:
            return msgspec.json.decode(answer.read(), type=kind)


def _table(rows: Sequence[Sequence[str]]) -> str:
    rows = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _printable(text: str) -> str:
    """Replace control characters: any peer may have written the text."""
    return "".join(each if each.isprintable() else "?" for each in text)


if __name__ == "__main__":
    sys.exit(show_status(sys.argv[1:]))
