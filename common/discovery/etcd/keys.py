"""How the keys of cards are called."""

import re
from typing import Final

from common.errors import DiscoveryError
from common.identity import Incarnation, WorkerId

_WORKER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_INCARNATION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def key_of(prefix: str, worker_id: WorkerId, incarnation: Incarnation) -> bytes:
    """The key of a card.

    Raises:
        DiscoveryError: the worker's id can't be part of one.
    """
    if not _WORKER_ID.fullmatch(worker_id) or not _INCARNATION.fullmatch(incarnation):
        raise DiscoveryError(
            f"worker id {worker_id!r} can't be part of a key: use letters, digits, '.', '_', '-'"
        )
    return f"{prefix}/{worker_id}/{incarnation}".encode()


def named_by(prefix: str, key: bytes) -> tuple[WorkerId, Incarnation] | None:
    """Whose card a key is for; None if it is not named as one."""
    rest = key.removeprefix(f"{prefix}/".encode())
    worker_id, _, incarnation = rest.decode(errors="replace").partition("/")
    if not _WORKER_ID.fullmatch(worker_id) or not _INCARNATION.fullmatch(incarnation):
        return None
    return WorkerId(worker_id), Incarnation(incarnation)
