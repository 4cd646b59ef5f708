import json
from pathlib import Path

import pytest

from common.discovery.sealed_cards import MAX_UNSEALED, seal, unseal
from common.errors import CardError, CardKeyError
from common.fleet_key import FleetKey, new
from common.request_plane.card import WorkerCard
from tests.fakes.cards import make_card


@pytest.fixture
def key(tmp_path: Path) -> FleetKey:
    new(tmp_path / "key")
    return FleetKey.read(tmp_path / "key")


def test_a_sealed_card_is_json_and_reads_back(key: FleetKey) -> None:
    card = make_card(fleet_key=key.fingerprint)
    data = seal(card, key)
    assert unseal(data, key) == card
    assert json.loads(data) == json.loads(card.to_json()) | {"mac": json.loads(data)["mac"]}
    # A frontend without the key can still say which one it lacks.
    assert unseal(data, None) == card


def test_without_a_key_there_is_no_mac() -> None:
    assert seal(make_card(), None) == make_card().to_json()
    assert unseal(make_card().to_json(), None) == make_card()


def test_every_change_is_noticed(key: FleetKey) -> None:
    data = seal(make_card(fleet_key=key.fingerprint), key)
    for old, new_ in (
        (b'"i0"', b'"i1"'),
        (b'"w0"', b'"w1"'),
        (b"127.0.0.1:1", b"127.0.0.1:2"),
        (b'"trust_remote_code":false', b'"trust_remote_code":true'),
        (b"{", b"{ "),
    ):
        assert old in data
        with pytest.raises(CardKeyError, match="MAC that is not"):
            unseal(data.replace(old, new_, 1), key)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_large_card_of_a_stranger_is_not_parsed(
    key: FleetKey, sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new(tmp_path / "other")
    other = FleetKey.read(tmp_path / "other") if sealed else None
    large = make_card(model={"hf_overrides": {"x": "x" * MAX_UNSEALED}})
    data = seal(large, other)
    assert unseal(seal(large, key), key) == large
    monkeypatch.setattr(WorkerCard, "from_json", None)
    with pytest.raises(CardKeyError, match="a worker refused: its card has"):
        unseal(data, key)


def test_a_mac_from_elsewhere_is_none(key: FleetKey) -> None:
    card = make_card(fleet_key=key.fingerprint)
    mac = seal(make_card("w1", fleet_key=key.fingerprint), key)[-74:]
    for forged in (
        card.to_json()[:-1] + mac,
        card.to_json()[:-1] + b',"mac":""}',
        card.to_json()[:-1] + b',"mac":"' + b"0" * 64 + b'"}',
        card.to_json()[:-1] + b',"mac":null}',
        card.to_json(),
        seal(card, key) + b"\n",
        seal(card, key)[:-1] + b',"mac":"' + b"0" * 64 + b'"}',
    ):
        with pytest.raises(CardError):
            unseal(forged, key)


def test_other_keys_are_named(key: FleetKey, tmp_path: Path) -> None:
    new(tmp_path / "other")
    other = FleetKey.read(tmp_path / "other")
    theirs = seal(make_card(fleet_key=other.fingerprint), other)
    with pytest.raises(CardKeyError, match=f"{other.fingerprint}.*{key.fingerprint}"):
        unseal(theirs, key)
    with pytest.raises(CardKeyError, match="has no fleet key"):
        unseal(seal(make_card(), None), key)


def test_the_secret_of_cards_is_no_other_secret(key: FleetKey) -> None:
    assert len(key.cards) == 32
    assert key.cards.hex() not in repr(key) and repr(key.cards) not in repr(key)
