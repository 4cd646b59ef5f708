"""Discovery in etcd, where it is more than the contract: what breaks, and who is let in.

The servers are real ones.
"""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from aetcd import rpc

from common.discovery import base, watcher
from common.discovery.base import CardPresent, CardPublisher, CardRefused
from common.discovery.etcd import EtcdDiscovery, client
from common.discovery.etcd.client import EtcdAccess
from common.discovery.etcd.discovery import CardKeys, EtcdCardPublisher
from common.errors import CardError, DiscoveryError
from common.identity import Incarnation, WorkerId
from common.request_plane.card import WorkerCard, WorkerState
from tests.certificates import Authority
from tests.fakes.cards import make_card
from tests.fakes.etcd import BINARIES, NO_ETCD, EtcdMember, etcd_cluster
from tests.unit.common.discovery.contract import (
    RENEW_S,
    Changes,
    counted,
    gone,
    published,
    watching,
)
from tests.waiting import until

pytestmark = pytest.mark.skipif(BINARIES is None, reason=NO_ETCD)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "MAX_PAUSE_S", 0.2)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CALL_S", 0.5)


@pytest.fixture
def member(tmp_path: Path) -> Iterator[EtcdMember]:
    with etcd_cluster(tmp_path / "etcd") as (member,):
        yield member


def place(*members: EtcdMember, prefix: str = "/fleet") -> EtcdDiscovery:
    return EtcdDiscovery(EtcdAccess(tuple(each.endpoint for each in members)), prefix)


W0, I0 = WorkerId("w0"), Incarnation("i0")
DRAINING = make_card(state=WorkerState.DRAINING)


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


# What breaks


async def test_a_member_of_three_is_killed(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path, 3) as members:
        async with published(place(*members)) as (publisher, changes):
            members[0].kill()  # which both use
            await changed(publisher, changes)
            members[0].start(members)
            members[1].kill()
            other = make_card("w1")
            async with place(*members).publisher(renew_s=RENEW_S) as another:
                await another.publish(other)
                assert await changes.next() == CardPresent(other)
            assert await changes.next() == gone(other)


