"""What several processes say of one worker, as one view."""

from frontend.http.operator.status import merged_workers, without_namesakes
from tests.unit.frontend.http.views import gone, rank_view, share, view


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


def test_one_that_a_process_lost_and_another_has_is_not_connected_and_says_when_it_went() -> None:
    departed = gone("w0", "lost", "it hung up")
    (merged,) = merged_workers({"0": [departed], "1": [view()]})
    assert (merged.connected, merged.state, merged.ranks) == (False, "ready", view().ranks)
    assert (merged.gone_at, merged.gone_reason) == (departed.gone_at, "it hung up")
    (both,) = merged_workers({"0": [departed], "1": [departed]})
    assert (both.state, both.gone_at, both.ranks) == ("lost", departed.gone_at, [])


def test_a_run_that_is_gone_is_not_shown_beside_another_that_is_there() -> None:
    successor = view(incarnation="j")
    assert without_namesakes([gone("w0", "left", ""), successor]) == [successor]
