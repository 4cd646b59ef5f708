import json

import pytest
from pydantic import ValidationError

from common.errors import CardError, CardIncompatibleError, causes
from common.request_plane.card import (
    CARD_VERSION,
    MAX_ADAPTERS,
    MAX_RANKS,
    Adapter,
    KvEventSource,
    WorkerCard,
    check_compatible,
)
from tests.fakes.cards import make_card


def test_a_card_survives_json() -> None:
    card = make_card()
    assert WorkerCard.from_json(card.to_json()) == card


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "card: "),
        (b"not json", "card: "),
        (b"[]", "card: "),
        (b"{}", "worker_id: "),
    ],
)
def test_what_is_no_card_is_refused_with_the_place(content: bytes, complaint: str) -> None:
    with pytest.raises(CardError, match=complaint):
        WorkerCard.from_json(content)


def test_an_unknown_field_is_refused() -> None:
    raw = json.loads(make_card().to_json())
    raw["model"]["surprise"] = 1
    with pytest.raises(CardError, match=r"model\.surprise"):
        WorkerCard.from_json(json.dumps(raw).encode())


@pytest.mark.parametrize("digest", ["", "zz", "0", " 00"])
def test_a_hash_that_is_no_digest_is_refused(digest: str) -> None:
    raw = json.loads(make_card().to_json())
    raw["cache"]["none_hash"] = digest
    with pytest.raises(CardError, match=r"cache\.none_hash"):
        WorkerCard.from_json(json.dumps(raw).encode())


def test_more_ranks_than_can_be_are_refused() -> None:
    raw = json.loads(make_card().to_json()) | {"ranks": [10**12]}
    with pytest.raises(CardError, match="ranks"):
        WorkerCard.from_json(json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "max_model_len", 10**30),
        ("model", "max_logprobs", 10**30),
        ("model", "dtype", "x" * 20_000),
        ("cache", "block_size", 1 << 40),
        ("cache", "none_hash", "00" * 20_000),
        ("capacity", "num_blocks", 10**30),
        ("capacity", "max_num_seqs", 10**30),
        ("capacity", "max_num_batched_tokens", 10**30),
        ("host", "pid", 10**30),
        ("host", "hostname", "x" * 20_000),
    ],
)
def test_amounts_that_no_machine_has_are_refused(section: str, field: str, value: object) -> None:
    raw = json.loads(make_card().to_json())
    raw[section][field] = value
    with pytest.raises(CardError, match=rf"{section}\.{field}") as caught:
        WorkerCard.from_json(json.dumps(raw).encode())
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "change",
    [
        {"served_model_names": [1] * 16_000},
        {"kv_event_sources": [{}] * 16_000},
        {"kv_event_sources": [{}] * 300_000},
        {"ranks": ["x"] * 200_000},
        {"adapters": [{}] * 16_000},
        {"x" * 500_000: 1},
        {str(i): 1 for i in range(100_000)},
    ],
    ids=lambda change: "".join(change)[:10],
)
def test_a_card_of_wrong_things_by_the_thousand_costs_one_error(change: dict[str, object]) -> None:
    raw = json.loads(make_card().to_json()) | change
    with pytest.raises(CardError) as caught:
        WorkerCard.from_json(json.dumps(raw).encode())
    assert len(str(caught.value)) < 300
    assert all(
        each.error_count() < 10
        for each in causes(caught.value)
        if isinstance(each, ValidationError)
    )


def test_the_largest_honest_card_is_taken() -> None:
    card = make_card(
        ranks=list(range(MAX_RANKS)),
        kv_event_sources=[
            KvEventSource(
                rank=rank,
                endpoint=f"tcp://worker-7.workers.svc.cluster.local:{20000 + rank}",
                replay_endpoint=f"tcp://worker-7.workers.svc.cluster.local:{30000 + rank}",
                topic="kv-events",
                buffer_steps=10_000,
            )
            for rank in range(MAX_RANKS)
        ],
        adapters=[
            Adapter(name=f"adapter-{i}", path=f"/models/adapters/{i}/{'x' * 100}")
            for i in range(MAX_ADAPTERS)
        ],
    )
    assert WorkerCard.from_json(card.to_json()) == card


