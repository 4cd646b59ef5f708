"""Discovery by URL: every backend keeps the contract, and what is no URL is said."""

import argparse
import asyncio
import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from common.discovery.base import CardPublisher, CardWatcher, Discovery
from common.discovery.etcd import EtcdDiscovery
from common.discovery.etcd import discovery as etcd_discovery
from common.discovery.etcd.client import EtcdAccess
from common.discovery.etcd.discovery import EtcdCardPublisher
from common.discovery.file import FileCardPublisher, FileDiscovery
from common.discovery.file import discovery as file_discovery
from common.discovery.kubernetes import KubernetesDiscovery
from common.discovery.kubernetes import client as kubernetes_client
from common.discovery.kubernetes.client import LeaseClient
from common.discovery.kubernetes.leases import KubernetesAccess
from common.discovery.kubernetes.publisher import KubernetesCardPublisher
from common.discovery.settings import BACKENDS, DiscoverySettings, open_discovery
from common.errors import ConfigurationError
from common.fleet_key import FleetKey
from tests.fakes.etcd import BINARIES, NO_ETCD, EtcdMember, etcd_cluster
from tests.fakes.kubernetes import api_server
from tests.unit.common.discovery.contract import RENEW_S, DiscoveryContract


class Place(ABC):
    """What tests need to know of a backend."""

    url: str

    @abstractmethod
    async def lose_all_cards(self) -> None:
        """Take the place away, behind everybody's back."""

    @abstractmethod
    def shorten_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let leases end as soon as they can here."""

    @abstractmethod
    async def abandon(self, publisher: CardPublisher) -> None:
        """Let a publisher end as if its process was killed."""


class DirectoryPlace(Place):
    def __init__(self, tmp_path: Path) -> None:
        self._directory = tmp_path / "not yet" / "thére?"
        self.url = self._directory.as_uri()

    async def lose_all_cards(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._directory.parent, ignore_errors=True)

    def shorten_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Longer than a test may stand still between two renewals.
        monkeypatch.setattr(file_discovery, "LEASE_S", 5.0)

    async def abandon(self, publisher: CardPublisher) -> None:
        assert isinstance(publisher, FileCardPublisher)
        for task in publisher._tasks:
            task.cancel()


class EtcdPlace(Place):
    """One server for all tests, and a prefix for each."""

    _numbers = itertools.count()

    def __init__(self, member: EtcdMember) -> None:
        self._member = member
        self._prefix = f"/fleet {next(self._numbers)}"
        self.url = f"etcd://{member.endpoint}{quote(self._prefix)}"

    async def lose_all_cards(self) -> None:
        await asyncio.to_thread(self._member.control, "del", "--prefix", self._prefix + "/")

    def shorten_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(etcd_discovery, "LEASE_S", 5)

    async def abandon(self, publisher: CardPublisher) -> None:
        assert isinstance(publisher, EtcdCardPublisher)
        for task in publisher._tasks:
            task.cancel()
        await publisher._client.close()


class KubernetesPlace(Place):
    """One server for all tests, and a label for each."""

    _numbers = itertools.count()

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._label = f"mmrouter/fleet=n{next(self._numbers)}"
        self.url = f"kubernetes://fleet/{self._label}?kubeconfig={quote(str(kubeconfig))}"

    async def lose_all_cards(self) -> None:
        client = LeaseClient(KubernetesAccess(self._kubeconfig), "fleet", self._label)
        async for leases in client.read():
            for lease in leases:
                await client.delete(lease.name)
        await client.close()

    def shorten_leases(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kubernetes_client, "LEASE_S", 5.0)
        monkeypatch.setattr(kubernetes_client, "POLL_S", 0.1)

    async def abandon(self, publisher: CardPublisher) -> None:
        assert isinstance(publisher, KubernetesCardPublisher)
        tasks = [*publisher._tasks, *publisher._writes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await publisher._client.close()


def a_directory(request: pytest.FixtureRequest) -> Place:
    return DirectoryPlace(request.getfixturevalue("tmp_path"))


def in_etcd(request: pytest.FixtureRequest) -> Place:
    return EtcdPlace(request.getfixturevalue("etcd"))


def in_kubernetes(request: pytest.FixtureRequest) -> Place:
    return KubernetesPlace(request.getfixturevalue("kubernetes"))


PLACES: dict[str, Callable[[pytest.FixtureRequest], Place]] = {
    "etcd": in_etcd,
    "file": a_directory,
    "kubernetes": in_kubernetes,
}
"""A place of every backend, for one test."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMember]:
    if BINARIES is None:
        pytest.skip(NO_ETCD)
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as (member,):
        yield member


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig: of a real cluster with a namespace ``fleet`` if the environment names one."""
    if real := os.environ.get("MMROUTER_TEST_KUBECONFIG"):
        yield Path(real)
        return
    with api_server(tmp_path_factory.mktemp("kubernetes")) as server:
        yield server.kubeconfig()


@pytest.mark.parametrize("scheme", BACKENDS)
class TestEveryBackend(DiscoveryContract):
    @pytest.fixture(autouse=True)
    def open(
        self, scheme: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert scheme in PLACES, f"no test says where {scheme} keeps cards: add it to PLACES"
        self._place = PLACES[scheme](request)
        self._discovery = open_discovery(self._place.url)
        assert isinstance(self._discovery, BACKENDS[scheme])
        self._place.shorten_leases(monkeypatch)

    def publisher(self, key: FleetKey | None = None) -> CardPublisher:
        return self._discovery.publisher(key, renew_s=RENEW_S)

    def watcher(self, key: FleetKey | None = None) -> CardWatcher:
        return self._discovery.watcher(key)

    async def lose_all_cards(self) -> None:
        await self._place.lose_all_cards()

    async def abandon(self, publisher: CardPublisher) -> None:
        await self._place.abandon(publisher)


def test_every_implementation_is_in_the_table() -> None:
    ours = {each for each in Discovery.__subclasses__() if each.__module__.startswith("common.")}
    assert ours == set(BACKENDS.values())


@pytest.mark.parametrize("path", ["/", "/a/b", "/with space/%41", "/é", os.fsdecode(b"/\xff")])
def test_a_url_names_a_directory(path: str) -> None:
    assert open_discovery(Path(path).as_uri()) == FileDiscovery(Path(path))
    assert open_discovery(Path(path).as_uri().replace("//", "//localhost", 1)) == FileDiscovery(
        Path(path)
    )


def test_a_url_names_an_etcd_cluster() -> None:
    found = open_discovery(
        "etcd://one,two:23,[::1]:24,[::2]/the/fleet/?ca=/ca&certificate=/c&key=/k"
        "&user=me&password-file=/p%20w"
    )
    assert isinstance(found, EtcdDiscovery)
    assert found == EtcdDiscovery(
        EtcdAccess(
            endpoints=("one:2379", "two:23", "[::1]:24", "[::2]:2379"),
            ca=Path("/ca"),
            certificate=Path("/c"),
            key=Path("/k"),
            user="me",
            password_file=Path("/p w"),
        ),
        "/the/fleet",
    )
    assert str(found) == "etcd://one:2379,two:23,[::1]:24,[::2]:2379/the/fleet"


def test_a_url_names_labels_in_a_namespace() -> None:
    found = open_discovery(
        "kubernetes://prod/example.org/fleet=a,tier=?kubeconfig=/k%20c&context=x"
    )
    assert found == KubernetesDiscovery(
        "prod",
        {"example.org/fleet": "a", "tier": ""},
        KubernetesAccess(Path("/k c"), "x"),
    )
    assert str(found) == "kubernetes://prod/example.org/fleet=a,tier="


def test_operators_read_a_directory_as_a_path() -> None:
    assert str(open_discovery("file:///run/my%20cards")) == "/run/my cards"


@pytest.mark.parametrize("scheme", BACKENDS)
def test_a_form_is_a_url_of_its_backend(scheme: str) -> None:
    assert isinstance(open_discovery(BACKENDS[scheme].form), BACKENDS[scheme])


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("zookeeper://host:2181/fleet", "no discovery has the scheme 'zookeeper'"),
        ("etcd:/host/fleet", "names no directory"),
        ("etcd://host", "names no prefix"),
        ("etcd://host:2379/", "names no prefix"),
        ("etcd:///fleet", "'' is no HOST:PORT"),
        ("etcd://one,/fleet", "'' is no HOST:PORT"),
        ("etcd://one:x/fleet", "'one:x' is no HOST:PORT"),
        ("etcd://one:0/fleet", "'one:0' is no HOST:PORT"),
        ("etcd://one:65536/fleet", "'one:65536' is no HOST:PORT"),
        ("etcd://host/fleet#1", "names no prefix"),
        ("etcd://host/fl%00eet", "names no prefix"),
        ("etcd://host/%ff", "can't decode"),
        ("etcd://host/fleet?tls=yes", "no option 'tls'"),
        ("etcd://host/fleet?ca", "bad query field"),
        ("etcd://host/fleet?ca=", "'ca' is empty"),
        ("etcd://host/fleet?ca=/a&ca=/b", "an option twice"),
        ("etcd://host/fleet?ca=/a%00", "'ca' is empty or no text"),
        ("etcd://host/fleet?key=/k", "needs 'certificate'"),
        ("etcd://host/fleet?certificate=/c&key=/k", "needs 'ca'"),
        ("etcd://host/fleet?user=me", "needs 'password-file'"),
        ("kubernetes://prod", "'' is no LABEL=VALUE"),
        ("kubernetes:///fleet=a", "'' is no namespace"),
        ("kubernetes://Prod/fleet=a", "'Prod' is no namespace"),
        ("kubernetes://prod:6443/fleet=a", "'prod:6443' is no namespace"),
        ("kubernetes://prod/fleet", "'fleet' is no LABEL=VALUE"),
        ("kubernetes://prod/fleet!=a", "'fleet!=a' is no LABEL=VALUE"),
        ("kubernetes://prod/fleet=a,", "'' is no LABEL=VALUE"),
        ("kubernetes://prod/a=b/c", "'a=b/c' is no LABEL=VALUE"),
        ("kubernetes://prod/a/b/c=d", "'a/b/c=d' is no LABEL=VALUE"),
        ("kubernetes://prod/fleet=" + 64 * "a", "is no LABEL=VALUE"),
        ("kubernetes://prod/a=b,a=c", "the label 'a' twice"),
        ("kubernetes://prod/a=%ff", "can't decode"),
        ("kubernetes://prod/a=b#c", "no '#'"),
        ("kubernetes://prod/a=b?ca=/a", "no option 'ca'"),
        ("kubernetes://prod/a=b?context=", "'context' is empty"),
        ("kubernetes://prod/a=b?context=x&context=y", "an option twice"),
        ("://run/cards", "no discovery has the scheme ''"),
        ("", "names no directory"),
        ("/run/cards\0", "names no directory"),
        ("file://host/run/cards", "'host' is a host"),
        ("file://[", "Invalid IPv6 URL"),
        ("file://", "no absolute directory"),
        ("file:///cards%00", "no absolute directory"),
        ("file:///cards?new", "write ? as %3F"),
        ("file:///cards#1", "write ? as %3F"),
    ],
)
def test_what_names_no_place_is_one_sentence_with_all_that_would(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_discovery(url)
    said = str(caught.value)
    assert repr(url) in said and why in said and "\n" not in said
    assert all(backend.form in said for backend in BACKENDS.values())


def test_who_stands_before_a_namespace_is_not_repeated() -> None:
    with pytest.raises(ConfigurationError, match="no user belongs before a namespace") as caught:
        open_discovery("kubernetes://me:secret@prod/fleet=a")
    assert "secret" not in str(caught.value) and "kubernetes://***prod" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "etcd://me:s3cret@host/fleet",
        "etcd://me:s3cret@host,you:s3cret@two/fleet",
        "etcd://host/fleet?user=me&password=s3cret",
        "etcd://host/fleet?password=s3cret#x",
        "zookeeper://me:s3cret@host/fleet",
    ],
)
def test_a_password_where_none_belongs_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_discovery(url)
    assert "s3cret" not in str(caught.value) and "***" in str(caught.value)
    with pytest.raises(ConfigurationError) as caught:
        DiscoverySettings.from_args(argparse.Namespace(), {"MMROUTER_DISCOVERY": url})
    assert "s3cret" not in str(caught.value) and "MMROUTER_DISCOVERY" in str(caught.value)
