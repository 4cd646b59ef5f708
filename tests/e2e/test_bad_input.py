"""What users get wrong: a 4xx that names it, in vLLM's shape, and nothing left behind."""

import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from tests.by_version import since_033
from tests.clips import data_url, film
from tests.e2e.conftest import Endpoint
from tests.e2e.lab import leased
from tests.pictures import blank_picture, data_uri, picture


def chat(*parts: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}],
        "max_tokens": 2,
    } | options


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


Body: TypeAlias = dict[str, Any]

LARGE: dict[str, tuple[Callable[[], Body], str]] = {
    "image too large": (
        lambda: chat(image(data_uri(blank_picture(20_000)))), r"pixels|large|size"
    ),
    "images too long": (
        lambda: chat(*[image(data_uri(picture(f"long-{n}", (1024, 1024)))) for n in range(4)]),
        r"longer than the maximum model length|maximum context length",
    ),
}  # fmt: skip
"""Made when they are needed, since each process of a run imports this module."""

BAD: dict[str, tuple[Body, str]] = {
    "undecodable image": (chat(image("data:image/png;base64,bm90IGFuIGltYWdl")), r"image|picture"),
    "broken base64": (chat(image("data:image/png;base64,%%%")), r"."),
    "truncated image": (chat(image(data_uri(picture("cut")[:2000]))), r"cut off|truncated"),
    "unknown scheme": (chat(image("gopher://host/x.png")), r"URL|scheme"),
    "local file": (chat(image("file:///etc/passwd")), r"allowed-local-media-path|local"),
    "unreachable URL": (
        chat(image("http://127.0.0.1:9/x.png")),
        r"127\.0\.0\.1:9/x\.png: the server can.t be reached",
    ),
    "not found": (chat(image("{pictures}/missing.png")), r"404|Not Found"),
    "too many images": (chat(*[image(data_uri(picture("n")))] * 5), r"4 image|image\(s\)"),
    "prompt too long": (chat({"type": "text", "text": "river " * 9000}), r"maximum|length"),
    "unknown model": (chat(model="nobody"), r"nobody"),
    "bad parameter": (chat(temperature=-1), r"temperature"),
    "no messages": ({"model": "demo", "messages": []}, r"."),
    "grammar that ends nowhere": (
        chat(structured_outputs={"grammar": "root ::= root"}), r"structured outputs"
    ),
    "schema of itself": (chat(structured_outputs={"json": {"$ref": "#"}}), r"structured outputs"),
    "image cut off": (
        chat(image(data_uri(picture("cut off"))), truncate_prompt_tokens=2),
        r"no place for some of its media",
    ),
    "unknown decoder": (
        chat(
            {"type": "video_url", "video_url": {"url": data_url("video/mp4", film("decoder", 1))}},
            media_io_kwargs={"video": {"video_backend": "nothing"}},
        ),
        r"no video_backend 'nothing'",
    ),
}  # fmt: skip
NEEDS_TOO_MUCH = {
    "schema that needs too much": (
        chat(structured_outputs={"json": {"type": "array", "minItems": 100_000_000}}),
        r"the structure of the answer .* takes more than",
    )
}
BAD |= since_033({}, NEEDS_TOO_MUCH)  # another library takes it there, if none is in use already

OUR_OWN_WORDS = (
    "undecodable image",
    "broken base64",
    "truncated image",
    "unknown scheme",
    "local file",
    "unreachable URL",
    "not found",
    "image too large",
    "images too long",
    "grammar that ends nowhere",
    "schema of itself",
    "schema that needs too much",
    "image cut off",
    "unknown decoder",
)
"""Plain vLLM answers some of these with a 500, and others without the reason or with the
whole URL."""


@pytest.mark.parametrize("name", [*BAD, *LARGE])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_request_is_named(
    router: Endpoint, plain: Endpoint, pictures_url: str, name: str, stream: bool
) -> None:
    if name in LARGE:
        make, complaint = LARGE[name]
        body = make()
    else:
        body, complaint = BAD[name]
    text = json.dumps(body | {"stream": stream}).replace("{pictures}", pictures_url)
    reply = router.http.post(
        "/v1/chat/completions", content=text, headers={"Content-Type": "application/json"}
    )
    assert 400 <= reply.status_code < 500, reply.text
    error = reply.json()["error"]
    assert re.search(complaint, error["message"]), error["message"]
    assert "Traceback" not in reply.text
    if name not in OUR_OWN_WORDS:
        theirs = plain.http.post(
            "/v1/chat/completions", content=text, headers={"Content-Type": "application/json"}
        )
        expected = theirs.json()["error"]
        if "maximum context length" in expected["message"] or "longer than" in expected["message"]:
            expected["code"] = "context_length_exceeded"
        assert (reply.status_code, error) == (theirs.status_code, expected)
    assert leased(router) == 0


def test_wrong_json(router: Endpoint) -> None:
    reply = router.http.post(
        "/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400
    assert "message" in reply.json()["error"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bad_schema_is_named(router: Endpoint, plain: Endpoint, stream: bool) -> None:
    """vLLM finds it when generation starts, and its streams carry it as an event; ours have no
    first byte by then, so that the status still tells.
    """
    schema = {"name": "x", "schema": {"type": "nonsense"}}
    body = chat(response_format={"type": "json_schema", "json_schema": schema}, stream=stream)
    ours, theirs = (e.http.post("/v1/chat/completions", json=body) for e in (router, plain))
    first = theirs.text.removeprefix("data: ").splitlines()[0]
    assert (ours.status_code, ours.json()) == (400, json.loads(first))
    assert "nonsense" in ours.text and "400" in ours.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    ],
)
def test_what_a_model_that_generates_is_not_for(
    router: Endpoint, plain: Endpoint, path: str
) -> None:
    body = {"model": "demo", "input": "a", "queries": "a", "documents": ["b"]}
    ours, theirs = (each.http.post(path, json=body) for each in (router, plain))
    assert ours.status_code == theirs.status_code == 404
    assert f"no POST {path} for what is served here" in ours.json()["error"]["message"]
