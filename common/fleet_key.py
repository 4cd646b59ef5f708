"""The fleet key: one secret file by which workers and frontends trust each other.

``mmrouter fleet-key new PATH`` makes one. ``fleet_sockets.py`` applies it to sockets.
"""

import argparse
import hashlib
import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import zmq
from zmq.utils import z85

from common.errors import ConfigurationError

_SEED_BYTES: Final = 32
_HEADER: Final = (
    "# The key of an mmrouter fleet. Whoever can read it can pose as a worker or a frontend.\n"
)


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair; both halves in Z85, 40 bytes."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class FleetKey:
    """Keys derived from the file's 32 bytes.

    Attributes:
        worker: of all sockets that are connected to.
        frontend: of all sockets that connect; workers accept no other.
        cards: authenticates cards, 32 bytes.
    """

    worker: KeyPair
    frontend: KeyPair
    cards: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a key file. Raises ConfigurationError: it is unreadable, open to others or holds no
        key, or libzmq has no CURVE."""
        if not zmq.has("curve"):
            raise ConfigurationError("this build of libzmq has no CURVE, so no fleet key can work")
        words, mode = read_lines(path, "the fleet key")
        # The group may read: Kubernetes mounts secrets like that for an unprivileged user.
        if mode & 0o027:
            raise ConfigurationError(
                f"the fleet key {path} is open to other users (mode {mode & 0o777:o}): "
                f"chmod 600 {path}"
            )
        try:
            (word,) = words
            seed = bytes.fromhex(word)
            if len(seed) != _SEED_BYTES:
                raise ValueError
        except ValueError:
            # Without the cause: it would show what may be a mistyped secret.
            raise ConfigurationError(
                f"{path} holds no fleet key; make one with: mmrouter fleet-key new PATH"
            ) from None
        return cls(
            _derive(seed, b"worker"), _derive(seed, b"frontend"), cards=_secret(seed, b"cards")
        )

    @property
    def fingerprint(self) -> str:
        """Identifies the key without revealing it."""
        return hashlib.sha256(self.worker.public + self.frontend.public).hexdigest()[:16]


def read_lines(path: Path, what: str) -> tuple[list[str], int]:
    """Return the lines of a key file without empty ones and comments, and its mode. Raises
    ConfigurationError: it can't be read."""
    try:
        lines, mode = map(str.strip, path.read_text().splitlines()), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} {path} can't be read: {error}") from error
    return [line for line in lines if line and not line.startswith("#")], mode


def new(path: Path) -> None:
    """Write a new key, readable by this user alone. Raises ConfigurationError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(_HEADER + secrets.token_hex(_SEED_BYTES) + "\n")
    except OSError as error:
        raise ConfigurationError(f"no fleet key was written to {path}: {error}") from error


def _derive(seed: bytes, role: bytes) -> KeyPair:
    # Any 32 bytes are a secret key of CURVE.
    secret = z85.encode(_secret(seed, role))
    return KeyPair(zmq.curve_public(secret), secret)


def _secret(seed: bytes, role: bytes) -> bytes:
    return hashlib.blake2b(role, key=seed, digest_size=_SEED_BYTES).digest()


def main() -> None:
    """Command line. Exit status 1 and a message if no key was written."""
    parser = argparse.ArgumentParser(
        prog="mmrouter fleet-key",
        description="Make the key that encrypts and authenticates traffic within a fleet.",
    )
    commands = parser.add_subparsers(required=True, metavar="new PATH")
    commands.add_parser("new", help="make a key").add_argument("path", type=Path)
    path: Path = parser.parse_args().path
    try:
        new(path)
    except ConfigurationError as error:
        sys.exit(str(error))
    print(f"{path}: give it to every worker and frontend with --fleet-key-file")


if __name__ == "__main__":
    main()