def test_another_card_version_is_refused() -> None:
    raw = json.loads(make_card().to_json())
    raw["card_version"] = CARD_VERSION + 1
    with pytest.raises(CardError, match="version"):
        WorkerCard.from_json(json.dumps(raw).encode())


def test_a_card_of_another_version_says_so_whatever_else_it_holds() -> None:
    raw = json.loads(make_card().to_json())
    raw["card_version"] = CARD_VERSION - 1
    del raw["model"]["runner"]
    raw["new"] = 1
    with pytest.raises(CardError, match=f"worker w0 has version {CARD_VERSION - 1}"):
        WorkerCard.from_json(json.dumps(raw).encode())


def test_workers_may_differ_in_what_does_not_change_hashes() -> None:
    ours = make_card()
    check_compatible(ours, make_card("w1", request_endpoint="tcp://127.0.0.1:2", ranks=[2, 3]))


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        ({"model": {"dtype": "bfloat16"}}, "model.dtype", ("float32", "bfloat16")),
        ({"model": {"model": "/other"}}, "model.model", ("/models/demo", "/other")),
        (
            {"model": {"mm_processor_kwargs": {"max_pixels": 1}}},
            "model.mm_processor_kwargs",
            ("None", "max_pixels"),
        ),
        ({"cache": {"block_size": 16}}, "cache.block_size", ("32", "16")),
        ({"cache": {"none_hash": "11" * 32}}, "cache.none_hash", ("00" * 32, "11" * 32)),
        (
            {"cache": {"hash_algorithm": "sha256"}},
            "cache.hash_algorithm",
            ("sha256_cbor", "sha256"),
        ),
        ({"served_model_names": ["x"]}, "served_model_names", ("demo", "x")),
    ],
)
def test_a_difference_names_the_field_and_both_values(
    change: dict[str, object], field: str, values: tuple[str, str]
) -> None:
    with pytest.raises(CardIncompatibleError) as caught:
        check_compatible(make_card(), make_card("w1", **change))  # type: ignore[arg-type]
    assert caught.value.field == field
    message = str(caught.value)
    assert "w1" in message and field in message
    assert all(value in message for value in values)


FORGED = "w0\nERROR forged" + "!" * 100_000


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": FORGED},
        {"worker_id": FORGED, "card_version": CARD_VERSION + 1},
        {"incarnation": FORGED},
        {"fleet_key": FORGED},
        {"adapters": [{"name": FORGED, "path": "/a"}]},
        {"adapters": [{"name": "a", "path": FORGED}]},
        {"adapters": [{"name": "a", "path": "/a\nERROR forged"}]},
        {"adapters": [{"name": "a", "path": ""}]},
        {"adapters": [{"name": "a", "path": "/a"}] * 2000},
        {"adapters": [{"name": "a", "path": "/a", FORGED: 1}]},
        {"card_version": 10**4000},
        {FORGED: 1},
    ],
)
def test_what_is_said_of_a_card_is_short_and_on_one_line(change: dict[str, object]) -> None:
    """Whoever wrote it may be a stranger, and users and the log get to see it."""
    raw = json.loads(make_card().to_json()) | change
    with pytest.raises(CardError) as caught:
        WorkerCard.from_json(json.dumps(raw).encode())
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_difference_between_long_values_is_said_in_short() -> None:
    long = make_card("w1", model={"hf_overrides": {"list": list(range(10_000))}})
    with pytest.raises(CardIncompatibleError, match=r"model\.hf_overrides") as caught:
        check_compatible(make_card(), long)
    assert len(str(caught.value)) < 1000
