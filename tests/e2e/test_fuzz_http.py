"""The HTTP API against requests that nobody would write: never a 5xx, and nothing stays.

Once from vLLM's own OpenAPI description of the app that the frontend serves, and once
from good requests with one value replaced, which get further.
"""

import contextlib
import copy
import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e.conftest import Endpoint
from tests.fakes.damage import SCALARS, replaced
from tests.pictures import data_uri, picture

PATHS = (
    r"^/(v1/(chat/completions|completions|responses|messages|messages/count_tokens|models)"
    r"|tokenize|detokenize|mmrouter/.*)$"
)
OPERATORS = r"^/mmrouter/workers/.+"
"""These take workers out, or have them forget or sleep, which they should."""

NOT_IMPLEMENTED = 501
"""The one 5xx that is an answer: a feature that a fleet of engines does not have."""

FUZZ = settings(
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=True,  # a suite must not fail by chance; look further with another seed
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)


@pytest.fixture
def unharmed(router: Endpoint) -> Iterator[None]:
    """Afterwards workers, memory and the frontend's own requests are as before."""
    workers = {name: view["incarnation"] for name, view in router.workers().items()}
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        views = router.workers()
        if not any(view["active_requests"] or view["running"] for view in views.values()):
            break
        time.sleep(0.2)
    views = router.workers()
    assert {name: view["incarnation"] for name, view in views.items()} == workers
    assert all(view["connected"] for view in views.values())
    assert not any(view["active_requests"] or view["running"] for view in views.values())
    metrics = router.http.get("/metrics").text
    assert "mmrouter_arena_leases 0.0" in metrics
    reply = router.http.post(
        "/v1/completions", json={"model": "demo", "prompt": "still there?", "max_tokens": 2}
    )
    assert reply.status_code == 200


def tame(body: Any) -> None:
    """Keep what is generated short. Most requests are refused before that."""
    if isinstance(body, dict):
        body.setdefault("model", "demo")
        for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if not isinstance(body.get(limit), str | list | dict | float):
                body[limit] = min(body.get(limit) or 4, 4)
        for count in ("n", "best_of", "min_tokens"):
            if isinstance(body.get(count), int) and body[count] > 4:
                body[count] = 4


def check(status: int, text: str, sent: str) -> None:
    assert status < 500 or status == NOT_IMPLEMENTED, f"{sent[:2000]}\n{text[:500]}"
    if status >= 400:
        assert text, "an error says something"


@pytest.mark.usefixtures("unharmed")
def test_what_the_description_allows(router: Endpoint) -> None:
    import schemathesis  # seconds, which no other test needs
    from schemathesis.core.result import Ok

    schema = schemathesis.openapi.from_url(f"{router.url}/openapi.json", timeout=60)
    answers: Counter[str] = Counter()
    for found in (
        schema.include(path_regex=PATHS).exclude(path_regex=OPERATORS).get_all_operations()
    ):
        assert isinstance(found, Ok), found
        operation = found.ok()

        @given(operation.as_strategy())
        @FUZZ
        def fuzz(case: schemathesis.Case[Any]) -> None:
            tame(case.body)
            reply = case.call(base_url=router.url, timeout=60)
            answers[case.operation.label] += 1
            check(reply.status_code, reply.text, case.as_curl_command())

        fuzz()
    assert {"POST /v1/chat/completions", "GET /mmrouter/decisions"} <= answers.keys()


PICTURE = {"type": "image_url", "image_url": {"url": data_uri(picture("fuzz"))}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}, PICTURE]},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["x"],
        "seed": 1,
        "n": 1,
        "logit_bias": {"5": 1.0},
        "stream": False,
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"a": 1},
        "priority": 0,
    },
    "/v1/completions": {
        "prompt": "one two three",
        "echo": False,
        "suffix": None,
        "logprobs": 1,
        "prompt_logprobs": None,
        "truncate_prompt_tokens": 10,
        "structured_outputs": {"choice": ["a", "b"]},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "what?"}]}],
        "instructions": "be brief",
        "truncation": "auto",
        "store": False,
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 4,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}]}],
        "system": "be brief",
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
    "/tokenize": {"prompt": "one two", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("path", GOOD)
def test_a_good_request_with_one_value_replaced(router: Endpoint, path: str) -> None:
    good = GOOD[path] | {"model": "demo", "max_tokens": 4}
    reply = router.http.post(path, json=good)
    assert reply.status_code == 200, reply.text

    @given(st.data())
    @settings(FUZZ, max_examples=60)
    def fuzz(data: st.DataObject) -> None:
        body = data.draw(st.composite(lambda draw: replaced(draw, copy.deepcopy(good), SCALARS))())
        tame(body)
        # NaN, infinities and lone surrogates too, which are no JSON.
        content = json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")
        headers = {"Content-Type": "application/json"}
        reply = router.http.post(path, content=content, headers=headers)
        check(reply.status_code, reply.text, str(body))

    fuzz()


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("path", GOOD)
def test_bodies_that_are_no_requests(router: Endpoint, path: str) -> None:
    for body in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"a":' * 2000,
        b"1e999",
        b'{"model":NaN}',
    ):
        for kind in ("application/json", "text/plain", "multipart/form-data", ""):
            with contextlib.suppress(httpx.ReadError):
                reply = router.http.post(path, content=body, headers={"Content-Type": kind})
                assert 400 <= reply.status_code < 500, reply.text[:500]
