"""Decisions are kept, found by the API's ids, and shown as JSON."""

import json

from common.identity import MmHash, RequestId, Target, WorkerId
from frontend.router.decision import Considered, Decision, DecisionLog, MediaMove
from frontend.router.index.indexes import Knowledge
from frontend.router.selection.costs import Work
from frontend.router.selection.load import TargetLoad


def decision(request_id: str, client_id: str = "") -> Decision:
    return Decision(
        request_id=RequestId(request_id),
        worker_id=WorkerId("w"),
        rank=0,
        mode="kv",
        reason="kv-overlap",
        index="exact",
        time=1.0,
        micros=2.0,
        prompt_tokens=40,
        prompt_blocks=2,
        overlap_blocks=1,
        predicted_cached_tokens=16,
        considered=[
            Considered(
                Target(WorkerId("w"), 0),
                Knowledge.EXACT,
                Work(1, 24, 0, 0),
                TargetLoad(2, 1, 30, 40),
                24 + 0.5 * 30 + 0.05 * 40 + 512 * 1 + 100,
                1.0,
                None,
            )
        ],
        candidates_total=1,
        client_id=client_id,
    )


def test_json_has_as_many_candidates_as_are_wanted_and_the_chosen_one() -> None:
    one = decision("r")
    (chosen,) = one.considered
    others = [chosen._replace(target=Target(WorkerId(name), 0)) for name in "abc"]
    one.considered = [*others, chosen]
    for wanted, shown in ((None, "abcw"), (4, "abcw"), (2, "abw"), (0, "w")):
        listed = json.loads(json.dumps(one.as_json(wanted)))["candidates"]
        assert "".join(each["worker_id"] for each in listed) == shown


def test_json() -> None:
    one = decision("r")
    one.media.append(MediaMove(MmHash("x"), "shipped", 10, "shm"))
    shown = json.loads(json.dumps(one.as_json()))
    assert shown["candidates"] == [
        {
            "worker_id": "w",
            "rank": 0,
            "index": "exact",
            "overlap_blocks": 1,
            "prefill_tokens": 24,
            "media_tokens": 0,
            "ship_bytes": 0,
            "active": 2,
            "waiting": 1,
            "queued_prefill_tokens": 30,
            "decode_tokens": 40,
            "cost": 653.0,
            "costs": {
                "prefill": 24.0,
                "encode": 0.0,
                "ship": 0.0,
                "load": 15.0,
                "decode": 2.0,
                "queue": 512.0,
                "step": 100.0,
            },
            "first_token_s": None,
        }
    ]
    assert sum(shown["candidates"][0]["costs"].values()) == shown["candidates"][0]["cost"]
    assert shown["first_token_s"] is None
    assert shown["media"] == [{"mm_hash": "x", "how": "shipped", "nbytes": 10, "transport": "shm"}]
    assert shown["realised_cached_tokens"] is None


def test_the_oldest_makes_way() -> None:
    log = DecisionLog(2)
    for name in ("a", "b", "c"):
        log.add(decision(name))
    assert [one.request_id for one in log.last()] == ["c", "b"]
    assert [one.request_id for one in log.last(1)] == ["c"]
    assert len(log) == 2


def test_all_requests_of_a_response_are_found() -> None:
    log = DecisionLog(10)
    for number, name in enumerate(("cmpl-1-0", "cmpl-2", "cmpl-1-1", "cmpl-1-0")):
        log.add(decision(str(number), name))
    assert [one.request_id for one in log.find("cmpl-1")] == ["0", "2", "3"]
    assert [one.as_json()["request_id"] for one in log.find("cmpl-2")] == ["cmpl-2"]
    assert log.find("cmpl-3") == log.find("0") == []
