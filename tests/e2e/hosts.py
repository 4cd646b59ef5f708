"""Hosts that are really apart, for tests: each has a network, a ``/dev/shm``, IPC objects and a
name of its own, and reaches the others over an Ethernet that a test can cut and slow down.

A host is a set of Linux namespaces. A process that waits for its standard input to end holds
them, so that everything goes when the test run does, however that ends: nothing is named
anywhere. The switch between them lives in a namespace as well, and the machine's own network is
neither used nor changed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

PREFIX = "10.77.0."
"""Addresses are of namespaces, so nobody else's."""

_NOWHERE = "02:00:00:00:00:00"
"""An Ethernet address that nobody has."""

_TOOLS = ("unshare", "nsenter", "mount", "hostname", "ip")

_HOLD = """
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
hostname "$0"
ip link set lo up
echo ready
exec cat
"""


class Host:
    """One host.

    Attributes:
        name: as it calls itself.
        address: where the others reach it; empty for the switch.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--ipc", "--propagation=private",
             "sh", "-e", "-c", _HOLD, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate()
            raise OSError(f"no namespaces can be made here: {said.strip()}")

    @property
    def pid(self) -> int:
        """Of a process on this host."""
        return self._holder.pid

    @property
    def within(self) -> tuple[str, ...]:
        """What to put before a command to run it here, in the same directory."""
        target = f"--target={self.pid}"
        return ("nsenter", target, "--net", "--mount", "--uts", "--ipc", f"--wdns={Path.cwd()}")

    def run(self, *command: str) -> str:
        """Run a command here; its output. Fails if that does."""
        done = subprocess.run(
            [*self.within, *command], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Let go of the namespaces. They end with the last process in them."""
        self._holder.communicate()


class Lan:
    """A switch, and the hosts that are plugged in."""

    def __init__(self) -> None:
        self._closing = contextlib.ExitStack()
        self._switch = self._made("switch")
        self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self._switch.run("ip", "link", "set", "dev", "bridge", "up")
        self._hosts: list[Host] = []
        self._addresses = 0

    def _made(self, name: str) -> Host:
        host = Host(name)
        self._closing.callback(host.close)
        return host

    def host(self, name: str) -> Host:
        """One more host. Its network device is called ``eth0``."""
        host = self._made(name)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._switch.run("ip", "link", "add", "name", name, *cable)
        self._switch.run("ip", "link", "set", "dev", name, "master", "bridge", "up")
        host.run("ip", "link", "set", "dev", "eth0", "up")
        self._hosts.append(host)
        self.move(host)
        return host

    def move(self, host: Host) -> None:
        """Give a host another address. The others are not told."""
        former = host.address
        self._addresses += 1
        host.address = f"{PREFIX}{self._addresses}"
        if former:  # first, since later ones of a network go with the first one
            host.run("ip", "address", "del", f"{former}/24", "dev", "eth0")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")

    @contextlib.contextmanager
    def cut(self, one: Host, *others: Host) -> Iterator[None]:
        """Meanwhile nothing gets from a host to others, or back: it is lost on the way, and
        neither end is told. Others are all that there are unless named.
        """
        apart = others or [host for host in self._hosts if host is not one]
        pairs = [pair for other in apart for pair in ((one, other), (other, one))]
        for here, there in pairs:
            here.run(
                "ip", "neigh", "replace", there.address, "lladdr", _NOWHERE, "dev", "eth0",
                "nud", "permanent",
            )  # fmt: skip
        try:
            yield
        finally:
            for here, there in pairs:
                here.run("ip", "neigh", "del", there.address, "dev", "eth0")

    @contextlib.contextmanager
    def slow(self, host: Host, delay_s: float, loss: float) -> Iterator[str]:
        """Meanwhile each packet from or to a host comes later, or doesn't come.

        Args:
            delay_s: how much later, in seconds, on each way.
            loss: fraction of packets that don't come.

        Yields:
            What does it: ``netem`` where the kernel has it, else ``relay``, a process in the
            place of the host's cable.
        """
        how = self._netem(host, delay_s, loss)
        with how or self._relay(host, delay_s, loss):
            yield "netem" if how else "relay"

    def _netem(self, host: Host, delay_s: float, loss: float) -> contextlib.ExitStack | None:
        """Both ends of the cable delayed by the kernel; None if it can't."""
        undo = contextlib.ExitStack()
        for place, device in ((self._switch, host.name), (host, "eth0")):
            queue = ("dev", device, "root", "netem")
            try:
                place.run(
                    "tc", "qdisc", "add", *queue, "delay", f"{delay_s * 1000:g}ms",
                    "loss", f"{loss * 100:g}%",
                )  # fmt: skip
            except OSError:
                undo.close()
                return None
            undo.callback(place.run, "tc", "qdisc", "del", *queue)
        return undo

    @contextlib.contextmanager
    def _relay(self, host: Host, delay_s: float, loss: float) -> Iterator[None]:
        """The host's cable ends in a process, which has another one to the switch."""
        switch = self._switch
        own, other = f"{host.name}-a", f"{host.name}-b"
        switch.run("ip", "link", "add", "name", own, "type", "veth", "peer", "name", other)
        for device in (own, other):
            switch.run("ip", "link", "set", "dev", device, "up")
        _small_frames(host, "eth0")
        _small_frames(switch, other)
        relay = [sys.executable, "-m", "tests.fakes.cable", str(delay_s), str(loss)]
        try:
            with _running([*switch.within, *relay, host.name, own]):
                switch.run("ip", "link", "set", "dev", host.name, "nomaster")
                switch.run("ip", "link", "set", "dev", other, "master", "bridge")
                try:
                    yield
                finally:
                    switch.run("ip", "link", "set", "dev", host.name, "master", "bridge")
        finally:
            switch.run("ip", "link", "del", "dev", own)

    @contextlib.contextmanager
    def captured(self, file: Path) -> Iterator[None]:
        """Meanwhile every frame that crosses the switch is written to a file."""
        capture = [sys.executable, "-m", "tests.fakes.capture", str(file)]
        with _running([*self._switch.within, *capture]):
            yield

    def close(self) -> None:
        """Unplug and end everything but processes that others started."""
        self._closing.close()


def _small_frames(place: Host, device: str) -> None:
    """What is sent by a device leaves in frames as they would be on a wire."""
    place.run(sys.executable, "-m", "tests.fakes.cable", "--small-frames", device)


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    """A helper that says when it is ready, and ends with its standard input."""
    helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with helper:
        assert helper.stdout is not None and helper.stdin is not None
        if helper.stdout.readline() != "ready\n":
            raise OSError(f"{' '.join(command)} did not start")
        try:
            yield
        finally:
            helper.stdin.close()
    assert helper.returncode == 0, command


@cache
def obstacle() -> str:
    """Why there can be no hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "hosts of their own need root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"hosts of their own need {', '.join(missing)} (iproute2, util-linux)"
    try:
        lan = Lan()
        try:
            lan.host("trial")
        finally:
            lan.close()
    except OSError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def open_lan() -> Iterator[Lan]:
    """A network without hosts."""
    lan = Lan()
    try:
        yield lan
    finally:
        lan.close()
