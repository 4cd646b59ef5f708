"""Forms: what clients' libraries send is read as Starlette reads it, and the rest is refused."""

from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI, Form, UploadFile
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, Headers
from starlette.datastructures import UploadFile as File
from starlette.formparsers import MultiPartParser
from starlette.requests import Request

from common.errors import RequestRejectedError
from frontend.asgi import Door
from frontend.gate import BodyGate, take_parsed_bodies
from frontend.gate.forms import MAX_HEAD_BYTES, MAX_PARTS, MAX_TEXT_BYTES, read_form, texts_of
from frontend.http.limits.admission import Admission
from frontend.http.settings import HttpSettings

KIND = "multipart/form-data; boundary=x"
NAMED = b'Content-Disposition: form-data; name="a"'
FILE = NAMED + b'; filename="f"'


def part(head: bytes = NAMED, data: bytes = b"") -> bytes:
    return b"--x\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


async def contents(form: FormData) -> list[tuple[str, Any]]:
    return [
        (name, (value.filename, value.size, value.headers.raw, await value.read()))
        if isinstance(value, File)
        else (name, value)
        for name, value in form.multi_items()
    ]


@pytest.mark.parametrize(
    ("data", "files"),
    [
        ({"a": "1", "b[]": ["x", "y"]}, {"file": ("ä.wav", b"\r\n--x" * 1000)}),
        ({"text": "ä \U0001f600\r\n\r\n"}, {"one": ("", b""), "two": ('"\\;', b"-" * 2_000_000)}),
        ({}, [("same", ("a\r\nb", b"1")), ("same", ("../../a\0", b"2", "audio/wav; q=1"))]),
    ],
    ids=["usual", "odd", "same"],
)  # fmt: skip
async def test_it_is_read_as_by_starlette(data: Any, files: Any) -> None:
    sent = httpx.Request("POST", "http://f", data=data, files=files)
    content, kind = sent.read(), sent.headers["content-type"]

    async def stream() -> Any:
        yield content

    theirs = await MultiPartParser(Headers({"content-type": kind}), stream()).parse()
    assert await contents(read_form(content, kind)) == await contents(theirs)
    await theirs.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begin with its boundary"),
        (b"junk" + part() + b"--x--", "begin with its boundary"),
        (part(), "last boundary"),
        (part(data=b"\r\n--y" * 100), "last boundary"),
        (b"--x\r\n" + NAMED, "no headers"),
        (b"--x\r\n\r\n\r\n--x--", "no `name`"),
        (b"--xx\r\n" + NAMED + b"\r\n\r\n\r\n--x--", "no headers"),
        (part(b"Content-Disposition: form-data") + b"--x--", "no `name`"),
        (part(b"a: b\r\n" * (1 << 20) + NAMED) + b"--x--", "8192 bytes"),
        (part(b"a" * MAX_HEAD_BYTES + NAMED) + b"--x--", "8192 bytes"),
        (part() * (MAX_PARTS + 1) + b"--x--", "256 parts"),
        (part(FILE) * (MAX_PARTS + 1) + b"--x--", "256 parts"),
        (part() * (1 << 17) + b"--x--", "256 parts"),
        (part(data=b"a" * (MAX_TEXT_BYTES + 1)) + b"--x--", "bytes"),
        (b"--x\r\n" * (1 << 20), "no headers"),
        (b"\r\n" * (1 << 20) + part() + b"--x--", "begin with its boundary"),
        (part(NAMED + b";" * 4096) * 200 + b"--x--", "too many parameters"),
    ],
)
def test_what_is_none_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(RequestRejectedError, match=said):
        read_form(content, KIND)


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        f"multipart/form-data; boundary={'x' * 71}",
        "multipart/form-data; boundary=x; charset=punycode",
        "multipart/form-data; boundary=x; charset=utf-7",
    ],
)
def test_kinds_that_cant_be_read_are_refused(kind: str) -> None:
    with pytest.raises(RequestRejectedError, match=r"boundary|UTF-8"):
        read_form(part() + b"--x--", kind)


def test_as_many_parts_as_allowed_are_taken() -> None:
    assert len(read_form(part() * MAX_PARTS + b"--x--\r\n", KIND).multi_items()) == MAX_PARTS


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "multipart/mixed; boundary=x"]
)
def test_other_kinds_have_no_fields(kind: str) -> None:
    """Eight megabytes of which took four seconds of the event loop."""
    assert read_form(b"&" * (8 << 20), kind) == FormData()


def test_of_a_field_that_comes_twice_the_last_is_judged() -> None:
    several = b"".join(
        part(NAMED.replace(b'"a"', b'"%s"' % name), data)
        for name, data in ((b"a", b"1"), (b"a", b"2"), (b"l[]", b"3"), (b"l[]", b"4"))
    )
    form = read_form(several + part(FILE, b"5") + b"--x--", KIND)
    assert texts_of(form) == {"a": "2", "l": ["3", "4"]}


class Asked(BaseModel):
    file: UploadFile
    n: int = 1
    levels: list[str] = Field(alias="levels[]", default=[])


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setattr(Request, "json", Request.json)  # put back afterwards
    monkeypatch.setattr(Request, "form", Request.form)
    take_parsed_bodies()
    app = FastAPI()

    @app.post("/form")
    async def form(asked: Annotated[Asked, Form()]) -> Any:
        content = await asked.file.read()
        return [asked.file.filename, len(content), asked.n, asked.levels]

    @app.post("/json")
    async def json(body: dict[str, Any]) -> Any:
        return body

    door = Door(app, [Admission(HttpSettings()), BodyGate(max_choices=4)])
    return TestClient(door, raise_server_exceptions=False)


def test_an_app_gets_what_was_read(client: TestClient) -> None:
    reply = client.post(
        "/form", data={"n": "3", "levels[]": ["a", "b"]}, files={"file": ("f", b"-" * (2 << 20))}
    )
    assert reply.json() == ["f", 2 << 20, 3, ["a", "b"]]


def test_fields_of_a_form_have_the_limits_of_all_fields(client: TestClient) -> None:
    for data in (
        {"n": "5"}, {"n": ["1", "5"]}, {"n": "5", "n[]": "1"}, {"n[]": "1", "n": "5"},
        {"language": "x" * 8193},
    ):  # fmt: skip
        reply = client.post("/form", data=data, files={"file": b""})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/form", "/json"])
def test_a_form_is_no_json_and_json_no_form(client: TestClient, path: str) -> None:
    other = {"data": {"n": "1"}, "files": {"file": b""}} if path == "/json" else {"json": {"n": 1}}
    assert client.post(path, **other).status_code == 422
    assert client.post(path, data={"n": "1"}).status_code == 422
