"""Operations on real engines, through a frontend that others share: each leaves them serving."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Endpoint
from tests.e2e.lab import ask, image, text, words
from tests.pictures import data_uri, picture

W0 = "/mmrouter/workers/w0"


class Operator:
    """An operator on the host of the shared frontend."""

    def __init__(self, router: Endpoint) -> None:
        self.router = router
        self.http = httpx.Client(base_url=router.url, timeout=120)

    def do(self, path: str, status: int = 200, **more: Any) -> dict[str, Any]:
        answer = self.http.post(path, **more)
        assert answer.status_code == status, answer.text
        return dict(answer.json())

    def message(self, path: str, **more: Any) -> str:
        (part,) = self.do(path, 409, **more)["workers"]
        assert part["outcome"] == "refused"
        return str(part["message"])

    def condition(self) -> str:
        return str(self.router.workers()["w0"]["condition"])

    def ask(self, name: str) -> tuple[str, dict[str, Any]]:
        """A request about a picture: its text and what was decided."""
        content = [image(data_uri(picture(name))), words("What is in this picture? " * 8)]
        response = ask(self.router, content, max_tokens=8)
        return text(response), dict(self.router.decision(response.id))


@pytest.fixture
def operator(router: Endpoint) -> Iterator[Operator]:
    made = Operator(router)
    yield made
    made.do("/mmrouter/workers/wake_up")
    made.http.close()


def exact(decision: dict[str, Any]) -> bool:
    return bool(decision["predicted_cached_tokens"] == decision["realised_cached_tokens"])


def test_what_is_predicted_after_caches_were_emptied_is_so(
    operator: Operator,
) -> None:
    before, _ = operator.ask("operations")
    again, second = operator.ask("operations")
    assert second["predicted_cached_tokens"] > 0 and exact(second)
    where = f"/mmrouter/workers/{second['worker_id']}"
    other = {"w0": "w1", "w1": "w0"}[str(second["worker_id"])]
    for path in (f"{where}/reset_prefix_cache", f"{where}/reset_mm_cache", f"{where}/pause"):
        operator.do(path)
    answer, elsewhere = operator.ask("operations")
    assert elsewhere["worker_id"] == other
    operator.do(f"{where}/resume")
    operator.do(f"/mmrouter/workers/{other}/pause")
    # No step of the engine told of the clearing yet, and its media are to be sent again.
    there, emptied = operator.ask("operations")
    assert emptied["worker_id"] == second["worker_id"]
    assert emptied["predicted_cached_tokens"] == emptied["realised_cached_tokens"] == 0
    assert [move["how"] for move in emptied["media"]] == ["shipped"]
    last, known = operator.ask("operations")
    assert known["predicted_cached_tokens"] > 0 and exact(known)
    assert before == again == answer == there == last


def test_an_engine_on_cpu_pauses_and_says_that_it_can_give_back_no_memory(
    operator: Operator,
) -> None:
    assert "--enable-sleep-mode" in operator.message(f"{W0}/sleep?level=1")
    assert "--enable-sleep-mode" in operator.message(f"{W0}/release_kv_cache_memory")
    assert operator.condition() == "serving"
    operator.do(f"{W0}/sleep?level=0")
    assert operator.condition() == "asleep"
    _, decision = operator.ask("asleep")
    assert decision["worker_id"] == "w1"
    operator.do(f"{W0}/wake_up")
    assert operator.condition() == "serving"


def test_weights_are_read_again_and_answers_stay_what_they_were(operator: Operator) -> None:
    before, _ = operator.ask("weights")
    assert "pause it first" in operator.message(f"{W0}/reload_weights")
    operator.do("/mmrouter/workers/pause")
    operator.do("/mmrouter/workers/reload_weights")
    operator.do("/mmrouter/workers/resume")
    after, decision = operator.ask("weights")
    assert after == before
    assert decision["predicted_cached_tokens"] == decision["realised_cached_tokens"] == 0


def test_a_worker_without_a_profiler_says_so(operator: Operator) -> None:
    assert "--profiler-config" in operator.message(f"{W0}/start_profile")
    assert operator.do(f"{W0}/reset_encoder_cache")["workers"][0]["outcome"] == "done"
