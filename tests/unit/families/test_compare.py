"""What counts as a difference between two servers."""

import httpx

from tests.families.compare import differing_refusals, travelled


def refusals(ours: int, theirs: int, said: str = "no") -> list[str]:
    return differing_refusals(httpx.Response(ours, text=said), httpx.Response(theirs, text=said))


def test_both_may_refuse_with_the_same_status() -> None:
    assert refusals(400, 400) == []
    assert refusals(400, 404)
    assert refusals(400, 200)
    assert refusals(200, 400)


def test_where_plain_vllm_breaks_ours_may_say_why_or_answer() -> None:
    assert refusals(400, 500) == []
    assert refusals(200, 400, "Failed to apply TinyProcessor on data") == []
    assert refusals(500, 500)
    assert refusals(500, 400, "Failed to apply TinyProcessor on data")


def test_a_worker_processes_what_was_sent_by_reference_and_nothing_else() -> None:
    sent = {"media": [{"how": "shipped", "transport": "reference"}]}
    held = {"media": [{"how": "held", "transport": ""}]}
    shipped = {"media": [{"how": "shipped", "transport": "shm"}]}
    assert travelled("reference", sent, 1) == []
    assert travelled("reference", sent, 0)
    assert travelled("shm", shipped, 0) == []
    assert travelled("shm", shipped, 1)
    assert travelled("shm", held, 0) == []
    assert travelled("inline", shipped, 0)
