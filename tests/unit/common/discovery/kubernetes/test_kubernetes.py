"""Discovery by Kubernetes, where it is more than the contract: what breaks, and who is let in."""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.discovery import base, watcher
from common.discovery.base import CardPresent, CardPublisher, CardRefused
from common.discovery.kubernetes import KubernetesDiscovery, client, discovery
from common.discovery.kubernetes.leases import CARD, WORKER, KubernetesAccess, Pod, name_of
from common.discovery.kubernetes.publisher import KubernetesCardPublisher
from common.discovery.settings import open_discovery
from common.errors import ConfigurationError, DiscoveryError
from common.identity import Incarnation, WorkerId
from common.request_plane.card import WorkerCard, WorkerState
from tests.certificates import Authority
from tests.fakes.cards import make_card
from tests.fakes.kubernetes import ApiServer, api_server
from tests.fakes.lease_store import LeaseStore, Object
from tests.unclosed import closes_all
from tests.unit.common.discovery.contract import (
    RENEW_S,
    Changes,
    counted,
    gone,
    published,
    watching,
)
from tests.waiting import until

LABELS = {"mmrouter/fleet": "a"}
DRAINING = make_card(state=WorkerState.DRAINING)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "MAX_PAUSE_S", 0.2)
    monkeypatch.setattr(client, "POLL_S", 0.05)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_S", 1.0)
    monkeypatch.setattr(client, "LEASE_S", 1.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server(tmp_path / "kubernetes") as server:
        yield server


def place(api: ApiServer, namespace: str = "fleet", **user: object) -> KubernetesDiscovery:
    return KubernetesDiscovery(namespace, LABELS, KubernetesAccess(api.kubeconfig(**user)))  # type: ignore[arg-type]


async def drain(publisher: CardPublisher) -> None:
    """Publish a change, as soon as it can be written."""
    while True:
        try:
            await publisher.publish(DRAINING)
            return
        except DiscoveryError:
            await asyncio.sleep(0.05)


async def changed(publisher: CardPublisher, changes: Changes) -> None:
    """A change is seen, and nothing else before it."""
    await drain(publisher)
    assert await changes.next() == CardPresent(DRAINING)


def lying(card: WorkerCard | None = None, **parts: object) -> Object:
    """A Lease that somebody made, and nobody renews."""
    card = card or make_card()
    made: Object = {
        "metadata": {
            "name": name_of(card.worker_id, card.incarnation),
            "labels": LABELS,
            "annotations": {CARD: card.to_json().decode(), WORKER: card.worker_id},
        },
        "spec": {
            "holderIdentity": card.incarnation,
            "renewTime": "2026-01-01T00:00:00.000000Z",
        },
    }
    made["metadata"] |= parts
    return made


def put(server: ApiServer, lease: Object) -> None:
    server.do(lambda store: store.create("fleet", lease))


# What breaks


async def test_the_api_server_is_lost_and_comes_back(server: ApiServer) -> None:
    async with published(place(server)) as (publisher, changes):
        before = counted("listing"), counted("renewal")
        next_change = asyncio.create_task(changes.next())
        await asyncio.to_thread(server.stop)
        await until(lambda: counted("listing") > before[0] + 1)
        await until(lambda: counted("renewal") > before[1] + 1)
        assert not next_change.done(), "the last cards stay"
        await asyncio.to_thread(server.start)
        await drain(publisher)
        assert await next_change == CardPresent(DRAINING)


@pytest.mark.usefixtures("impatient")
async def test_it_hangs_for_longer_than_a_lease_and_goes_on(server: ApiServer) -> None:
    async with published(place(server)) as (publisher, changes):
        before = counted("listing")
        next_change = asyncio.create_task(changes.next())
        server.pause()
        with pytest.raises(DiscoveryError, match="no answer in time"):
            await publisher.publish(DRAINING)
        await until(lambda: counted("listing") > before + 1)
        assert not next_change.done(), "the last cards stay"
        server.resume()
        await drain(publisher)
        assert await next_change == CardPresent(DRAINING)


async def test_it_comes_back_empty_and_all_cards_come_back(server: ApiServer) -> None:
    async with published(place(server)) as (_, changes):
        await asyncio.to_thread(server.stop)
        server.store = LeaseStore("fleet")
        await asyncio.to_thread(server.start)
        other = make_card("w1")
        async with place(server).publisher(renew_s=RENEW_S) as another:
            await another.publish(other)
            told = [await changes.next()]
            while told[-1] != CardPresent(other):
                told.append(await changes.next())
        # Whether it looked while there was nothing is a matter of time.
        assert told[:-1] in ([], [gone(make_card()), CardPresent(make_card())])


async def test_a_lease_that_somebody_deletes_or_changes_is_written_again(
    server: ApiServer,
) -> None:
    async with published(place(server)) as (publisher, changes):
        name = name_of(make_card().worker_id, make_card().incarnation)
        before = counted("lost")
        server.do(lambda store: store.delete("fleet", name))
        await until(lambda: counted("lost") == before + 1)
        nonsense: Object = {"metadata": {"annotations": {CARD: "nonsense"}}}
        server.do(lambda store: store.patch("fleet", name, nonsense))
        await until(lambda: counted("lost") == before + 2)
        await drain(publisher)
        told = [await changes.next()]
        while told[-1] != CardPresent(DRAINING):
            told.append(await changes.next())
        # Whether it looked while there was nothing is a matter of time.
        assert told[:-1] in ([], [gone(make_card()), CardPresent(make_card())])


async def test_what_it_missed_is_told_although_the_server_has_forgotten_it(
    server: ApiServer,
) -> None:
    found = place(server)
    seen = found.watcher()
    async with found.publisher(renew_s=RENEW_S) as publisher:
        await publisher.publish(make_card())
        async with watching(seen) as changes:
            assert await changes.next() == CardPresent(make_card())
    other = make_card("w1")
    async with found.publisher(renew_s=RENEW_S) as publisher:
        await publisher.publish(other)
        server.do(lambda store: store.compact())
        async with watching(seen) as changes:
            told = [await changes.next(), await changes.next()]
            assert gone(make_card()) in told and CardPresent(other) in told


@pytest.mark.usefixtures("impatient")
async def test_a_lease_that_lay_there_is_believed_once_it_is_renewed(server: ApiServer) -> None:
    put(server, lying(make_card("dead")))
    put(server, lying())
    async with watching(place(server).watcher()) as changes:
        waiting = asyncio.create_task(changes.next())
        await until(lambda: server.requests.count("list") > 1)
        async with place(server).publisher(renew_s=RENEW_S) as publisher:
            await publisher.publish(make_card())
            assert await waiting == CardPresent(make_card())
        assert await changes.next() == gone(make_card())


@pytest.mark.usefixtures("impatient")
async def test_a_worker_whose_lease_lapsed_comes_back_by_itself(server: ApiServer) -> None:
    async with watching(place(server).watcher()) as changes:
        waiting = asyncio.create_task(changes.next())
        await until(lambda: server.requests.count("list") > 1)
        put(server, lying())
        assert await waiting == CardPresent(make_card())
        assert await changes.next() == gone(make_card())
        name = name_of(make_card().worker_id, make_card().incarnation)
        again: Object = {"spec": {"renewTime": "2001-01-01T00:00:00.000000Z"}}
        server.do(lambda store: store.patch("fleet", name, again))
        assert await changes.next() == CardPresent(make_card()), "no clocks are compared"


# Leaving, and being cancelled


async def test_who_withdraws_while_it_hangs_is_not_held_up(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "WITHDRAW_S", 0.2)
    before = asyncio.all_tasks()
    publisher = place(server).publisher(renew_s=RENEW_S)
    await publisher.publish(make_card())
    server.pause()
    publishing = asyncio.create_task(publisher.publish(DRAINING))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await publisher.withdraw()
        await publishing
    await publisher.publish(make_card())  # does nothing: it has left
    assert asyncio.all_tasks() == before
    server.resume()


async def test_cancelled_at_any_step_it_leaves_nothing(server: ApiServer) -> None:
    before = asyncio.all_tasks()
    found = place(server)
    with closes_all():
        for steps in range(0, 60, 3):
            publisher = found.publisher(renew_s=RENEW_S)
            publishing = asyncio.create_task(publisher.publish(make_card()))
            changes = found.watcher().changes()
            looking = asyncio.ensure_future(anext(changes))
            for _ in range(steps):
                await asyncio.sleep(0.001)
            publishing.cancel()
            looking.cancel()
            await asyncio.gather(publishing, looking, return_exceptions=True)
            await changes.aclose()  # type: ignore[attr-defined]
            await publisher.withdraw()
            assert server.do(lambda store: store.names("fleet")) == []
        await until(lambda: asyncio.all_tasks() == before)
        del changes, publisher


async def test_a_withdrawal_that_is_cancelled_closes_all_the_same(server: ApiServer) -> None:
    before = asyncio.all_tasks()
    publisher = place(server).publisher(renew_s=RENEW_S)
    await publisher.publish(make_card())
    server.pause()
    leaving = asyncio.create_task(publisher.withdraw())
    await asyncio.sleep(0.1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await until(lambda: asyncio.all_tasks() == before)
    server.resume()


# What can lie there


async def test_more_cards_than_are_read_at_once(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [make_card(f"w{number}") for number in range(300)]
    found = place(server).watcher()
    async with watching(found) as changes:
        waiting = asyncio.create_task(changes.next())
        await until(lambda: server.requests.count("list") > 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    for card in cards:
        put(server, lying(card))
    # As if each of them had the largest size: fewer are read at once.
    monkeypatch.setattr(client, "MAX_ANSWER", 20 * len(json.dumps(lying(cards[-1]))))
    async with watching(found) as changes:
        seen = [await changes.next() for _ in cards]
    assert {each.card.worker_id for each in seen if isinstance(each, CardPresent)} == {
        card.worker_id for card in cards
    }


async def test_an_answer_of_too_many_objects_is_asked_for_in_parts(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may ignore our limit, and 1.9 million objects of 16 bytes take 20 s."""
    monkeypatch.setattr(client, "MAX_OBJECTS", 10)
    for number in range(20):
        put(server, lying(make_card(f"w{number}")))
    found = client.LeaseClient(place(server).access, "fleet", "")
    seen = [lease async for leases in found.read() for lease in leases]
    assert len(seen) == 20
    monkeypatch.setattr(client, "MAX_OBJECTS", 1)
    with pytest.raises(DiscoveryError, match="the answer for one Lease is too large"):
        await anext(found.read())
    await found.close()


@pytest.mark.parametrize(
    "odd",
    [
        {"name": "anothers"},
        {"name": name_of(WorkerId("w1"), Incarnation("i0"))},
        {"annotations": None},
        {"annotations": {CARD: "{}"}},
        {"annotations": {CARD: "{}", WORKER: "\n"}},
        {"annotations": {CARD: "{}", WORKER: "x" * 200}},
    ],
)
async def test_a_lease_that_is_no_cards_is_skipped_and_said_once(
    server: ApiServer, odd: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    before = counted("name")
    other = lying(make_card("odd"), **odd)
    put(server, other)
    async with published(place(server)):
        touched: Object = {"spec": {"renewTime": "2026-01-01T00:00:01.000000Z"}}
        server.do(lambda store: store.patch("fleet", other["metadata"]["name"], touched))
        async with published(place(server, "other")):
            pass
    assert counted("name") == before + 1
    assert sum("is skipped" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "content",
    ["", "{}", "nonsense", "x" * 200_000, "[" * 100_000, '{"card_version":99}', "\u2028é"],
)
async def test_what_is_no_card_is_refused_and_its_end_is_told(
    server: ApiServer, content: str
) -> None:
    async with published(place(server)) as (_, changes):
        bad = lying(make_card("w1"), annotations={CARD: content, WORKER: "w1"})
        put(server, bad)
        assert isinstance(await changes.next(), CardRefused)
        server.do(lambda store: store.delete("fleet", bad["metadata"]["name"]))
        assert await changes.next() == gone(make_card("w1"))


async def test_there_is_room_for_so_many_cards_and_no_more(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = counted("size")
    async with published(place(server)) as (publisher, changes):
        room = 2 * len(make_card().to_json()) + 100
        monkeypatch.setattr(watcher, "MAX_CARD_BYTES_IN_ALL", room)
        put(server, lying(make_card("w1")))
        assert await changes.next() == CardPresent(make_card("w1"))
        put(server, lying(make_card("w2")))
        await changed(publisher, changes)
        assert counted("size") == before + 1


@pytest.mark.parametrize("worker_id", ["a/b", "../x", "é", "-x", "A_b", "x" * 128])
async def test_any_printable_id_has_a_name(server: ApiServer, worker_id: str) -> None:
    card = make_card(worker_id)
    async with published(place(server)) as (_, changes):
        async with place(server).publisher(renew_s=RENEW_S) as publisher:
            await publisher.publish(card)
            assert await changes.next() == CardPresent(card)
        assert await changes.next() == gone(card)


@pytest.mark.parametrize("worker_id", ["", "a\nb", "x" * 129])
async def test_an_id_that_can_not_stand_on_a_lease_is_said(
    server: ApiServer, worker_id: str
) -> None:
    card = make_card().model_copy(update={"worker_id": worker_id})
    with pytest.raises(DiscoveryError, match="can't stand on a Lease"):
        await place(server).publisher().publish(card)


async def test_a_card_that_is_too_large_is_said(server: ApiServer) -> None:
    card = make_card().model_copy(update={"served_model_names": ["x" * (256 << 10)]})
    async with place(server).publisher() as publisher:
        with pytest.raises(DiscoveryError, match="at most 262144 bytes"):
            await publisher.publish(card)


async def test_a_lease_goes_with_its_pod(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of(make_card().worker_id, make_card().incarnation)
    for namespace, owned in (("fleet", True), ("elsewhere", False)):
        monkeypatch.setenv("POD_NAME", "worker-0")
        monkeypatch.setenv("POD_UID", "1-2-3")
        monkeypatch.setenv("POD_NAMESPACE", namespace)
        async with place(server).publisher() as publisher:
            await publisher.publish(make_card())
            (lease,) = server.do(lambda store: store.page("fleet", "", 0, "")["items"])
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "worker-0", "uid": "1-2-3"}
        assert lease["metadata"].get("ownerReferences") == ([owner] if owned else None)
        assert lease["metadata"]["name"] == name and lease["metadata"]["labels"] == LABELS
    monkeypatch.delenv("POD_UID")
    assert Pod.ours("elsewhere") is None


async def test_leases_of_the_dead_are_deleted_and_no_others(server: ApiServer) -> None:
    put(server, lying(make_card("dead")))
    put(server, lying(make_card("odd"), name="anothers"))
    alive = place(server).publisher(renew_s=RENEW_S)
    made = client.LeaseClient(place(server).access, "fleet", place(server).selector)
    sweeper = KubernetesCardPublisher(made, LABELS, None, None, renew_s=RENEW_S, sweep_s=0.3)
    async with alive, sweeper:
        await alive.publish(make_card())
        await sweeper.publish(make_card("w1"))
        there = {"anothers", *(name_of(WorkerId(each), Incarnation("i0")) for each in ("w0", "w1"))}
        await until(lambda: set(server.do(lambda store: store.names("fleet"))) == there)


# Who is let in


@pytest.mark.parametrize("down", ["nobody listens", "it hangs"])
@pytest.mark.usefixtures("impatient")
async def test_no_server_at_first_sight_is_said(server: ApiServer, down: str) -> None:
    found = place(server)
    if down == "it hangs":
        server.pause()
    else:
        server.stop()
    async with watching(found.watcher()) as changes:
        with pytest.raises(DiscoveryError, match=f"no cards can be read: .*{server.url}"):
            await changes.next()
    async with found.publisher() as publisher:
        with pytest.raises(DiscoveryError, match=server.url):
            await publisher.publish(make_card())
        server.resume()


async def test_who_is_not_let_in_is_told_why(server: ApiServer, tmp_path: Path) -> None:
    server.tokens["nothing"] = "nobody"
    server.allowed["reader"] = frozenset({"list"})
    server.tokens["reads"] = "reader"
    stranger = Authority(tmp_path / "stranger")
    for found, said in (
        (place(server, token="wrong"), "refuses: Unauthorized"),
        (place(server, token="nothing"), 'User "nobody" cannot (list|patch)'),
        (place(server, token=None), 'User "system:anonymous" cannot'),
        (place(server, **{"certificate-authority": str(stranger.certificate)}), "certificate"),
        (place(server, server=server.url.replace("127.0.0.1", "localhost")), "certificate"),
        (place(server, server=server.url.replace("https", "http")), "can't be used"),
        (place(server, **{"certificate-authority": "/nowhere"}), "/nowhere"),
        (place(server, token="two\nlines"), "can't be used"),
    ):
        async with watching(found.watcher()) as changes:
            with pytest.raises(DiscoveryError, match=said) as caught:
                await changes.next()
            assert "\n" not in str(caught.value)
        async with found.publisher() as publisher:
            with pytest.raises(DiscoveryError, match=said):
                await publisher.publish(make_card())
    async with place(server, token="reads").publisher() as publisher:
        with pytest.raises(DiscoveryError, match='User "reader" cannot patch'):
            await publisher.publish(make_card())


async def test_a_client_certificate_is_shown(server: ApiServer) -> None:
    ours = server.authority.certify("fleet")
    async with published(place(server, token=None, certified=ours)):
        pass


async def test_a_namespace_that_is_not_there_is_said(server: ApiServer) -> None:
    async with place(server, "nowhere").publisher() as publisher:
        with pytest.raises(DiscoveryError, match='namespaces "nowhere" not found'):
            await publisher.publish(make_card())


async def test_a_frontend_that_may_ask_is_told_of_it_as_well(server: ApiServer) -> None:
    nowhere = place(server, "nowhere")
    async with watching(nowhere.watcher()) as changes:  # which may not: it looks like an empty one
        looking = asyncio.create_task(changes.next())
        await until(lambda: server.requests.count("list") > 1)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    server.sees_namespaces.add("fleet")
    async with watching(nowhere.watcher()) as changes:
        with pytest.raises(DiscoveryError, match='namespaces "nowhere" not found'):
            await changes.next()
    async with published(place(server)):
        pass


async def test_in_a_pod_the_token_is_replaced_while_we_run(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "ca.crt").write_bytes(server.authority.certificate.read_bytes())
    (account / "token").write_text("the-fleet")
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    async with published(KubernetesDiscovery("fleet", LABELS)) as (publisher, changes):
        (account / "token").write_text("the-next")
        server.tokens = {"the-next": "fleet"}
        await changed(publisher, changes)
        before = counted("renewal")
        (account / "token").write_text("")
        server.tokens = {}
        await until(lambda: counted("renewal") > before)
        (account / "token").write_text("the-last")
        server.tokens = {"the-last": "fleet"}
        other = make_card("w1")
        async with KubernetesDiscovery("fleet", LABELS).publisher() as another:
            await another.publish(other)
            assert await changes.next() == CardPresent(other)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not there"),
        ("", "can't be used"),
        ("[]", "can't be used"),
        ("a: {secret", "can't be used"),
        ("\0", "can't be used"),
        ('{"current-context": "here", "contexts": [{"name": "here", "token": "secret"}]}', "used"),
        ('{"current-context": "no", "contexts": [], "clusters": [], "users": []}', "used"),
    ],
)
async def test_a_kubeconfig_that_makes_no_sense_is_said_and_not_shown(
    tmp_path: Path, content: str | None, said: str
) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    found = KubernetesDiscovery("fleet", LABELS, KubernetesAccess(file))
    async with watching(found.watcher()) as changes:
        with pytest.raises(DiscoveryError, match=said) as caught:
            await changes.next()
    assert str(file) in str(caught.value)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


async def test_without_a_pod_or_a_kubeconfig_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a:{tmp_path}/b")
    with pytest.raises(DiscoveryError, match="this is no Pod"):
        await KubernetesDiscovery("fleet", LABELS).publisher().publish(make_card())


async def test_another_context_of_the_same_file(server: ApiServer) -> None:
    found = place(server)
    wrong = dataclasses.replace(found.access, context="there")
    with pytest.raises(DiscoveryError, match="there"):
        await dataclasses.replace(found, access=wrong).publisher().publish(make_card())
    right = dataclasses.replace(found.access, context="here")
    async with published(dataclasses.replace(found, access=right)):
        pass


async def test_no_proxy_is_asked(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    async with published(place(server)):
        pass


def test_without_its_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install kubernetes-asyncio"):
        open_discovery("kubernetes://fleet/a=b")


async def test_no_secret_is_on_the_log(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with published(place(server)):
        pass
    assert "the-fleet" not in caplog.text
