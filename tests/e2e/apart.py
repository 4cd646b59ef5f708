"""Frontends, workers and etcd on hosts of their own."""

import contextlib
import itertools
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common import fleet_key
from common.discovery.sealed_cards import unseal
from common.fleet_key import FleetKey
from common.identity import Incarnation
from common.request_plane.card import WorkerCard
from common.request_plane.protocol import PROTOCOL_VERSION, Hello, ToWorker
from common.request_plane.wire import Codec
from tests.e2e.hosts import Host, Lan, obstacle, open_lan
from tests.e2e.processes import ENGINE_FLAGS, SERVER_FLAGS, START_TIMEOUT_S, Process
from tests.fakes.etcd import BINARIES, NO_ETCD, EtcdMember

OBSTACLES = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
    pytest.mark.skipif(BINARIES is None, reason=NO_ETCD),
]
"""For all tests that need such hosts."""

WALL_CLOCK = Path(__file__).parents[1] / "fakes" / "wall_clock.c"


@dataclass(frozen=True)
class Site:
    """What all processes of a fleet are told.

    Attributes:
        name: below which cards lie in etcd.
        lan: the network.
        hosts: on it, by name; etcd is on ``store``.
        key: the fleet's key file.
        directory: for logs and Unix sockets.
    """

    name: str
    model: Path
    lan: Lan
    hosts: dict[str, Host]
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
        name: str,
        *flags: str,
        module: str = "tests.fakes.lettered_worker",
        env: Mapping[str, str] = {},
    ) -> Process:
        """A worker that is called as its host is."""
        host = self.hosts[name]
        command = [
            *host.within, sys.executable, "-m", module,
            f"--model={self.model}", f"--worker-id={host.name}", f"--worker-host={host.address}",
            *self.flags, *ENGINE_FLAGS, SERVER_FLAGS[-1], *flags,
        ]  # fmt: skip
        log = self.directory / f"{host.name}-{host.address}.log"
        return Process(host.name, command, log, **env)

    def frontend(self, name: str, *flags: str) -> "FarFrontend":
        """A frontend that is called as its host is."""
        host = self.hosts[name]
        path = self.directory / f"{name}.sock"
        command = [
            *host.within, sys.executable, "-m", "frontend",
            f"--uds={path}", "--mm-arena-gb=0.25",
            *self.flags, *SERVER_FLAGS[:-1], *flags,
        ]  # fmt: skip
        return FarFrontend(host, command, self.directory / f"{name}.log", path)


class FarFrontend(Process):
    """A frontend that is asked over a Unix socket, which leads to any host."""

    def __init__(self, host: Host, command: list[str], log: Path, path: Path) -> None:
        super().__init__(host.name, command, log)
        self.host = host
        self._path = path
        transport = httpx.HTTPTransport(uds=str(path))
        self.http = httpx.Client(transport=transport, base_url="http://frontend", timeout=120)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Its view of the workers by id."""
        reply = self.http.get("/mmrouter/workers")
        reply.raise_for_status()
        return {view["worker_id"]: view for view in reply.json() if view["ranks"]}

    def exact(self) -> set[str]:
        """Ids of workers that are connected and whose caches are known; none until it serves."""
        if self.http.get("/health").status_code != 200:
            return set()
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
def open_site(name: str, model: Path, directory: Path, hosts: Sequence[str]) -> Iterator[Site]:
    """Hosts, etcd on one of them, and a key that all have."""
    key = directory / "fleet.key"
    fleet_key.new(key)
    with open_lan() as lan:
        places = {each: lan.host(each) for each in ("store", *hosts)}
        store = places["store"]
        etcd = EtcdMember("far", directory, address=store.address, within=store.within)
        try:
            etcd.start()
            etcd.until_ready()
            yield Site(name, model, lan, places, etcd, key, directory)
        finally:
            etcd.kill()


def overheard(
    host: Host, card: WorkerCard, keys: Sequence[Path | None], meanwhile: Callable[[int], object]
) -> list[list[int]]:
    """What somebody gets who asks and listens at a worker's endpoints.

    Args:
        host: where he sits.
        keys: what he tries.
        meanwhile: makes events, called with 0, 1, 2 and so on until something came from everywhere
            with the last key.

    Returns:
        For each key, how many messages came from requests, events and replays.
    """
    (source,) = card.kv_event_sources
    hello = Codec(ToWorker).encode(Hello(PROTOCOL_VERSION, Incarnation("x"), b"{}"))
    command = [
        *host.within, sys.executable, "-m", "tests.fakes.stranger",
        card.request_endpoint, source.endpoint, str(source.replay_endpoint),
        ",".join(bytes(frame).hex() for frame in hello), *(str(key or "none") for key in keys),
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in itertools.count():
            if select.select([process.stdout], [], [], 0)[0]:
                break
            meanwhile(number)
        assert process.stdout.readline() == "heard\n"
        said, _ = process.communicate(timeout=60)
    return [list(map(int, line.split())) for line in said.splitlines()]
