"""What several processes say of one worker, as one view."""

from typing import Any

from common.identity import WorkerId
from frontend.http.operator.status import RankView, ShareView, WorkerView, merged_workers


def share(number: int) -> ShareView:
    return ShareView(requests=number, prefill_tokens=number, decode_tokens=number)


def rank_view(**fields: Any) -> RankView:
    plain: dict[str, Any] = {
        "rank": 0,
        "busy": False,
        "index": "exact",
        "reason": "",
        "blocks": 7,
        "own": share(3),
        "others": share(5),
        "running": 3,
        "waiting": 0,
        "kv_usage": 0.5,
    }
    return RankView(**plain | fields)


def view(name: str = "w0", **fields: Any) -> WorkerView:
    rank = rank_view()
    plain: dict[str, Any] = {
        "worker_id": WorkerId(name),
        "incarnation": "i",
        "state": "ready",
        "connected": True,
        "request_endpoint": "tcp://w",
        "transport": "shm",
        "circuit": "closed",
        "circuit_reason": "",
        "ranks": [rank],
        "active_requests": 1,
        "running": 3,
        "waiting": 0,
        "kv_usage": 0.5,
        "hf_processor_runs": 0,
    }
    return WorkerView(**plain | fields)


def test_requests_are_added_and_the_worst_is_said() -> None:
    busy = rank_view(busy=True, index="degraded", reason="events were lost", own=share(4))
    other = view(
        media=9,
        active_requests=4,
        circuit="open",
        circuit_reason="lost",
        ranks=[busy],
        connected=False,
    )
    (merged,) = merged_workers({"0": [view()], "1": [other]})
    assert (merged.active_requests, merged.media) == (5, 9)
    assert not merged.connected
    assert (merged.circuit, merged.circuit_reason) == ("open", "lost")
    # To a worker, each process is one of several frontends: 3 of its 5 others are the sibling's.
    together = busy.model_copy(update={"own": share(7), "others": share(2)})
    assert merged.ranks == [together]
    assert [(each.process, each.connected) for each in merged.processes] == [
        ("0", True),
        ("1", False),
    ]


def test_a_worker_that_one_does_not_know_is_not_connected_to_all() -> None:
    merged = merged_workers({"0": [view()], "1": []})
    assert [each.connected for each in merged] == [False]


def test_incarnations_are_kept_apart_and_a_report_is_found() -> None:
    silent = view(running=None, waiting=None, kv_usage=None)
    merged = merged_workers({"0": [silent, view(incarnation="j")], "1": [view()]})
    assert [(each.incarnation, each.running) for each in merged] == [("i", 3), ("j", 3)]
