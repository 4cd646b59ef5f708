"""What several processes say of one worker, as one view."""

from frontend.http.operator.status import merged_workers
from tests.unit.frontend.http.views import rank_view, share, view


def test_requests_are_added_and_the_worst_is_said() -> None:
    busy = rank_view(busy=True, index="degraded", reason="events were lost", own=share(4))
    other = view(
        media=9,
        active_requests=4,
        circuit="open",
        circuit_reason="lost",
        ejected_for_s=7.5,
        ranks=[busy],
        connected=False,
    )
    (merged,) = merged_workers({"0": [view()], "1": [other]})
    assert (merged.active_requests, merged.media) == (5, 9)
    assert not merged.connected
    assert (merged.circuit, merged.circuit_reason) == ("open", "lost")
    assert merged.ejected_for_s == 7.5
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