async def test_etcd_is_killed_and_comes_back_with_its_data(
    member: EtcdMember, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with published(place(member)) as (publisher, changes):
        before = counted("listing"), counted("renewal")
        next_change = asyncio.create_task(changes.next())
        member.kill()
        await until(lambda: counted("listing") > before[0] + 1)
        await until(lambda: counted("renewal") > before[1] + 1)
        assert not next_change.done(), "the last cards stay"
        member.start()
        await drain(publisher)
        assert await next_change == CardPresent(DRAINING)
        assert "discovery is available again" in caplog.messages
        await until(lambda: "the lease of the card is renewed again" in caplog.messages)


async def test_etcd_comes_back_empty_and_all_cards_come_back(
    member: EtcdMember, tmp_path: Path
) -> None:
    async with published(place(member)) as (_, changes):
        member.kill()
        shutil.rmtree(member.directory / member.name)
        member.start()
        async with watching(Patient(place(member))) as later:
            assert await later.next() == CardPresent(make_card())
        other = make_card("w1")
        async with place(member).publisher() as another:
            await another.publish(other)
            told = [await changes.next()]
            while told[-1] != CardPresent(other):
                told.append(await changes.next())
        # Whether it looked while there was nothing is a matter of time.
        assert told[:-1] in ([], [gone(make_card()), CardPresent(make_card())])


class Patient(watcher.PollingWatcher):
    """Waits for a server that is not there yet."""

    def __init__(self, discovery: EtcdDiscovery) -> None:
        super().__init__(CardKeys(client.EtcdClient(discovery.access), discovery.prefix), None)
        self._has_read = True


async def test_a_worker_whose_lease_lapsed_comes_back_by_itself(member: EtcdMember) -> None:
    async with published(place(member)) as (publisher, _):
        assert isinstance(publisher, EtcdCardPublisher)
        before = counted("lost")
        await asyncio.to_thread(member.control, "lease", "revoke", f"{publisher._lease:x}")
        await until(lambda: counted("lost") == before + 1)
        async with watching(place(member).watcher()) as later:
            assert await later.next() == CardPresent(make_card())


async def test_a_card_that_somebody_overwrites_is_put_again(member: EtcdMember) -> None:
    async with published(place(member)) as (publisher, changes):
        await asyncio.to_thread(member.control, "put", "/fleet/w0/i0", "nonsense")
        await changed(publisher, changes)


@pytest.mark.usefixtures("impatient")
async def test_etcd_hangs_and_goes_on(member: EtcdMember) -> None:
    async with published(place(member)) as (publisher, changes):
        member.pause()
        with pytest.raises(DiscoveryError, match="no answer in time"):
            await publisher.publish(make_card(state=WorkerState.DRAINING))
        member.resume()
        await changed(publisher, changes)


async def test_who_withdraws_while_etcd_hangs_is_not_held_up(
    member: EtcdMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "WITHDRAW_S", 0.2)
    publisher = place(member).publisher(renew_s=RENEW_S)
    await publisher.publish(make_card())
    member.pause()
    async with asyncio.timeout(30):
        await publisher.withdraw()
    await publisher.publish(make_card())  # does nothing: it has left
    member.resume()


async def test_who_withdraws_while_a_card_is_put_takes_that_back_too(member: EtcdMember) -> None:
    publisher = place(member).publisher(renew_s=RENEW_S)
    member.pause()
    publishing = asyncio.create_task(publisher.publish(make_card()))
    await until(lambda: publisher._putting is not None)
    withdrawing = asyncio.create_task(publisher.withdraw())
    await publishing  # says nothing: who has left publishes nothing
    member.resume()
    await withdrawing
    assert await asyncio.to_thread(member.control, "get", "--prefix", "/fleet") == ""


async def test_who_is_cancelled_while_it_withdraws_leaves_no_connection(
    member: EtcdMember,
) -> None:
    before = asyncio.all_tasks()
    publisher = place(member).publisher(renew_s=RENEW_S)
    await publisher.publish(make_card())
    member.pause()
    withdrawing = asyncio.create_task(publisher.withdraw())
    await until(lambda: publisher._one_at_a_time.locked())
    withdrawing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await withdrawing
    await until(lambda: asyncio.all_tasks() == before)
    assert publisher._client._member is None
    member.resume()


async def test_a_call_whose_connection_is_closed_says_so(member: EtcdMember) -> None:
    asking = client.EtcdClient(place(member).access)
    never = b"/fleet/w0/i0"
    await asking.check_put(never)
    member.pause()
    reading = asyncio.create_task(asking.check_put(never))
    for _ in range(3):
        await asyncio.sleep(0)
    await asking.close()
    with pytest.raises(DiscoveryError, match=r"was closed|can't be used"):
        await reading
    member.resume()


async def test_members_without_a_leader_are_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CALL_S", 1.0)
    with etcd_cluster(tmp_path, 3) as members:
        async with published(place(*members)) as (publisher, changes):
            before = counted("listing")
            next_change = asyncio.create_task(changes.next())
            for member in members[1:]:
                member.kill()
            await until(lambda: counted("listing") > before)
            with pytest.raises(DiscoveryError, match="can't be put"):
                await publisher.publish(DRAINING)
            for member in members[1:]:
                member.start(members)
            await drain(publisher)
            assert await next_change == CardPresent(DRAINING)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("down", ["nobody listens", "it hangs"])
async def test_no_etcd_at_first_sight_is_said(member: EtcdMember, down: str) -> None:
    if down == "it hangs":
        member.pause()
    else:
        member.kill()
    async with watching(place(member).watcher()) as changes:
        with pytest.raises(DiscoveryError, match=f"no cards can be read: .*{member.endpoint}"):
            await changes.next()
    with pytest.raises(DiscoveryError, match=member.endpoint):
        await place(member).publisher().publish(make_card())
    member.kill()


async def test_what_it_missed_is_told_although_etcd_has_forgotten_it(member: EtcdMember) -> None:
    discovery = place(member)
    seen = discovery.watcher()
    async with discovery.publisher(renew_s=RENEW_S) as publisher:
        await publisher.publish(make_card())
        async with watching(seen) as changes:
            assert await changes.next() == CardPresent(make_card())
    other = make_card("w1")
    async with discovery.publisher(renew_s=RENEW_S) as publisher:
        await publisher.publish(other)
        found = await asyncio.to_thread(member.control, "get", "/fleet/w1/i0", "--write-out=json")
        revision = found.partition('"revision":')[2].partition(",")[0]
        await asyncio.to_thread(member.control, "compact", revision)
        async with watching(seen) as changes:
            assert await changes.next() == CardPresent(other)
            assert await changes.next() == gone(make_card())


async def put_card(member: EtcdMember, card: WorkerCard) -> None:
    name = f"/fleet/{card.worker_id}/{card.incarnation}"
    await asyncio.to_thread(member.control, "put", name, card.to_json().decode())


async def test_no_proxy_is_asked(member: EtcdMember, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    async with published(place(member)):
        pass


async def test_nothing_runs_on_once_it_is_closed(member: EtcdMember) -> None:
    before = asyncio.all_tasks()
    async with published(place(member)):
        pass
    await until(lambda: asyncio.all_tasks() == before)


# What can lie there


async def test_more_cards_than_are_read_at_once(
    member: EtcdMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 3)
    cards = {WorkerId(f"w{number}"): make_card(f"w{number}") for number in range(10)}
    publishers = [place(member).publisher() for _ in cards]
    for publisher, card in zip(publishers, cards.values(), strict=True):
        await publisher.publish(card)
    async with watching(place(member).watcher()) as changes:
        seen = [await changes.next() for _ in cards]
    assert {each.card.worker_id for each in seen if isinstance(each, CardPresent)} == set(cards)
    for publisher in publishers:
        await publisher.withdraw()


async def test_thousands_of_keys_and_cards_as_large_as_they_may_be(member: EtcdMember) -> None:
    discovery = place(member)
    large = make_card("large").model_copy(update={"supported_tasks": ["x" * 10_000] * 100})
    asking = client.EtcdClient(discovery.access)
    for number in range(2_000):
        await asking.put(f"/fleet/w{number}/i0".encode(), b"{}", 0, 0)
    async with discovery.publisher() as publisher:
        await publisher.publish(large)
        async with watching(discovery.watcher()) as changes:
            seen = [await changes.next() for _ in range(2_001)]
            assert CardPresent(large) in seen
            await asyncio.to_thread(member.control, "del", "--prefix", "/fleet/w")
            ended = [await changes.next() for _ in range(2_000)]
            assert gone(large) not in ended
        too_large = large.model_copy(update={"supported_tasks": ["x" * 10_000] * 110})
        with pytest.raises(DiscoveryError, match="frontends take"):
            await publisher.publish(too_large)
    await asking.close()


async def test_of_more_cards_than_there_is_room_for_the_others_come_once_there_is(
    member: EtcdMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "MAX_CARDS", 4)
    before = counted("size")
    async with published(place(member)) as (_, changes):
        for number in range(10, 20):
            await put_card(member, make_card(f"w{number}"))
        for number in range(10, 13):
            assert await changes.next() == CardPresent(make_card(f"w{number}"))
        next_change = asyncio.create_task(changes.next())
        await until(lambda: counted("size") == before + 1)
        assert not next_change.done()
        await asyncio.to_thread(member.control, "del", "--prefix", "/fleet/w1")
        assert await next_change == gone(make_card("w10"))
        for number in (11, 12):
            assert await changes.next() == gone(make_card(f"w{number}"))
        # Now one that came while there was no room, beside others that went.
        for number in range(20, 24):
            await put_card(member, make_card(f"w{number}"))
        for number in range(20, 23):
            assert await changes.next() == CardPresent(make_card(f"w{number}"))
        await asyncio.to_thread(member.control, "del", "/fleet/w20/i0")
        assert await changes.next() == gone(make_card("w20"))
        assert await changes.next() == CardPresent(make_card("w23"))


async def test_a_neighbour_with_a_longer_name_is_not_ours(member: EtcdMember) -> None:
    async with (
        place(member, prefix="/fleet2").publisher() as neighbour,
        place(member).publisher() as ours,
    ):
        await neighbour.publish(make_card("theirs"))
        await ours.publish(make_card("ours"))
        async with watching(place(member).watcher()) as changes:
            assert await changes.next() == CardPresent(make_card("ours"))
            await neighbour.publish(make_card("theirs", state=WorkerState.DRAINING))
            await ours.withdraw()
            assert await changes.next() == gone(make_card("ours"))


@pytest.mark.parametrize("key", ["x", "x/y/z", "x/", "/x", "../x", "x/\xff", "w0/i0/", "-x/y"])
async def test_a_key_that_is_no_cards_is_skipped_and_said_once(
    member: EtcdMember, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = counted("name")
    for _ in range(2):
        await asyncio.to_thread(member.control, "put", f"/fleet/{key}", "{}")
    async with published(place(member)):
        await asyncio.to_thread(member.control, "put", f"/fleet/{key}", "[]")
        async with published(place(member, prefix="/other")):
            pass
    assert counted("name") == before + 1
    assert sum("is skipped" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("content", ["{}", "nonsense", "x" * 1_000_000, "[" * 100_000])
async def test_what_is_no_card_is_refused_and_its_end_is_told(
    member: EtcdMember, content: str, tmp_path: Path
) -> None:
    async with watching(place(member).watcher()) as changes, place(member).publisher() as other:
        await other.publish(make_card())
        assert await changes.next() == CardPresent(make_card())
        file = tmp_path / "content"
        file.write_text(content)
        with file.open() as lines:
            await asyncio.to_thread(member.control, "put", "/fleet/w1/i0", stdin=lines)
        refused = await changes.next()
        assert isinstance(refused, CardRefused) and isinstance(refused.error, CardError)
        await asyncio.to_thread(member.control, "del", "/fleet/w1/i0")
        assert await changes.next() == gone(make_card("w1"))


async def test_a_card_under_another_name_is_refused(member: EtcdMember) -> None:
    async with watching(place(member).watcher()) as changes, place(member).publisher() as other:
        await other.publish(make_card())
        card = await asyncio.to_thread(member.control, "get", "/fleet/w0/i0", "--print-value-only")
        assert await changes.next() == CardPresent(make_card())
        await asyncio.to_thread(member.control, "put", "/fleet/w1/i0", card.strip())
        refused = await changes.next()
        assert isinstance(refused, CardRefused) and "names worker 'w0'" in str(refused.error)


@pytest.mark.parametrize("worker_id", ["", "a/b", "../x", "x" * 200, "é", "-x"])
async def test_an_id_that_names_no_key_is_said(worker_id: str) -> None:
    card = make_card(incarnation=Incarnation("i0")).model_copy(update={"worker_id": worker_id})
    publisher = EtcdDiscovery(EtcdAccess(("127.0.0.1:1",)), "/fleet").publisher()
    with pytest.raises(DiscoveryError, match="can't be part of a key"):
        await publisher.publish(card)
    with pytest.raises(DiscoveryError, match="can't be part of a key"):
        await publisher.check(card.worker_id, card.incarnation)


async def test_a_prefix_may_be_in_any_script(member: EtcdMember) -> None:
    async with published(place(member, prefix="/flotte/été")) as (publisher, changes):
        await changed(publisher, changes)


# Who is let in


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


async def test_tls_on_both_sides(authority: Authority, tmp_path: Path) -> None:
    server, ours = authority.certify("127.0.0.1"), authority.certify("worker")
    flags = (
        f"--cert-file={server.certificate}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={authority.certificate}",
        "--client-cert-auth",
    )
    member = EtcdMember("secret", tmp_path, flags)
    member.tls = (authority.certificate, ours.certificate, ours.key)
    member.start(scheme="https")
    try:
        await asyncio.to_thread(member.until_ready)
        access = EtcdAccess((member.endpoint,), authority.certificate, ours.certificate, ours.key)
        async with published(EtcdDiscovery(access, "/fleet")):
            pass
        nonsense = tmp_path / "nonsense.pem"
        nonsense.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
        for wrong in (
            EtcdAccess((member.endpoint,), nonsense),
            EtcdAccess((member.endpoint,), authority.certificate, nonsense, ours.key),
            EtcdAccess((member.endpoint,), authority.certificate, ours.certificate, server.key),
        ):
            with pytest.raises(DiscoveryError, match=r"no certificate"):
                await EtcdDiscovery(wrong, "/fleet").publisher().publish(make_card())
        stranger = Authority(tmp_path / "stranger")
        theirs = stranger.certify("worker")
        for bad in (
            EtcdAccess((member.endpoint,)),
            # Which the certificate is not for.
            EtcdAccess((f"localhost:{member.client_port}",), authority.certificate),
            EtcdAccess((member.endpoint,), authority.certificate),
            EtcdAccess((member.endpoint,), stranger.certificate, ours.certificate, ours.key),
            EtcdAccess((member.endpoint,), authority.certificate, theirs.certificate, theirs.key),
        ):
            with pytest.raises(DiscoveryError, match=r"etcd at"):
                await EtcdDiscovery(bad, "/fleet").publisher().publish(make_card())
        with pytest.raises(DiscoveryError, match=r"if its members use TLS, add \?ca=FILE"):
            plain = EtcdAccess((member.endpoint,))
            await EtcdDiscovery(plain, "/fleet").publisher().publish(make_card())
    finally:
        member.kill()


async def test_a_user_with_a_password_whose_token_runs_out(tmp_path: Path) -> None:
    member = EtcdMember("m0", tmp_path, ("--auth-token-ttl=1",))
    member.start()
    secret = tmp_path / "password"
    secret.write_text("pass word\n")
    secret.chmod(0o600)
    try:
        await asyncio.to_thread(member.until_ready)
        for command in (
            ("user", "add", "root:admin"),
            ("user", "add", "fleet:pass word"),
            ("role", "add", "fleet"),
            ("role", "grant-permission", "fleet", "--prefix=true", "readwrite", "/fleet/"),
            ("user", "grant-role", "root", "root"),
            ("user", "grant-role", "fleet", "fleet"),
            ("auth", "enable"),
        ):
            await asyncio.to_thread(member.control, *command)
        access = EtcdAccess((member.endpoint,), user="fleet", password_file=secret)
        async with published(EtcdDiscovery(access, "/fleet")) as (publisher, changes):
            await asyncio.sleep(3)  # tokens that are used live on, so this one is not enough
            await changed(publisher, changes)
        with pytest.raises(DiscoveryError, match="permission denied"):
            await EtcdDiscovery(access, "/elsewhere").publisher().publish(make_card())
        with pytest.raises(DiscoveryError, match="permission denied"):
            await EtcdDiscovery(access, "/elsewhere").publisher().check(W0, I0)
        await EtcdDiscovery(access, "/fleet").publisher().check(W0, I0)
        secret.write_text("wrong")
        with pytest.raises(DiscoveryError, match="authentication failed"):
            await EtcdDiscovery(access, "/fleet").publisher().publish(make_card())
        with pytest.raises(DiscoveryError, match="etcd"):
            await place(member).publisher().publish(make_card())
        secret.unlink()
        with pytest.raises(DiscoveryError, match="No such file"):
            await EtcdDiscovery(access, "/fleet").publisher().publish(make_card())
    finally:
        member.kill()


async def test_a_token_that_an_administrator_made_old_is_replaced(tmp_path: Path) -> None:
    signing = tmp_path / "signing"
    signing.write_text("of the members")
    flag = f"--auth-token=jwt,sign-method=HS256,priv-key={signing},ttl=10m"
    member = EtcdMember("m0", tmp_path, (flag,))
    member.start()
    secret = tmp_path / "password"
    secret.write_text("admin")
    try:
        await asyncio.to_thread(member.until_ready)
        for command in (
            ("user", "add", "root:admin"),
            ("user", "grant-role", "root", "root"),
            ("auth", "enable"),
        ):
            await asyncio.to_thread(member.control, *command)
        access = EtcdAccess((member.endpoint,), user="root", password_file=secret)
        async with published(EtcdDiscovery(access, "/fleet")) as (publisher, changes):
            # Tokens of this kind name the revision of all users and roles.
            await asyncio.to_thread(member.control, "--user=root:admin", "user", "add", "x:y")
            async with asyncio.timeout(5):
                await changed(publisher, changes)
    finally:
        member.kill()


@pytest.mark.parametrize("which", ["ca", "certificate", "key", "password_file"])
async def test_a_file_that_is_not_there_is_named(
    which: str, authority: Authority, tmp_path: Path
) -> None:
    ours = authority.certify("worker")
    (tmp_path / "password").write_text("secret")
    files = {
        "ca": authority.certificate,
        "certificate": ours.certificate,
        "key": ours.key,
        "password_file": tmp_path / "password",
    }
    access = EtcdAccess(("127.0.0.1:1",), user="me", **(files | {which: tmp_path / "missing"}))
    with pytest.raises(DiscoveryError, match=f"{tmp_path}/missing"):
        await anext(aiter(EtcdDiscovery(access, "/fleet").watcher().changes()))


async def test_a_password_that_is_no_text_is_said_and_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_bytes(b"s\xffcret")
    access = EtcdAccess(("127.0.0.1:1",), user="me", password_file=secret)
    discovery = EtcdDiscovery(access, "/fleet")
    with pytest.raises(DiscoveryError, match=r"password is not UTF-8$"):
        await discovery.publisher().publish(make_card())
    with pytest.raises(DiscoveryError, match=r"password is not UTF-8$"):
        await anext(aiter(discovery.watcher().changes()))


async def test_a_flood_of_keys_costs_no_more_than_there_is_room_for(
    member: EtcdMember, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watcher, "MAX_CARDS", 100)
    monkeypatch.setattr(client, "PAGE", 100)
    asking = client.EtcdClient(place(member).access)
    read: list[bytes] = []
    real = client.EtcdClient.read

    async def counting(self: client.EtcdClient, keys: Sequence[bytes]) -> list[client.Stored]:
        read.extend(keys)
        return await real(self, keys)

    monkeypatch.setattr(client.EtcdClient, "read", counting)
    async with published(place(member)) as (publisher, changes):
        for number in range(3000):
            await asking.put(f"/fleet/x{number}/i0".encode(), b"x" * 1000, 0, 0)
            if number % 10 == 0:
                await asking.put(f"/fleet/odd{number}".encode(), b"", 0, 0)
        refused = [await changes.next() for _ in range(99)]
        assert {type(each) for each in refused} == {CardRefused}
        await changed(publisher, changes)
    assert len(set(read)) <= 200, "at most a page at once goes beyond the room"
    assert sum("is skipped" in record.message for record in caplog.records) <= watcher.MAX_ODD
    await asking.close()


async def test_keys_and_values_larger_than_an_answer_hide_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write there could else keep every frontend from reading any card."""
    monkeypatch.setattr(client, "_CHANNEL_OPTIONS", (("grpc.max_receive_message_length", 4 << 20),))
    limits = ["--max-request-bytes=33554432"]
    member = EtcdMember("m0", tmp_path / "etcd", limits)
    try:
        member.start()
        member.until_ready()
        asking = client.EtcdClient(place(member).access)
        for number in range(6):
            await asking.put(f"/fleet/w{number}".encode() + b"k" * 1_400_000, b"", 0, 0)
            await asking.put(f"/fleet/w{number}/i0".encode(), b"x" * 1_000_000, 0, 0)
        await asking.put(b"/fleet/huge/i0", b"x" * 5_000_000, 0, 0)
        async with (
            place(member).publisher() as publisher,
            watching(place(member).watcher()) as changes,
        ):
            await publisher.publish(make_card("zgood"))
            seen = [await changes.next() for _ in range(7)]
            assert CardPresent(make_card("zgood")) in seen
            assert sum(isinstance(each, CardRefused) for each in seen) == 6
        await asking.close()
    finally:
        member.kill()


@pytest.mark.parametrize(
    "keys, more", [((), True), ([b"/fleet/w%d/i0" % n for n in range(client.PAGE + 1)], False)]
)
async def test_a_server_that_is_no_etcd_is_not_believed(keys: Sequence[bytes], more: bool) -> None:
    listed = rpc.RangeResponse(kvs=[rpc.KeyValue(key=key) for key in keys], more=more)
    stranger = rpc.KeyValue(key=b"/fleet/other/i0", value=b"{}")
    told = rpc.ResponseOp(response_range=rpc.RangeResponse(kvs=[stranger]))
    answers = {"Range": listed, "Txn": rpc.TxnResponse(responses=[told])}
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    server.add_generic_rpc_handlers([
        grpc.method_handlers_generic_handler("etcdserverpb.KV", {
            name: _always(answer.SerializeToString()) for name, answer in answers.items()
        })
    ])  # fmt: skip
    await server.start()
    asking = client.EtcdClient(EtcdAccess((f"127.0.0.1:{port}",)))
    try:
        keys_of = CardKeys(asking, "/fleet")
        with pytest.raises(DiscoveryError, match="etcd lists"):
            [page async for page in keys_of.pages()]
        entry = watcher.Entry("/fleet/w0/i0", 1, (W0, I0))
        assert await keys_of.read([entry]) == []
    finally:
        await asking.close()
        await server.stop(None)


def _always(answer: bytes) -> grpc.RpcMethodHandler:
    async def handle(request: bytes, context: object) -> bytes:
        return answer

    return grpc.unary_unary_rpc_method_handler(handle)
