"""Frontends, workers and etcd on hosts of their own."""

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from common.card import WorkerCard
from common.discovery.seal import unseal
from common.fleet_key import FleetKey
from tests.e2e.hosts import Host
from tests.e2e.processes import ENGINE_FLAGS, SERVER_FLAGS, START_TIMEOUT_S, Process
from tests.fakes.etcd import EtcdMember

WALL_CLOCK = Path(__file__).parents[1] / "fakes" / "wall_clock.c"


@dataclass(frozen=True)
class Site:
    """What all processes of a fleet are told.

    Attributes:
        name: below which cards lie in etcd.
        key: the fleet's key file.
        directory: for logs and Unix sockets.
    """

    name: str
    model: Path
    etcd: EtcdMember
    key: Path
    directory: Path

    @property
    def flags(self) -> list[str]:
        discovery = f"--discovery=etcd://{self.etcd.endpoint}/{self.name}"
        return [discovery, f"--fleet-key-file={self.key}"]

    def published(self, worker_id: str) -> list[str]:
        """Keys of a worker's cards."""
        keys = self.etcd.control("get", "--prefix", "--keys-only", f"/{self.name}/{worker_id}/")
        return keys.split()

    def card(self, worker_id: str) -> WorkerCard:
        """The card of a worker, as it lies in etcd."""
        prefix = f"/{self.name}/{worker_id}/"
        sealed = self.etcd.control("get", "--prefix", "--print-value-only", prefix)
        return unseal(sealed.strip().encode(), FleetKey.read(self.key))

    def worker(
        self,
        host: Host,
        *flags: str,
        module: str = "tests.fakes.lettered_worker",
        env: Mapping[str, str] = {},
    ) -> Process:
        """A worker that is called as its host is."""
        command = [
            *host.within, sys.executable, "-m", module,
            f"--model={self.model}", f"--worker-id={host.name}", f"--worker-host={host.address}",
            *self.flags, *ENGINE_FLAGS, SERVER_FLAGS[-1], *flags,
        ]  # fmt: skip
        log = self.directory / f"{host.name}-{host.address}.log"
        return Process(host.name, command, log, **env)

    def frontend(self, host: Host, name: str, *flags: str) -> "FarFrontend":
        path = self.directory / f"{name}.sock"
        command = [
            *host.within, sys.executable, "-m", "frontend",
            f"--uds={path}", "--mm-arena-gb=0.25",
            *self.flags, *SERVER_FLAGS[:-1], *flags,
        ]  # fmt: skip
        return FarFrontend(name, host, command, self.directory / f"{name}.log", path)


class FarFrontend(Process):
    """A frontend that is asked over a Unix socket, which leads to any host."""

    def __init__(self, name: str, host: Host, command: list[str], log: Path, path: Path) -> None:
        super().__init__(name, command, log)
        self.host = host
        self._path = path
        transport = httpx.HTTPTransport(uds=str(path))
        self.http = httpx.Client(transport=transport, base_url="http://frontend", timeout=120)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Its view of the workers by id."""
        reply = self.http.get("/mmrouter/workers")
        reply.raise_for_status()
        return {view["worker_id"]: view for view in reply.json()}

    def exact(self) -> set[str]:
        """Ids of workers that are connected and whose caches are known."""
        return {
            name
            for name, view in self.workers().items()
            if view["connected"] and {rank["index"] for rank in view["ranks"]} == {"exact"}
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def decision(self, response_id: str) -> dict[str, Any]:
        """What the router decided on a response."""
        query = {"request_id": response_id}
        (decision,) = self.http.get("/mmrouter/decisions", params=query).json()
        return dict(decision)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds, also while this one is not there yet."""
        deadline = time.monotonic() + START_TIMEOUT_S
        seen: object = None
        while time.monotonic() < deadline:
            self.check_alive()
            with contextlib.suppress(httpx.HTTPError, KeyError):
                if self._listens():
                    if condition():
                        return
                    seen = self.workers()
            time.sleep(0.1)
        raise AssertionError(f"{self.name} sees {seen}:\n{self.tail()}")

    def _listens(self) -> bool:
        # httpx leaves a socket open that could not be connected.
        with socket.socket(socket.AF_UNIX) as attempt:
            return attempt.connect_ex(str(self._path)) == 0

    def stop(self) -> None:
        self.http.close()
        super().stop()


def wrong_clock(directory: Path, seconds: int) -> dict[str, str]:
    """The environment of a process whose clock on the wall is off; empty without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return {}
    library = directory / "wall_clock.so"
    if not library.exists():
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(WALL_CLOCK), "-ldl"]
        subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library), "WALL_CLOCK_OFF": str(seconds)}


@contextlib.contextmanager
def etcd_on(host: Host, directory: Path) -> Iterator[EtcdMember]:
    """A server that the other hosts reach."""
    member = EtcdMember("far", directory, address=host.address, within=host.within)
    try:
        member.start()
        yield member
    finally:
        member.kill()


@contextlib.contextmanager
def stranger(host: Host, key: str, *endpoints: str) -> Iterator[list[int]]:
    """Somebody who asks and listens at a worker's endpoints meanwhile.

    Args:
        key: file of his key, or ``none``.

    Yields:
        How many messages came from each endpoint; empty until the end.
    """
    command = [*host.within, sys.executable, "-m", "tests.fakes.stranger", key, *endpoints]
    counts: list[int] = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield counts
        said, _ = process.communicate(timeout=60)
        counts += map(int, said.split())
